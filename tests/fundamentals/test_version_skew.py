"""A worker process that does not match the listed workers exits with one line that names the
difference and the remedy.
"""

import re
from pathlib import Path

import pytest
import redis

from fleet.config import FleetConfig, load_config
from fleet.control import keys
from fleet.core.errors import VersionSkew
from fleet.core.ids import RoleName, StageName, WorkerId
from fleet.models.causal_lm.tiny import write_tiny_checkpoint
from fleet.process.fleet_secret import FleetSecret
from fleet.worker.main import build_stage
from fleet.worker.process.registration import process_fields, register_worker
from fleet.worker.worker_process import WorkerProcess
from tests.fundamentals.control_plane import join
from tests.harness import settings_of

SPLIT = load_config(
    None, ("engine=fake", "device=cpu", "transfer.kind=redis", "stages.thinker.split={}")
)
PREFILL, DECODE = WorkerId("thinker.prefill@there:1:a"), RoleName("thinker.decode")
DTYPE_AND_SIZE = (
    "engine, dtype, numerics and page_size_tokens, .*for all workers of a stage that is split"
)
SPANS = "stages.lm.spans={anchor: 0:1, workers: [2:output]}"
FAST, INVARIANT = (
    load_config(None, ("graph=text", "device=cpu", SPANS, f"numerics={kind}"))
    for kind in ("fast", "invariant")
)
ANCHOR = WorkerId("lm@there:1:a")
VLLM_SPLIT = load_config(
    None, ("stages.thinker.engine=vllm", "device=cpu", "dtype=float32", "stages.thinker.split={}")
)


@pytest.mark.parametrize(
    ("field", "listed_value", "own_value"),
    [("dtype", "bfloat16", "float32"), ("page_size_tokens", "32", "16")],
)
def test_split_worker_with_different_page_layout_does_not_join(
    redis_url: str, client: redis.Redis, field: str, listed_value: str, own_value: str
) -> None:
    fields = {"stage": "thinker", "dtype": "float32", "page_size_tokens": "16", field: listed_value}
    assert join(client, PREFILL, **fields) == ["ok"]
    built = build_stage(SPLIT, StageName("thinker"), Path())
    worker = WorkerProcess(redis_url, settings_of(SPLIT, DECODE, built, dtype="float32"))
    with pytest.raises(
        VersionSkew,
        match=f"its {field} is {own_value}, that of {PREFILL} is {listed_value}; .* set one "
        f"{DTYPE_AND_SIZE}",
    ):
        worker.run()


@pytest.mark.parametrize(
    ("field", "listed_value", "own_value"),
    [
        ("engine", "torch", "vllm"),
        ("tensor_parallel_size", "2", "1"),
        ("quantization", "fp8", "none"),
        ("device_kind", "cuda", "cpu"),
    ],
)
def test_half_on_vllm_with_other_settings_does_not_join(
    redis_url: str, client: redis.Redis, field: str, listed_value: str, own_value: str
) -> None:
    alike = {
        "engine": "vllm",
        "tensor_parallel_size": "1",
        "quantization": "none",
        "device_kind": "cpu",
    }
    assert join(client, PREFILL, stage="thinker", **{**alike, field: listed_value}) == ["ok"]
    built = build_stage(SPLIT, StageName("thinker"), Path())
    settings = settings_of(VLLM_SPLIT, DECODE, built, dtype="float32", device="cpu")
    worker = WorkerProcess(redis_url, settings)
    with pytest.raises(
        VersionSkew,
        match=f"its {field} is {own_value}, that of {PREFILL} is {listed_value}; .* one section "
        "vllm",
    ):
        worker.run()


def record_of(config: FleetConfig, role: str, **other: str) -> dict[str, str | bytes]:
    return {
        **process_fields(
            config, config.role(role), fingerprint="abc", device="cpu", dtype="float32"
        ),
        **other,
    }


