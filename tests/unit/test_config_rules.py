"""Deployment values that contradict each other, each with its whole error message."""

from dataclasses import replace
from pathlib import Path

import pytest

from fleet.config import FleetConfig
from fleet.config.rules import RULES
from fleet.config.yaml_text import parse_yaml
from fleet.core.ids import CLIENT
from fleet.graphs import GRAPHS
from tests.unit.bad_config import MISSING_STAGE, Case, refusal_of
from tests.unit.bad_config_devices import DEVICES

TOGETHER: tuple[Case, ...] = (
    (
        "a certificate without its key",
        "web: {tls_cert: a_file}",
        "web.tls_cert: web.tls_key is missing; set both, or neither",
    ),
    (
        "an alias that is the model's name",
        "web: {model_name: omni, model_aliases: [tts-1, omni]}",
        "web.model_aliases: 'omni' is web.model_name, under which the model answers anyway; "
        "remove it",
    ),
    (
        "an unused setting of a stage",
        "stages: {code2wav: {extra: {left_contex: 25}}}",
        "stages.code2wav.extra.left_contex: the builder of code2wav reads left_context with "
        "engine torch; remove it; "
        "did you mean left_context?",
    ),
    (
        "an engine of another stage",
        "graph: cascade\nstages: {lm: {engine: ctranslate2}}",
        "stages.lm.engine: ctranslate2 does not serve lm; use torch or vllm",
    ),
    (
        "a setting of the fake engine",
        "stages: {talker: {extra: {step_ms: 80}}}",
        "stages.talker.extra.step_ms: the builder of talker reads no settings with engine "
        "torch; remove it",
    ),
    (
        "one port for two",
        "web: {port: 6399}\nredis: {port: 6399}",
        "redis.port: 6399 is also web.port; choose another port for one of them",
    ),
    (
        "leases against each other",
        "lease: {claim_timeout_s: 5, no_worker_timeout_s: 4}",
        "lease.no_worker_timeout_s: 4 is shorter than lease.claim_timeout_s, which is 5: a "
        "request would fail before its "
        "task was offered again; raise it, or lower lease.claim_timeout_s",
    ),
    (
        "a request larger than the arena",
        "transfer: {arena_mib: 16, request_cap_mib: 32}",
        "transfer.request_cap_mib: one request may hold 32 MiB, but transfer.arena_mib is 16; "
        "lower it, or "
        "raise transfer.arena_mib",
    ),
    (
        "a pool too small for a prompt",
        "stages: {thinker: {kv_pages: 8}}",
        "stages.thinker.kv_pages: 8 pages of 16 (page_size_tokens) hold 128 positions, and a "
        "prompt of limits.max_prompt_tokens "
        "(8192) needs 8193; set at least 513, or lower that limit",
    ),
    (
        "a pool too small for an answer",
        "stages: {talker: {kv_pages: 8, sampling: {max_tokens: 300}}}",
        "stages.talker.kv_pages: 8 pages of 16 (page_size_tokens) hold 128 positions, and an "
        "answer of sampling.max_tokens "
        "(300) needs 301; set at least 19, or lower that limit",
    ),
    (
        "an answer beyond the limit",
        "stages: {thinker: {sampling: {max_tokens: 5000}}}",
        "stages.thinker.sampling.max_tokens: 5000 exceeds limits.max_answer_tokens, which is "
        "4096; lower it, or raise the "
        "limit",
    ),
    (
        "sampling where nothing is drawn",
        "stages: {code2wav: {sampling: {temperature: 1}}}",
        "stages.code2wav.sampling: code2wav does not sample, so the section has no effect; "
        "remove it",
    ),
    (
        "pages where nothing is cached",
        "stages: {code2wav: {kv_pages: 64}}",
        "stages.code2wav.kv_pages: code2wav has no KV cache, so the key has no effect; remove it",
    ),
    (
        "a split trainer",
        "{training: {enabled: true}, stages: {trainer: {split: {}}}}",
        "stages.trainer.split: trainer has no prefill to split from its decode; only thinker, "
        "talker can be split",
    ),
    (
        "an unused ramp",
        "edges: {text: {policy: {kind: each, ramp: [4]}}}",
        "edges.text.policy.ramp: kind each does not use a ramp; set kind: ramp, or remove it",
    ),
    (
        "a list of devices for a split stage",
        "stages: {talker: {device: ['cuda:0'], split: {}}}",
        "stages.talker.device: a split stage has no workers of its own; set "
        "split.prefill.device and split.decode.device "
        "instead",
    ),
    (
        "a list of devices for a worker of several",
        "{graph: text, engine: vllm, stages: {lm: {device: ['cuda:0'], vllm: "
        "{tensor_parallel_size: 2}}}}",
        "stages.lm.device: one worker uses 2 devices itself (vllm.tensor_parallel_size); set "
        "one device, or "
        "tensor_parallel_size: 1",
    ),
    (
        "a GPU given away more than once",
        "stages: {thinker: {gpu_memory_utilization: 0.7}, talker: {device: 'cuda:0', standby: "
        "1, gpu_memory_utilization: 0.2}}",
        "stages.thinker.gpu_memory_utilization: workers on cuda:0 have 1.1 of it together (1 x "
        "0.7 thinker, 2 x 0.2 talker); "
        "lower them to 1 or less, or set another device",
    ),
    (
        "a GPU given away to replicas of a list",
        "stages: {talker: {replicas: 3, device: [cuda, 'cuda:1'], gpu_memory_utilization: 0.6}}",
        "stages.talker.gpu_memory_utilization: workers on cuda:0 have 1.2 of it together (2 x "
        "0.6 talker); lower them to 1 or "
        "less, or set another device",
    ),
    (
        "a GPU given away to a half of a stage",
        "{device: cuda, "
        "stages: {talker: {split: {prefill: {gpu_memory_utilization: 0.9}, decode: "
        "{gpu_memory_utilization: 0.2}}}}}",
        "stages.talker.split.prefill.gpu_memory_utilization: workers on cuda:0 have 1.1 of it "
        "together (1 x 0.9 talker.prefill, "
        "1 x 0.2 talker.decode); lower them to 1 or less, or set another device",
    ),
    (
        "nothing left of a GPU",
        "stages: {thinker: {gpu_memory_utilization: 0.95}}",
        "stages.talker.gpu_memory_utilization: other workers on cuda:0 leave nothing of 0.9 (1 "
        "x 0.95 thinker); set it, lower "
        "theirs, or set another device",
    ),
    (
        "a GPU's memory on a CPU",
        "{device: cpu, transfer: {buffer_device: cuda}, stages: {talker: {split: {}}}}",
        "transfer.buffer_device: talker.prefill computes on a CPU, which has no such memory; "
        "set auto, or another device",
    ),
    (
        "a GPU's memory through Redis",
        "transfer: {buffer_device: cuda, kind: redis}",
        "transfer.buffer_device: transfer.kind redis sends copies in host memory; set "
        "transfer.kind: nixl, or "
        "buffer_device: auto",
    ),
    (
        "a default pool too small for a prompt",
        "{device: cpu, limits: {max_prompt_tokens: 20000}}",
        "stages.thinker.kv_pages: 1024 pages of 16 (page_size_tokens) hold 16384 positions, and "
        "a prompt of "
        "limits.max_prompt_tokens (20000) needs 20001; set at least 1251, or lower that limit",
    ),
    (
        "a split of what has one walk",
        "stages: {code2wav: {split: {}}}",
        "stages.code2wav.split: code2wav has no prefill to split from its decode; only thinker, "
        "talker can be split",
    ),
    (
        "an engine of another stage for all stages",
        "engine: vllm",
        "stages.talker.engine: vllm does not serve talker; use torch",
    ),
    (
        "an engine of another stage",
        "stages: {talker: {engine: vllm}}",
        "stages.talker.engine: vllm does not serve talker; use torch",
    ),
    (
        "vllm with invariant numerics",
        "{graph: text, engine: vllm, numerics: invariant}",
        "stages.lm.engine: vllm has no invariant numerics; use torch, or numerics: fast",
    ),
    (
        "settings of vllm with another engine",
        "stages: {thinker: {vllm: {kv_mib: 512}}}",
        "stages.thinker.vllm.kv_mib: thinker runs on torch, which does not use it; set "
        "stages.thinker.engine: vllm, or remove "
        "it",
    ),
    (
        "settings of vllm where it does not serve",
        "stages: {code2wav: {vllm: {quantization: fp8}}}",
        "stages.code2wav.vllm.quantization: code2wav runs on torch, which does not use it; "
        "remove it",
    ),
    (
        "several devices on a CPU",
        "{device: cpu, stages: {thinker: {engine: vllm, vllm: {tensor_parallel_size: 2}}}}",
        "stages.thinker.vllm.tensor_parallel_size: 2 devices share the model, and thinker runs "
        "on cpu; set 1, or device: cuda",
    ),
    (
        "several devices on a half's CPU",
        "{dtype: float32, stages: {thinker: {engine: vllm, split: {decode: {device: cpu}}, "
        "vllm: {tensor_parallel_size: 2}}}}",
        "stages.thinker.vllm.tensor_parallel_size: 2 devices share the model, and "
        "thinker.decode runs on cpu; set 1, or "
        "device: cuda",
    ),
    (
        "halves on vllm without NIXL",
        "{transfer: {kind: redis}, stages: {thinker: {engine: vllm, split: {}}}}",
        "transfer.kind: the halves of thinker on vLLM exchange keys and values by NIXL; set "
        "auto or nixl, or "
        "stages.thinker.engine: torch",
    ),
    (
        "halves on vllm in two kinds of memory",
        "{dtype: float32, device: 'cuda:1', stages: {thinker: {engine: vllm, split: {prefill: "
        "{device: cpu}}}}}",
        "stages.thinker.split: runs thinker.prefill on cpu and thinker.decode on cuda, but "
        "vLLM's halves read each other's "
        "blocks; set cpu, or CUDA devices, for both",
    ),
    (
        "workers of a split stage",
        "stages: {talker: {replicas: 2, split: {}}}",
        "stages.talker.replicas: a split stage has no workers of its own; set "
        "split.prefill.replicas and split.decode.replicas "
        "instead",
    ),
    (
        "a standby of a split stage",
        "stages: {talker: {standby: 1, split: {}}}",
        "stages.talker.standby: a split stage has no workers of its own; set "
        "split.prefill.standby or split.decode.standby "
        "instead",
    ),
    (
        "drafts of what draws no tokens",
        "stages: {talker: {speculation: {drafter: ngram}}}",
        "stages.talker.speculation.drafter: no drafter guesses the output of talker; set off",
    ),
    (
        "drafts on another engine",
        "stages: {thinker: {engine: vllm, speculation: {drafter: suffix}}}",
        "stages.thinker.speculation.drafter: drafts are verified by the engine torch, not by "
        "vllm; set engine: torch, or off",
    ),
    (
        "a draft head that is not named",
        "stages: {thinker: {speculation: {drafter: eagle3}}}",
        "stages.thinker.speculation.head: eagle3 guesses with a draft head; name its folder, "
        "set training.enabled: true, or "
        "another drafter",
    ),
    (
        "drafts of divided layers",
        "{graph: text, stages: {lm: {spans: {anchor: 0:13, workers: [14:output]}, speculation: "
        "{drafter: ngram}}}}",
        "stages.lm.speculation.drafter: drafts are not sent to span workers; set off, or remove "
        "spans",
    ),
    (
        "layers of what has none",
        "stages: {code2wav: {spans: {anchor: 0:output}}}",
        "stages.code2wav.spans: the layers of code2wav cannot be divided; remove spans",
    ),
    (
        "an anchor with the first layers alone",
        "{graph: text, stages: {lm: {spans: {anchor: 0:13}}}}",
        "stages.lm.spans.workers: no worker has the layers after 13; list the spans of workers "
        "for them",
    ),
    (
        "a file for the checkpoint",
        "checkpoint: a_file",
        "checkpoint: a_file is a file; set its folder, with config.json and the weights",
    ),
    (
        "an unknown user's home for the checkpoint",
        "checkpoint: ~no-such-user/x",
        "checkpoint: there is no home folder ~no-such-user; write the full path",
    ),
    (
        "a folder in a file",
        "redis: {data_dir: a_file/redis}",
        "redis.data_dir: a_file is a file; set a folder",
    ),
)

