"""Number of KV pages on a GPU, whose memory is reported by a double of `torch.cuda`."""

import logging
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from fleet.config import load_config
from fleet.core.errors import ConfigError, OutOfPages
from fleet.core.ids import RequestId, StageName
from fleet.core.request import Sampling
from fleet.engine.base import NUM_POSITIONS, EngineRequest
from fleet.engine.torch.build import ComputeDevice
from fleet.engine.torch.kv_memory import DeviceMemory, num_pages, share_for
from fleet.engine.torch.kv_pool import KVPool, KVShape
from fleet.engine.torch.lm_engine import LMEngine
from fleet.engine.torch.program import Program, ProgramTask
from fleet.stages.builders import build_options
from fleet.stages.lm_setup import StageSetup
from tests.stage_options import stage_options

MIB, GIB = 1 << 20, 1 << 30
SHAPE = KVShape(num_layers=48, num_kv_heads=4, head_dim=128)
"""KV shape of the published Thinker."""
PAGE_BYTES = 48 * 16 * 2 * 4 * 128 * 2
"""Size in bytes of a KV page with 16 positions in bfloat16."""


def memory(total: float, free: float, own: float) -> DeviceMemory:
    return DeviceMemory(total=int(total * GIB), free=int(free * GIB), own=int(own * GIB))


def test_pages_fill_the_share_beside_the_weights() -> None:
    pages = num_pages(memory(80, 60, 20), 0.9, MIB)
    assert pages == int(52 * 1024 * 0.9) - 1, (
        "0.9 of 80 GiB less 20 of weights, less a tenth, less the scratch page"
    )


def test_pages_do_not_depend_on_the_order_in_which_workers_start() -> None:
    first, last = memory(80, 70, 10), memory(80, 30, 10)
    assert num_pages(first, 0.4, MIB) == num_pages(last, 0.4, MIB)


def test_pages_are_limited_by_the_memory_that_is_free() -> None:
    assert num_pages(memory(80, 5, 10), 0.9, MIB) == int(5 * 1024 * 0.9) - 1


def test_no_page_fits_beside_weights_that_exceed_the_share() -> None:
    assert num_pages(memory(80, 20, 60), 0.45, MIB) <= 0


@pytest.mark.parametrize("pages", [1, 513, 40_000])
def test_share_for_pages_holds_them(pages: int) -> None:
    found = memory(80, 70, 10)
    share = share_for(found, pages, MIB)
    assert num_pages(found, share, MIB) >= pages > num_pages(found, share - 0.01, MIB)


def test_page_bytes_equal_those_of_a_pool() -> None:
    pool = KVPool(
        SHAPE, num_pages=3, page_size=16, dtype=torch.bfloat16, device=torch.device("meta")
    )
    assert pool.data.nbytes == (3 + 1) * pool.page_bytes and pool.page_bytes == PAGE_BYTES


@dataclass(slots=True)
class Gpu:
    """Double of a GPU of 80 GiB, of which this process has 30 GiB; 10 of these were allocated
    before the stage was loaded.
    """

    free: float = 50

    def mem_get_info(self, _device: object) -> tuple[int, int]:
        return int(self.free * GIB), 80 * GIB


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    found = Gpu()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", found.mem_get_info)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: 30 * GIB)
    return found


def loop(share: float, min_positions: int = 2, context: int = 0) -> LMEngine[ProgramTask]:
    """Return a batch loop whose KV pool fills the memory of the GPU double; its tensors have no
    memory.
    """
    options = stage_options(
        stage=StageName("lm"),
        checkpoint=Path(),
        device="cuda",
        kv_pages=None,
        gpu_memory_utilization=share,
        min_positions=min_positions,
    )
    where = ComputeDevice(device=torch.device("meta"), dtype=torch.bfloat16, tiled=False)
    setup = StageSetup(options=options, where=where, context=context, allocated_before=10 * GIB)
    return setup.loop(cast("Program[ProgramTask]", SimpleNamespace(kv_shape=SHAPE, tapped_width=0)))


