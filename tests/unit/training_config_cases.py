"""Broken settings of training, each with its whole message; `test_config_bad` runs them."""

TRAINING: tuple[tuple[str, str, str], ...] = (
    (
        "captures on another engine",
        "{graph: text, engine: vllm, training: {enabled: true}}",
        "training.enabled: captures are computed by the engine torch, and lm has vllm; set "
        "engine: torch, or false",
    ),
    (
        "captures over span workers",
        "{graph: text, stages: {lm: {spans: {anchor: 0:13, workers: [14:output]}}}, training: "
        "{enabled: true}}",
        "training.enabled: captures are not computed by span workers; remove stages.lm.spans, "
        "or set false",
    ),
    (
        "captures through Redis",
        "{transfer: {kind: redis}, training: {enabled: true}}",
        "training.enabled: rows for training never pass through Redis; set transfer.kind: nixl, "
        "or false",
    ),
    (
        "a window of incomplete batches",
        "training: {enabled: true, window_samples: 8, batch_samples: 3}",
        "training.window_samples: 8 is no multiple of training.batch_samples, which is 3",
    ),
    (
        "two active trainers",
        "{training: {enabled: true}, stages: {trainer: {replicas: 2}}}",
        "stages.trainer.replicas: one trainer is active at a time; set 1, and standby for "
        "further ones",
    ),
    (
        "a trainer that holds less than a window",
        "{training: {enabled: true}, stages: {trainer: {max_batch: 4}}}",
        "stages.trainer.max_batch: holds fewer samples than a window has "
        "(training.window_samples: 8); raise it",
    ),
    (
        "a replay buffer below a window",
        "training: {enabled: true, replay_samples: 4}",
        "training.replay_samples: holds fewer samples than a window has "
        "(training.window_samples: 8); raise it",
    ),
)
"""A name, a file, and the whole message about it without the file's name."""
