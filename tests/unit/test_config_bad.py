"""Mistakes in single keys and values of a deployment, each with its whole error message: the field
as the user wrote it, and the fix.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel, BeforeValidator

from fleet.config import FleetConfig, load_config
from fleet.config.stage_schema import SamplingDefaults
from fleet.config.values import Limit
from fleet.core.errors import ConfigError
from tests.unit.bad_config import MISSING_STAGE, Case, refusal_of

OTHER_GRAPH = "graph: text\nstages: {talker: {threads: 2}}"

SPELLING: tuple[Case, ...] = (
    (
        "an unknown key",
        "web: {nonsense: 1}",
        "web.nonsense: unknown key; remove it, or use one of host, port, allowed_hosts, "
        "allowed_origins, "
        "trusted_proxies, model_name, "
        "model_aliases, tool_format, max_leading_silence_ms, response_retention_s, "
        "max_stored_responses_mib, "
        "read_only, open_metrics, max_connections, "
        "max_connections_per_address, "
        "header_timeout_s, body_timeout_s, send_timeout_s, body_memory_mib, keys_file, tls, "
        "tls_cert, tls_key",
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
        f"stages.vocoder: {MISSING_STAGE}",
    ),
    (
        "a misspelt stage",
        "stages: {Talkre: {replicas: 1}}",
        f"stages.Talkre: {MISSING_STAGE}; did you mean talker?",
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
        "graph: unknown graph 'qwen3_omi'; use one of cascade, qwen3_omni, text; did you mean "
        "qwen3_omni?",
    ),
    (
        "a graph with no similar name",
        "graph: other",
        "graph: unknown graph 'other'; use one of cascade, qwen3_omni, text",
    ),
    (
        "an engine that is not there",
        "engine: jax",
        "engine: 'jax' is not a known value; use torch, vllm or fake",
    ),
    (
        "the precision of a stage for all stages",
        "dtype: fp8",
        "dtype: fp8 is for single stages with experts; set stages.NAME.dtype (got 'fp8')",
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
        "no replica of half a stage",
        "stages: {talker: {split: {decode: {replicas: 0}}}}",
        "stages.talker.split.decode.replicas: must be a whole number from 1 to 256 (got 0)",
    ),
    (
        "a huge count",
        f"retention_s: 0x{'f' * 9000}",
        "retention_s: must be a whole number from 1 to 31536000 (got a number of 36000 bits)",
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

CASES = (*SPELLING, *VALUES)
VALIDATORS = (BeforeValidator, Limit)


@pytest.mark.parametrize(
    ("text", "message"), [case[1:] for case in CASES], ids=[name for name, _, _ in CASES]
)
def test_invalid_file_is_refused_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    assert refusal_of(tmp_path, text).message == f"x.yaml: {message}"


@pytest.mark.parametrize(
    "given", [".nan", ".inf", "-.inf", "true", "'1'", "[1]", "-3", "64.5", "1.0e+30"]
)
@pytest.mark.parametrize(
    ("key", "limits"),
    [
        ("retention_s", "a whole number from 1 to 31536000"),
        ("stages.talker.split.decode.replicas", "a whole number from 1 to 256"),
        ("stages.talker.gpu_memory_utilization", "a number above 0 and at most 1"),
        ("training.floor", "a number from 0 to 1"),
    ],
)
def test_number_outside_of_its_limits_is_refused(key: str, limits: str, given: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, (f"{key}={given}",))
    assert caught.value.message.startswith(f"--set {key}: must be {limits} (got ")
    assert caught.value.param == key


def test_every_key_has_a_validator_of_its_values() -> None:
    """Every key has a validator for its values; without one, pydantic would convert values and word
    the error itself.
    """
    found = [*unchecked_keys(FleetConfig), *unchecked_keys(SamplingDefaults)]
    assert not found


def unchecked_keys(model: type[BaseModel]) -> Iterator[str]:
    """Yield the keys of a configuration section and its subsections that accept any value of a
    type.
    """
    for name, field in model.model_fields.items():
        if not any(isinstance(each, VALIDATORS) for each in field.metadata):
            yield from (f"{name}: {kind}" for kind in unchecked_types(field.annotation))
        for section in sections_in(field.annotation):
            yield from (f"{name}.{key}" for key in unchecked_keys(section))


def unchecked_types(annotation: object) -> Iterator[object]:
    """Yield the types within an annotation that have neither a validator nor a list of allowed
    values.
    """
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal or annotation in (type(None), Ellipsis) or [*sections_in(annotation)]:
        return
    if origin is Annotated:
        if not any(isinstance(each, VALIDATORS) for each in inner):
            yield annotation
    elif inner:
        for each in inner[1:] if origin is dict else inner:
            yield from unchecked_types(each)
    else:
        yield annotation


def sections_in(annotation: object) -> list[type[BaseModel]]:
    """Return the section classes in a key's annotation: a section, an optional section, or one
    section per name.
    """
    kinds = (annotation, *get_args(annotation))
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]


def test_error_has_the_field_apart_from_its_message(tmp_path: Path) -> None:
    error = refusal_of(tmp_path, "stages: {talker: {replicas: 0}}")
    assert error.param == "stages.talker.replicas"