@pytest.mark.usefixtures("gpu")
def test_pool_fills_the_share_and_is_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fleet.stages.lm_setup"):
        pool = loop(share=0.5).pool
    assert pool.data.nbytes == 18 * GIB, (
        "0.5 of 80 GiB less 20 of weights, less a tenth; the scratch page included"
    )
    assert pool.num_pages == 18 * GIB // PAGE_BYTES - 1 == 12287
    assert [record.getMessage() for record in caplog.records] == [
        "lm: 12287 KV pages, 196592 positions, 18.0 GiB in 0.50 of meta (80.0 GiB, 50.0 GiB "
        "free), beside 20.0 GiB of weights"
    ]


@pytest.mark.parametrize(
    ("share", "free", "held", "remedy"),
    [
        (0.26, 50.0, 7840, "set at least 0.27"),
        (0.1, 50.0, 0, "set at least 0.27"),
        (0.9, 0.5, 4896, "free memory, or set another device"),
    ],
    ids=["a share too small", "a share smaller than the weights", "too little free memory"],
)
def test_share_without_room_for_a_prompt_is_refused_with_one_that_has_it(
    share: float, free: float, held: int, remedy: str, gpu: Gpu
) -> None:
    gpu.free = free
    with pytest.raises(ConfigError) as refused:
        loop(share, min_positions=8193)
    field = "stages.lm.gpu_memory_utilization"
    assert refused.value.param == field
    assert refused.value.message == (
        f"{field}: {share:.2f} of meta (80.0 GiB, {free:.1f} GiB free) holds {held} positions "
        "beside 20.0 GiB of weights, and a "
        f"request within the limits needs 8193 positions; {remedy}, or lower "
        "limits.max_prompt_tokens"
    )


@pytest.mark.usefixtures("gpu")
def test_share_named_by_a_refusal_is_accepted() -> None:
    assert loop(share=0.27, min_positions=8193).pool.num_pages >= 513


def test_configured_pages_without_room_for_a_request_are_refused() -> None:
    options = stage_options(stage=StageName("lm"), checkpoint=Path(), kv_pages=8, min_positions=129)
    where = ComputeDevice(device=torch.device("cpu"), dtype=torch.float32, tiled=False)
    with pytest.raises(
        ConfigError,
        match=r"stages.lm.kv_pages: a request within the limits needs 129 positions; set at "
        r"least 9",
    ):
        StageSetup(options=options, where=where).loop(
            cast("Program[ProgramTask]", SimpleNamespace(kv_shape=SHAPE, tapped_width=0))
        )


@pytest.mark.usefixtures("gpu")
def test_request_beyond_the_positions_of_the_model_is_refused() -> None:
    """A request beyond the model's longest context is refused, although a pool that fills a GPU has
    more positions.
    """
    engine = loop(share=0.5, context=100)
    request = EngineRequest(
        request_id=RequestId("r"), sampling=Sampling(), params={NUM_POSITIONS: "101"}
    )
    with pytest.raises(
        OutOfPages, match=r"maximum context length is 100 tokens. However, you requested 101"
    ):
        engine.submit(request)


@pytest.mark.parametrize(
    ("override", "on_gpu", "on_cpu"),
    [
        ("retention_s=600", (0, 2048), (1024, 256)),
        ("stages.thinker.kv_pages=2000", (2000, 2048), (2000, 256)),
        ("stages.thinker.prefill_chunk_tokens=512", (0, 512), (1024, 512)),
    ],
    ids=["nothing set", "pages set", "chunk set"],
)
def test_defaults_depend_on_the_device(
    override: str, on_gpu: tuple[int, int], on_cpu: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for device, wanted in (("auto", on_gpu), ("cuda:1", on_gpu), ("cpu", on_cpu)):
        options = build_options(
            load_config(None, (override, f"device={device}")), StageName("thinker"), Path()
        )
        assert (options.kv_pages, options.prefill_chunk_tokens) == wanted
        assert (options.min_positions, options.gpu_memory_utilization) == (
            8193,
            0.9 if device == "cpu" else 0.45,
        )


def test_vllm_has_no_pages_that_depend_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With vLLM, the number of pages does not depend on the device: the pages bound the positions
    of a request, and `kv_mib` is vLLM's memory.
    """
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = load_config(None, ("graph=text", "engine=vllm", "device=cuda"))
    assert build_options(config, StageName("lm"), Path()).kv_pages == 1024
