"""Deployments whose spans of layers are refused, each with the message."""

SPANS: tuple[tuple[str, str, str], ...] = (
    ("spans of a stage that cannot be divided", "stages: {code2wav: {spans: {}}}",
        "stages.code2wav.spans: the layers of code2wav cannot be divided; only those of no stage can"),
    ("spans beside a split", "{graph: text, stages: {lm: {split: {}, spans: {anchor: 0:1, workers: [2:output]}}}}",
        "stages.lm.spans: a stage is divided by layers or by prefill and decode, not by both; remove spans or split"),
    ("spans on vllm", "{graph: text, engine: vllm, stages: {lm: {spans: {anchor: 0:1, workers: [2:output]}}}}",
        "stages.lm.spans: the engine vllm has no spans of layers; set torch, or remove spans"),
    ("rows of invariant spans in fewer bits",
        "{graph: text, numerics: invariant, stages: {lm: {spans: {anchor: 0:1, workers: [2:output], wire_dtype: bfloat16}}}}",
        "stages.lm.spans.wire_dtype: numerics: invariant sends rows in float32, not bfloat16; set auto or float32"),
    ("an anchor without the output head", "{graph: text, stages: {lm: {spans: {anchor: 20:27, workers: [0:19]}}}}",
        "stages.lm.spans.anchor: 20:27 has neither the embedding nor the output head; an anchor's span must end with the output "
        "head (20:output) or begin with the embedding (0:27)"),
    ("an anchor in the middle", "{graph: text, stages: {lm: {spans: {anchor: 5:10, workers: []}}}}",
        "stages.lm.spans.anchor: 5:10 has neither the embedding nor the output head; an anchor's span must end with the output "
        "head (5:output) or begin with the embedding (0:10)"),
    ("gaps between spans", "{graph: text, stages: {lm: {spans: {anchor: 0:1, workers: [3:4, 7:output]}}}}",
        "stages.lm.spans.workers: no worker has layers 2, 5 to 6, and the anchor, 0:1, does not have them"),
    ("spans that overlap", "{graph: text, stages: {lm: {spans: {anchor: 0:1, workers: [2:4, 4:6, 7:output]}}}}",
        "stages.lm.spans.workers: no worker has layers 5 to 6, and the anchor, 0:1, does not have them; 4:6 overlaps 2:4 of "
        "worker 1"),
    ("a span twice", "{graph: text, stages: {lm: {spans: {anchor: 0:1, workers: [2:output, 2:output]}}}}",
        "stages.lm.spans.workers: 2:output repeats 2:output of worker 1; remove what is not used"),
    ("the head on a worker of a reverse anchor",
        "{graph: text, stages: {lm: {spans: {anchor: 4:output, workers: [0:1, 2:output]}}}}",
        "stages.lm.spans.workers: no worker has layers 2 to 3, and the anchor, 4:output, does not have them; 2:output has the "
        "output head, which is the anchor's"),
    ("workers beside a whole anchor", "{graph: text, stages: {lm: {spans: {anchor: 0:output, workers: [2:output]}}}}",
        "stages.lm.spans.workers: the anchor has all layers (0:output); give it fewer, or remove workers"),
)  # fmt: skip
"""Name, YAML, message."""
