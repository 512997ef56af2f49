"""A worker process that does not match the listed workers exits with one line that names the difference and the remedy."""

from pathlib import Path

import pytest
import redis

from fleet.config import load_config
from fleet.core.errors import VersionSkew
from fleet.core.ids import RoleName, StageName, WorkerId
from fleet.worker.main import WorkerProcess, build_stage
from tests.fundamentals.control_plane import join

SPLIT = load_config(None, ("engine=fake", "device=cpu", "transfer.kind=redis", "stages.thinker.split={}"))
PREFILL, DECODE = WorkerId("thinker.prefill@there:1:a"), RoleName("thinker.decode")
DTYPE_AND_SIZE = "engine, dtype and page_size_tokens, .*for all workers of a stage that is split"
VLLM_SPLIT = load_config(None, ("stages.thinker.engine=vllm", "device=cpu", "dtype=float32", "stages.thinker.split={}"))


@pytest.mark.parametrize(
    ("field", "listed_value", "own_value"), [("dtype", "bfloat16", "float32"), ("page_size_tokens", "32", "16")]
)
def test_split_worker_with_different_page_layout_does_not_join(
    redis_url: str, client: redis.Redis, field: str, listed_value: str, own_value: str
) -> None:
    fields = {"stage": "thinker", "dtype": "float32", "page_size_tokens": "16", field: listed_value}
    assert join(client, PREFILL, **fields) == ["ok"]
    worker = WorkerProcess(SPLIT, DECODE, redis_url, build_stage(SPLIT, StageName("thinker"), Path()), dtype="float32")
    with pytest.raises(
        VersionSkew, match=f"its {field} is {own_value}, that of {PREFILL} is {listed_value}; .* set one {DTYPE_AND_SIZE}"
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
    alike = {"engine": "vllm", "tensor_parallel_size": "1", "quantization": "none", "device_kind": "cpu"}
    assert join(client, PREFILL, stage="thinker", **{**alike, field: listed_value}) == ["ok"]
    built = build_stage(SPLIT, StageName("thinker"), Path())
    worker = WorkerProcess(VLLM_SPLIT, DECODE, redis_url, built, dtype="float32", device="cpu")
    with pytest.raises(
        VersionSkew, match=f"its {field} is {own_value}, that of {PREFILL} is {listed_value}; .* one section vllm"
    ):
        worker.run()