def register(
    client: redis.Redis, config: FleetConfig, worker: str, record: dict[str, str | bytes]
) -> None:
    register_worker(client, config, config.role(worker.partition("@")[0]), WorkerId(worker), record)


@pytest.mark.parametrize("role", ["lm", "lm.span"])
def test_worker_with_other_kernels_is_refused_where_numerics_are_invariant(
    client: redis.Redis, role: str
) -> None:
    """Another instruction set or build of torch rounds differently: a recovered answer would have
    other bytes.
    """
    register(client, INVARIANT, ANCHOR, record_of(INVARIANT, "lm", kernels="SSE of torch 1.0"))
    own = re.escape(str(record_of(INVARIANT, role)["kernels"]))
    with pytest.raises(
        VersionSkew,
        match=f"worker {role} is refused: its kernels is {own}, that of {ANCHOR} is SSE of "
        "torch 1.0; with numerics",
    ) as refused:
        register(client, INVARIANT, f"{role}@here:1:b", record_of(INVARIANT, role))
    assert "numerics: fast" in str(refused.value) and "page_size_tokens" not in str(refused.value)
    alike = record_of(INVARIANT, role, kernels="SSE of torch 1.0")
    register(client, INVARIANT, f"{role}@here:1:c", alike)
    assert client.zscore(keys.WORKERS, f"{role}@here:1:c") is not None


def test_refused_anchor_ends_with_the_reason(
    redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    built = build_stage(INVARIANT, StageName("lm"), write_tiny_checkpoint(tmp_path))
    # last: its lease lapses
    register(client, INVARIANT, ANCHOR, record_of(INVARIANT, "lm", kernels="SSE of torch 1.0"))
    assert built.route is not None
    settings = settings_of(
        INVARIANT, RoleName("lm"), built, fingerprint="abc", device="cpu", dtype="float32"
    )
    worker = WorkerProcess(redis_url, settings)
    with pytest.raises(
        VersionSkew, match="worker lm is refused: its kernels is .*, that of lm@there"
    ):
        worker.run()


def test_kernels_are_not_compared_where_numerics_are_fast(client: redis.Redis) -> None:
    register(client, FAST, ANCHOR, record_of(FAST, "lm", kernels="SSE of torch 1.0"))
    fields = record_of(FAST, "lm.span")
    assert "kernels" not in fields and "kernels" not in record_of(SPLIT, DECODE)
    register(client, FAST, "lm.span@here:1:b", fields)
    assert client.zscore(keys.WORKERS, "lm.span@here:1:b") is not None


@pytest.mark.parametrize(
    "field", ["dtype", "numerics", "engine", "checkpoint", "package", "protocol"]
)
def test_span_worker_that_computes_otherwise_than_its_anchor_does_not_join(
    client: redis.Redis, field: str
) -> None:
    register(client, FAST, ANCHOR, record_of(FAST, "lm", **{field: "other"}))
    with pytest.raises(
        VersionSkew,
        match=f"its {field} is .*, that of {ANCHOR} is other; run one version and one checkpoint",
    ):
        register(client, FAST, "lm.span@here:1:b", record_of(FAST, "lm.span"))


def test_span_worker_with_another_fleet_secret_does_not_join(client: redis.Redis) -> None:
    record = record_of(FAST, "lm.span", span_address="127.0.0.1:1", span_token="t")
    first, second, other = (
        WorkerId("lm.span@here:1:a"),
        WorkerId("lm.span@here:1:b"),
        WorkerId("lm.span@here:1:c"),
    )
    register(client, FAST, first, FleetSecret(b"a" * 32).signed(first, record))
    register(client, FAST, second, FleetSecret(b"a" * 32).signed(second, record))
    with pytest.raises(
        VersionSkew,
        match="its fleet secret is not that of lm.span@here:1:.; set security.fleet_secret",
    ):
        register(client, FAST, other, FleetSecret(b"b" * 32).signed(other, record))
    with pytest.raises(VersionSkew, match="it has no fleet secret, lm.span@here:1:. has one"):
        register(client, FAST, other, record)
