"""Broken deployments, each with its whole message: every one names the field as the user wrote it,
and what to write instead.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_origin

import pytest
from pydantic import BaseModel

from fleet.config import FleetConfig, load_config
from fleet.config.rules import RULES
from fleet.config.schema import SamplingDefaults
from fleet.config.settings import read_settings
from fleet.config.yaml_text import parse_yaml
from fleet.core.errors import ConfigError
from tests.unit.training_config_cases import TRAINING

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{below}'] * 10)}]\n"
    for below, name in ("ab", "bc", "cd", "de", "ef", "fg", "gh", "hi")
)
OTHER_GRAPH = "graph: text\nstages: {talker: {threads: 2}}"
NOT_OF_THE_STAGES = "graph qwen3_omni has no such stage; it has thinker, talker, code2wav, trainer"

Case = tuple[str, str, str]
"""A name, a file, and the whole message about it without the file's name."""

SPELLING: tuple[Case, ...] = (
    (
        "an unknown key",
        "web: {nonsense: 1}",
        "web.nonsense: unknown key; remove it, or use one of host, port, allowed_hosts, "
        "allowed_origins, "
        "trusted_proxies, model_name, "
        "model_aliases, max_leading_silence_ms, read_only, open_metrics, max_connections, "
        "max_connections_per_address, "
        "header_timeout_s, body_timeout_s, send_timeout_s, body_memory_mib, tls, tls_cert, tls_key",
    ),
    ("a misspelt key", "grpah: text", "grpah: unknown key; did you mean graph?"),
    (
        "a key of a section at the top",
        "max_body_bytes: 4",
        "max_body_bytes: unknown key; did you mean limits.max_body_bytes?",
    ),
    (
        "a key of two sections at the top",
        "port: 8000",
        "port: unknown key; did you mean web.port or redis.port?",
    ),
    (
        "a key of a stage at the top",
        "kv_pages: 4",
        "kv_pages: unknown key; did you mean stages.NAME.kv_pages?",
    ),
    (
        "a dotted key",
        "web.port: 8000",
        "web.port: unknown key; dotted keys are for --set, in a file write each part as a section",
    ),
    (
        "a misspelt key of a section",
        "web: {prot: 8000}",
        "web.prot: unknown key; did you mean web.port?",
    ),
    (
        "a misspelt key of a stage",
        "stages: {talker: {max_bach: 1}}",
        "stages.talker.max_bach: unknown key; did you mean stages.talker.max_batch?",
    ),
    (
        "a walk that is no half",
        "stages: {talker: {split: {decod: {replicas: 1}}}}",
        "stages.talker.split.decod: unknown key; did you mean stages.talker.split.decode?",
    ),
    (
        "a misspelt key of a policy",
        "edges: {codes: {policy: {kind: each, rmap: [1]}}}",
        "edges.codes.policy.rmap: unknown key; did you mean edges.codes.policy.ramp?",
    ),
    (
        "a sampling field outside of sampling",
        "stages: {talker: {top_k: 5}}",
        "stages.talker.top_k: unknown key; did you mean stages.NAME.sampling.top_k?",
    ),
    (
        "a misspelt sampling field",
        "stages: {talker: {sampling: {temprature: 0.5}}}",
        "stages.talker.sampling.temprature: unknown key; did you mean "
        "stages.talker.sampling.temperature?",
    ),
    (
        "a Redis named in the file",
        "redis: {url: 'redis://:secret@elsewhere:6379'}",
        "redis.url: unknown key; set REDIS_URL in the environment to use a Redis that runs "
        "elsewhere",
    ),
    (
        "a stage that is not there",
        "stages: {vocoder: {replicas: 1}}",
        f"stages.vocoder: {NOT_OF_THE_STAGES}",
    ),
    (
        "a misspelt stage",
        "stages: {Talkre: {replicas: 1}}",
        f"stages.Talkre: {NOT_OF_THE_STAGES}; did you mean talker?",
    ),
    (
        "a stage of another graph",
        OTHER_GRAPH,
        "stages.talker: graph text has no such stage; it has lm, trainer; did you mean trainer?",
    ),
    (
        "a misspelt edge",
        "edges: {code: {credits: 1}}",
        "edges.code: graph qwen3_omni has no such edge; it has text, thought, codes, audio, "
        "features, trained; "
        "did you mean codes?",
    ),
    (
        "a graph that is not there",
        "graph: qwen3_omi",
        "graph: unknown graph 'qwen3_omi'; use one of qwen3_omni, text; did you mean qwen3_omni?",
    ),
    (
        "a graph with no similar name",
        "graph: other",
        "graph: unknown graph 'other'; use one of qwen3_omni, text",
    ),
    (
        "an engine that is not there",
        "engine: jax",
        "engine: 'jax' is not a known value; use torch, vllm or fake",
    ),
    (
        "a number format that is not there",
        "dtype: bf16",
        "dtype: 'bf16' is not a known value; use auto, float32, bfloat16 or float16; did you "
        "mean bfloat16?",
    ),
    (
        "a transfer that is not there",
        "transfer: {kind: nxil}",
        "transfer.kind: 'nxil' is not a known value; use auto, nixl or redis; did you mean nixl?",
    ),
    (
        "a source of transitions that is not there",
        "stages: {talker: {transition_source: consumer}}",
        "stages.talker.transition_source: 'consumer' is not a known value; use producer or "
        "conductor",
    ),
)