TRAINING: tuple[Case, ...] = (
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

NAMES: tuple[Case, ...] = (
    (
        "a stage that is not there",
        "stages: {vocoder: {replicas: 1}}",
        f"stages.vocoder: {MISSING_STAGE}",
    ),
    (
        "a checkpoint of one stage in a graph that has one checkpoint",
        "stages: {thinker: {checkpoint: /models/thinker}}",
        "stages.thinker.checkpoint: the stages of graph qwen3_omni share one checkpoint; set "
        "checkpoint",
    ),
    (
        "a tiny checkpoint of one stage",
        "graph: cascade\nstages: {lm: {checkpoint: tiny}}",
        "stages.lm.checkpoint: tiny is a checkpoint of all stages; set it as checkpoint, or a "
        "folder or hub name here",
    ),
    (
        "a checkpoint of one stage that is a file",
        f"graph: cascade\nstages: {{lm: {{checkpoint: {__file__}}}}}",
        f"stages.lm.checkpoint: {__file__} is a file; set its folder, with config.json and the "
        "weights",
    ),
    (
        "a graph with no similar name",
        "graph: other",
        "graph: unknown graph 'other'; use one of cascade, qwen3_omni, text",
    ),
)
SHARES: tuple[Case, ...] = (
    (
        "a weight of no address",
        "limits: {share_weights: {somebody: 2}}",
        "limits.share_weights.somebody: must be an IP address or a network, such as 127.0.0.1 or "
        "10.0.0.0/8",
    ),
    (
        "weights without shares",
        "limits: {fair_shares: false, share_weights: {10.0.0.1: 2}}",
        "limits.share_weights: fair_shares is false, so the weights have no effect; remove them",
    ),
)
CASES = (*NAMES, *TOGETHER, *DEVICES, *TRAINING, *SHARES)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("a_file").write_text("no folder")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "message"), [case[1:] for case in CASES], ids=[name for name, _, _ in CASES]
)
def test_contradiction_is_refused_in_one_line(text: str, message: str, folder: Path) -> None:
    assert refusal_of(folder, text).message == f"x.yaml: {message}"


def test_training_is_refused_for_a_graph_without_a_trainer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {stage.name for stage in GRAPHS["text"].stages}
    edges = tuple(
        edge for edge in GRAPHS["text"].edges if {edge.source, edge.target} <= {*own, CLIENT}
    )
    without = replace(GRAPHS["text"], optional_stages=(), edges=edges)
    monkeypatch.setitem(GRAPHS, "text", without)
    refused = refusal_of(folder, "{graph: text, training: {enabled: true}}").message
    assert "training.enabled: the graph text declares no trainer; set false" in refused


def test_every_rule_is_broken_by_a_case() -> None:
    """Every rule is broken by a case; a rule without a case could stop refusing and no test would
    fail.
    """
    wrong = [FleetConfig.model_validate(parse_yaml(text)) for _, text, _ in CASES]
    broken = {next(rule for rule in RULES if any(rule(config))) for config in wrong}
    assert broken == set(RULES)