VALUES: tuple[Case, ...] = (
    (
        "no replica",
        "stages: {talker: {replicas: 0}}",
        "stages.talker.replicas: must be a whole number from 1 to 256 (got 0)",
    ),
    (
        "less than no standby",
        "stages: {talker: {standby: -1}}",
        "stages.talker.standby: must be a whole number from 0 to 256 (got -1)",
    ),
    (
        "no replica of half a stage",
        "stages: {talker: {split: {decode: {replicas: 0}}}}",
        "stages.talker.split.decode.replicas: must be a whole number from 1 to 256 (got 0)",
    ),
    (
        "a boolean for a count",
        "stages: {talker: {max_batch: true}}",
        "stages.talker.max_batch: must be a whole number from 1 to 4096 (got true)",
    ),
    (
        "text for a count",
        "stages: {talker: {threads: '2'}}",
        "stages.talker.threads: must be a whole number from 1 to 1024 (got '2')",
    ),
    (
        "a fraction for a count",
        "stages: {talker: {kv_pages: 64.0}}",
        "stages.talker.kv_pages: must be a whole number from 1 to 10000000 (got 64.0)",
    ),
    (
        "pages without room",
        "stages: {talker: {page_size_tokens: 0}}",
        "stages.talker.page_size_tokens: must be a whole number from 1 to 1024 (got 0)",
    ),
    (
        "a huge count",
        f"retention_s: 0x{'f' * 9000}",
        "retention_s: must be a whole number from 1 to 31536000 (got a number of 36000 bits)",
    ),
    (
        "no number of seconds",
        "lease: {worker_ttl_s: .nan}",
        "lease.worker_ttl_s: must be a number from 0.1 to 3600 (got nan)",
    ),
    (
        "endless seconds",
        "transfer: {deadline_s: .inf}",
        "transfer.deadline_s: must be a number from 0.01 to 3600 (got inf)",
    ),
    (
        "a lease shorter than a turn",
        "lease: {conductor_ttl_s: 0.1}",
        "lease.conductor_ttl_s: must be a number from 0.5 to 3600 (got 0.1)",
    ),
    (
        "no seconds of sound",
        "limits: {max_audio_s: 0}",
        "limits.max_audio_s: must be a number above 0 and at most 86400 (got 0)",
    ),
    ("a number for a switch", "async_chunk: 1", "async_chunk: must be true or false (got 1)"),
    (
        "no credits",
        "edges: {codes: {credits: 0}}",
        "edges.codes.credits: must be a whole number from 1 to 1000000 (got 0)",
    ),
    (
        "a ramp without sizes",
        "edges: {codes: {policy: {kind: ramp}}}",
        "edges.codes.policy.ramp: kind ramp needs the chunk sizes, such as [2, 4, 8, 16, 25] "
        "(got a list of 0)",
    ),
    (
        "a ramp of one number",
        "edges: {codes: {policy: {kind: ramp, ramp: 4}}}",
        "edges.codes.policy.ramp: must be a list, such as [2, 4, 8] (got 4)",
    ),
    (
        "a ramp with a step of nothing",
        "edges: {codes: {policy: {kind: ramp, ramp: [4, 0]}}}",
        "edges.codes.policy.ramp.1: must be a whole number from 1 to 1000000 (got 0)",
    ),
    (
        "a policy without its kind",
        "edges: {codes: {policy: {ramp: [2]}}}",
        "edges.codes.policy.kind: is missing; set it to each, ramp or all",
    ),
    (
        "no port",
        "web: {port: 70000}",
        "web.port: must be a port from 1 to 65535, or 0 for a free one (got 70000)",
    ),
    (
        "a port with its host",
        "web: {port: '127.0.0.1:80'}",
        "web.port: must be a port from 1 to 65535, or 0 for a free one (got '127.0.0.1:80')",
    ),
    (
        "an address for a host",
        "web: {host: 'http://localhost:8000'}",
        "web.host: must be a host name or an IP address alone, such as 127.0.0.1, 0.0.0.0 or "
        "localhost "
        "(got 'http://localhost:8000')",
    ),
    (
        "an impossible host",
        "web: {host: 999.1.1.1}",
        "web.host: must be a host name or an IP address alone, such as 127.0.0.1, 0.0.0.0 or "
        "localhost (got '999.1.1.1')",
    ),
    ("no host", "web: {host: ''}", "web.host: must not be empty (got '')"),
    (
        "an origin with a path",
        "web: {allowed_origins: ['https://app.example.com/chat']}",
        "web.allowed_origins.0: must be an origin alone, without user, path or default port; "
        "write https://app.example.com "
        "(got 'https://app.example.com/chat')",
    ),
    (
        "an origin with its default port",
        "web: {allowed_origins: ['http://[::1]:80']}",
        "web.allowed_origins.0: must be an origin alone, without user, path or default port; "
        "write http://[::1] "
        "(got 'http://[::1]:80')",
    ),
    (
        "an origin without its scheme",
        "web: {allowed_origins: [app.example.com]}",
        "web.allowed_origins.0: must be an origin with its scheme, such as "
        "https://app.example.com or http://localhost:3000, "
        "or * (got 'app.example.com')",
    ),
    (
        "a wildcard within an origin",
        "web: {allowed_origins: ['https://*.example.com']}",
        "web.allowed_origins.0: must be an origin: a scheme and one host, such as "
        "https://app.example.com; no * within it "
        "(got 'https://*.example.com')",
    ),
    (
        "the origin of no page",
        "web: {allowed_origins: ['null']}",
        "web.allowed_origins.0: null is the origin of files and sandboxed pages of any site; "
        "serve the page over http and list "
        "that (got 'null')",
    ),
    (
        "one origin for a list",
        "web: {allowed_origins: 'http://localhost:3000'}",
        "web.allowed_origins: must be a list, such as [http://localhost:3000] (got "
        "'http://localhost:3000')",
    ),
    (
        "an empty alias",
        "web: {model_aliases: ['']}",
        "web.model_aliases.0: must not be empty (got '')",
    ),
    (
        "no device",
        "stages: {talker: {device: gpu}}",
        "stages.talker.device: must be auto, cpu, cuda or cuda:N, such as cuda:0 (got 'gpu')",
    ),
    (
        "half a device",
        "device: 'cuda:'",
        "device: must be auto, cpu, cuda or cuda:N, such as cuda:0 (got 'cuda:')",
    ),
    (
        "a list of devices for all stages",
        "device: ['cuda:0']",
        "device: must be one device; a list of GPUs, one for each replica, is for "
        "stages.NAME.device (got a list of 1)",
    ),
    (
        "an empty list of devices",
        "stages: {talker: {device: []}}",
        "stages.talker.device: must be a device, or a list of GPUs, one for each replica, such "
        "as [cuda:0, cuda:1] "
        "(got a list of 0)",
    ),
    (
        "a CPU in a list of devices",
        "stages: {talker: {split: {decode: {device: ['cuda:0', cpu]}}}}",
        "stages.talker.split.decode.device: must be a device, or a list of GPUs, one for each "
        "replica, such as [cuda:0, cuda:1] "
        "(got a list of 2)",
    ),
    (
        "no share of a GPU",
        "stages: {talker: {gpu_memory_utilization: 0}}",
        "stages.talker.gpu_memory_utilization: must be a number above 0 and at most 1 (got 0)",
    ),
    (
        "no memory for tensors",
        "transfer: {arena_mib: 0}",
        "transfer.arena_mib: must be a whole number from 1 to 1048576 (got 0)",
    ),
    (
        "a date for a name",
        "checkpoint: 2024-01-02",
        "checkpoint: must be text; put it in quotes (got 2024-01-02)",
    ),
    (
        "a name that cannot be printed",
        'web: {model_name: "a\\0b"}',
        "web.model_name: has surrounding blanks or unprintable characters; remove them (got "
        "'a\\x00b')",
    ),
    (
        "a home that is not looked up",
        "data_dir: ~/fleet",
        "data_dir: must be a full path; ~ is not expanded here (got '~/fleet')",
    ),
    ("an empty section", "web:", "web: is empty; add keys, or remove it"),
    ("an empty stage", "stages:\n  talker:\n", "stages.talker: is empty; add keys, or remove it"),
    (
        "a list for a section",
        "stages: [thinker]",
        "stages: must be a section of keys and values (got a list of 1)",
    ),
    (
        "a list for a stage's own setting",
        "stages: {code2wav: {extra: {left_context: [1]}}}",
        "stages.code2wav.extra.left_context: must be text, a number, or true or false (got a "
        "list of 1)",
    ),
    (
        "a temperature below zero",
        "stages: {talker: {sampling: {temperature: -1}}}",
        "stages.talker.sampling.temperature: must be a number from 0 to 2 (got -1)",
    ),
    (
        "a temperature that is no number",
        "stages: {talker: {sampling: {temperature: .nan}}}",
        "stages.talker.sampling.temperature: must be a number (got nan)",
    ),
    (
        "a share of nothing",
        "stages: {talker: {sampling: {top_p: 0}}}",
        "stages.talker.sampling.top_p: must be a number above 0 and at most 1 (got 0)",
    ),
    (
        "half an id",
        "stages: {talker: {sampling: {top_k: 1.5}}}",
        "stages.talker.sampling.top_k: must be a whole number from 0 to 1000000 (got 1.5)",
    ),
    (
        "a seed for everyone",
        "stages: {talker: {sampling: {seed: 1}}}",
        "stages.talker.sampling.seed: unknown key; the seed is a parameter of each request",
    ),
    (
        "stop strings for everyone",
        "stages: {thinker: {sampling: {stop: [end]}}}",
        "stages.thinker.sampling.stop: unknown key; stop strings are parameters of each request",
    ),
)

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
        "an unused ramp",
        "edges: {text: {policy: {kind: each, ramp: [4]}}}",
        "edges.text.policy.ramp: kind each does not use a ramp; set kind: ramp, or remove it",
    ),
    (
        "invariant numerics in half precision",
        "numerics: invariant\ndtype: bfloat16",
        "dtype: numerics: invariant computes in float32, not bfloat16; set float32 or auto",
    ),
    (
        "invariant numerics on a GPU",
        "numerics: invariant\nstages: {talker: {device: 'cuda:0'}}",
        "stages.talker.device: numerics: invariant runs on a CPU, not on cuda:0; set cpu, or "
        "numerics: fast",
    ),
    (
        "invariant numerics on half a stage's GPU",
        "numerics: invariant\nstages: {talker: {split: {decode: {device: cuda}}}}",
        "stages.talker.split.decode.device: numerics: invariant runs on a CPU, not on cuda; set "
        "cpu, or numerics: fast",
    ),
    (
        "halves of two dtypes",
        "stages: {thinker: {split: {prefill: {device: cpu}, decode: {device: cuda}}}}",
        "stages.thinker.split: computes prefill on cpu and decode on cuda, and dtype auto is "
        "float32 on a CPU and bfloat16 on a "
        "GPU, but the halves must share one; set dtype to float32 or bfloat16, or set the same "
        "device for both",
    ),
    (
        "halves of two dtypes, one of them on the deployment's device",
        "device: 'cuda:1'\nstages: {talker: {split: {decode: {device: cpu}}}}",
        "stages.talker.split: computes prefill on cuda:1 and decode on cpu, and dtype auto is "
        "float32 on a CPU and bfloat16 on a "
        "GPU, but the halves must share one; set dtype to float32 or bfloat16, or set the same "
        "device for both",
    ),
    (
        "invariant numerics on a list of GPUs",
        "numerics: invariant\nstages: {talker: {device: ['cuda:0', 'cuda:1']}}",
        "stages.talker.device: numerics: invariant runs on a CPU, not on cuda:0; set cpu, or "
        "numerics: fast",
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

YAML: tuple[Case, ...] = (
    ("nothing", "", "is empty; write {} into it to use all defaults"),
    ("comments alone", "# graph: text\n", "is empty; write {} into it to use all defaults"),
    ("a list", "- graph\n", "must be a mapping of keys to values, not a list"),
    ("a word", "graph", "must be a mapping of keys to values, not a single value"),
    (
        "a key twice",
        "web:\n  port: 1\n  host: h\n  port: 2",
        "web.port: given twice (lines 2 and 4); keep one",
    ),
    ("a key twice in a line", "web: {port: 1, port: 1}", "web.port: given twice; keep one"),
    ("a tab", "web:\n\tport: 1", "not valid YAML (line 2): a tab; indent with spaces"),
    (
        "an unfinished list",
        "graph: [",
        "not valid YAML (line 1): expected the node content, but found '<stream end>'",
    ),
    (
        "two documents",
        "graph: text\n---\ngraph: text\n",
        "not valid YAML (line 2): expected a single document in the stream, but found another "
        "document; keep one",
    ),
    (
        "a character that YAML has not",
        "graph: a\0b",
        "not valid YAML: the character '\\x00' is not allowed; remove it",
    ),
    (
        "a date that is none",
        "checkpoint: 2024-13-45",
        "not valid YAML (line 1): '2024-13-45' is no date and no number; put it in quotes",
    ),
    (
        "a key that is no text",
        "on: 1",
        "not valid YAML (line 1): 'on' as a key is not text; put it in quotes",
    ),
    (
        "a list as a key",
        "? [a]\n: 1",
        "not valid YAML (line 1): a list or a section as a key is not text; put it in quotes",
    ),
    (
        "an alias of nothing",
        "graph: *gone",
        "not valid YAML (line 1): found undefined alias 'gone'",
    ),
    (
        "an object",
        "graph: !!python/object:os.system x",
        "not valid YAML (line 1): could not determine a constructor for the tag "
        "'tag:yaml.org,2002:python/object:os.system'",
    ),
    (
        "aliases of aliases",
        BOMB,
        "not valid YAML: its aliases expand to more than 10000 values; write the values out",
    ),
    (
        "an alias of itself",
        "web: &a {port: *a}",
        "not valid YAML (line 1): an alias refers to a section that contains it; write the "
        "values out",
    ),
    (
        "brackets without end",
        "[" * 100,
        "not valid YAML (line 1): sections are nested more than 16 deep; a deployment has four "
        "levels",
    ),
)

CASES = (*SPELLING, *VALUES, *TOGETHER, *TRAINING, *YAML)
OF_THE_WHOLE = {
    "a stage that is not there",
    "a graph that is not there",
    *(name for name, _, _ in (*TOGETHER, *TRAINING)),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("a_file").write_text("no folder")
    return tmp_path


def message_for(raw: bytes) -> str:
    path = Path("x.yaml")
    path.write_bytes(raw)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    return caught.value.message


@pytest.mark.parametrize(
    ("text", "message"), [case[1:] for case in CASES], ids=[name for name, _, _ in CASES]
)
def test_invalid_file_is_refused_in_one_line(text: str, message: str) -> None:
    assert message_for(text.encode()) == f"x.yaml: {message}"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"graph: text\ncheckpoint: \xff\n", "x.yaml: is not UTF-8 (line 2); save it as UTF-8"),
        ("graph: text".encode("utf-16"), "x.yaml: is not UTF-8 (line 1); save it as UTF-8"),
        (
            b"#" * 2_000_000,
            "x.yaml: is larger than 1048576 bytes, which no deployment file is; check --config "
            "and FLEET_CONFIG",
        ),
    ],
    ids=["bytes of another encoding", "UTF-16", "a file of another kind"],
)
def test_bytes_that_are_not_a_configuration_are_refused(raw: bytes, message: str) -> None:
    assert message_for(raw) == message


def test_byte_order_mark_is_accepted() -> None:
    Path("x.yaml").write_bytes(b"\xef\xbb\xbfgraph: text\n")
    assert load_config(Path("x.yaml")).graph == "text"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("web.port", "--set 'web.port': write KEY=VALUE, such as --set web.port=8001"),
        ("=1", "--set '=1': write KEY=VALUE, such as --set web.port=8001"),
        (
            "web..port=1",
            "--set 'web..port=1': a part of the key is empty; write KEY as in web.port",
        ),
        ("web.=1", "--set 'web.=1': a part of the key is empty; write KEY as in web.port"),
        (
            "web.port=[",
            "--set web.port: '[' is not a YAML value: expected the node content, but found "
            "'<stream end>'",
        ),
        (
            "web.port=",
            "--set web.port: must be a port from 1 to 65535, or 0 for a free one (got '')",
        ),
        ("web.prot=1", "--set web.prot: unknown key; did you mean web.port?"),
        (
            "retention_s.x=1",
            "--set 'retention_s.x=1': retention_s is a value, not a section; set retention_s "
            "itself",
        ),
        (
            "stages.talker={replicas: 0}",
            "--set stages.talker.replicas: must be a whole number from 1 to 256 (got 0)",
        ),
        (
            "web={port: 1, port: 2}",
            "--set web.port: '{port: 1, port: 2}' is not a YAML value: given twice; keep one",
        ),
        (
            "redis.port=8000",
            "--set redis.port: 8000 is also web.port; choose another port for one of them",
        ),
        (
            "web.port=6399",
            "x.yaml: redis.port: 6399 is also web.port; choose another port for one of them",
        ),
        ("stages.vocoder.replicas=1", f"--set stages.vocoder: {NOT_OF_THE_STAGES}"),
        (
            "lease.worker_ttl_s=1e3",
            "--set lease.worker_ttl_s: must be a number from 0.1 to 3600 (got '1e3')",
        ),
    ],
)
def test_invalid_override_is_refused_in_one_line(override: str, message: str) -> None:
    Path("x.yaml").write_text("retention_s: 60\nredis: {port: 6399}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(Path("x.yaml"), (override,))
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("edges.codes.policy.ahead_s", "low_buffer_s"),
        ("edges.codes.policy.crowd", "busy_first_chunk_factor"),
        ("limits.max_sessions", "max_cached_conversations"),
        ("voice.lead_s", "send_ahead_s"),
        ("voice.resume_s", "reconnect_timeout_s"),
        ("lease.worker_s", "worker_ttl_s"),
        ("lease.conductor_s", "conductor_ttl_s"),
        ("lease.unclaimed_s", "claim_timeout_s"),
        ("lease.no_worker_s", "no_worker_timeout_s"),
        ("lease.resume_s", "gateway_timeout_s"),
        ("lease.session_s", "prefix_cache_s"),
    ],
)
def test_renamed_key_is_refused_with_its_new_name(old: str, new: str) -> None:
    kind = ("edges.codes.policy.kind=each",) if old.startswith("edges") else ()
    with pytest.raises(ConfigError, match=rf"{old}: was renamed to {new}"):
        load_config(None, (*kind, f"{old}=1"))


def test_override_sets_a_key_of_an_empty_section() -> None:
    Path("x.yaml").write_text("web:\n")
    assert load_config(Path("x.yaml"), ("web.port=8001",)).web.port == 8001


def test_error_has_the_field_apart_from_its_message() -> None:
    Path("x.yaml").write_text("stages: {talker: {replicas: 0}}")
    with pytest.raises(ConfigError) as caught:
        load_config(Path("x.yaml"))
    assert caught.value.param == "stages.talker.replicas"


def numbers(model: type[BaseModel], above: str = "") -> Iterator[str]:
    """The dotted keys of a model and its sections that take a number."""
    for name, field in model.model_fields.items():
        kinds = (field.annotation, *get_args(field.annotation))
        section = next(
            (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None
        )
        if section and get_origin(field.annotation) is not dict:
            yield from numbers(section, f"{above}{name}.")
        elif section:
            yield from numbers(
                section, f"{above}{name}.{'talker' if name == 'stages' else 'codes'}."
            )
        elif isinstance(field.default, int | float) and not isinstance(field.default, bool):
            yield above + name


NUMBERS = (
    *numbers(FleetConfig),
    *numbers(SamplingDefaults, "stages.talker.sampling."),
    "edges.codes.credits",
)


@pytest.mark.parametrize("given", [".nan", ".inf", "-.inf", "true", "'1'", "[1]", "-3", "1.0e+30"])
@pytest.mark.parametrize("key", NUMBERS)
def test_number_fields_refuse_other_values(key: str, given: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, (f"{key}={given}",))
    assert caught.value.message.startswith(f"--set {key}: must be ")
    assert caught.value.param == key


def test_every_rule_is_broken_by_a_case() -> None:
    """A rule without a case could stop refusing without a failing test."""
    wrong = [
        FleetConfig.model_validate(parse_yaml(text))
        for name, text, _ in CASES
        if name in OF_THE_WHOLE
    ]
    broken = {next(rule for rule in RULES if any(rule(config))) for config in wrong}
    assert broken == set(RULES)


NO_SCHEME = (
    "it begins with neither redis:// nor rediss:// nor redis+sentinel:// nor "
    "redis+cluster:// nor unix://"
)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        (
            "elsewhere:6379",
            NO_SCHEME,
        ),
        (
            "http://:secret@elsewhere",
            NO_SCHEME,
        ),
        ("redis://", "it names no host"),
        ("redis://:secret@:6379", "it names no host"),
        ("redis://elsewhere:port", "its port is not a number from 1 to 65535"),
        ("redis://elsewhere:70000", "its port is not a number from 1 to 65535"),
        ("redis://elsewhere:0", "its port is not a number from 1 to 65535"),
        ("redis://elsewhere:6379/fleet", "the part after the port is not a database number"),
        ("redis+cluster://elsewhere:6379,elsewhere/1", "a cluster has only database 0"),
        ("unix://", "it names no socket"),
    ],
)
def test_invalid_redis_address_is_explained_without_its_password(url: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings({"REDIS_URL": url})
    assert (
        caught.value.message == f"REDIS_URL: not a Redis address ({why}); write redis://HOST:PORT"
    )


@pytest.mark.parametrize(
    "url",
    [
        "redis://h",
        "redis://:p@h:6379/3",
        "rediss://[::1]:1/",
        "redis+cluster://h,i:1/0",
        "unix:///run/redis.sock?db=1",
    ],
)
def test_valid_redis_address_is_used_unchanged(url: str) -> None:
    assert read_settings({"REDIS_URL": url}).redis_url == url


@pytest.mark.parametrize("port", ["eighty", "65536", "-1", "80.5", " 80", "²"])
def test_invalid_port_in_the_environment_is_refused(port: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings({"FLEET_PORT": port})
    assert (
        caught.value.message
        == f"FLEET_PORT: {port!r} is not a port; use a number from 1 to 65535, or 0 for a free one"
    )
