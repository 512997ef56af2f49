"""Chunks that Redis lost are recomputed with other sizes where sizes depend on timing; the client
still receives each row once.
"""

import asyncio
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from fleet.config import FleetConfig, load_config
from fleet.control import keys
from fleet.control.client import FleetClient
from fleet.control.connect import connect, pairs
from fleet.core.chunk import decode_chunk
from fleet.core.ids import EdgeName, RequestId, StageName
from fleet.core.request import RequestSpec
from fleet.engine.base import EngineOutput
from fleet.engine.fake import OUT, FakeEngine
from fleet.stages.base import BuiltStage, EdgeItem
from fleet.stages.builders import build_options
from fleet.stages.fake import FakeTask
from fleet.stages.options import BuildOptions
from tests.disturbances import OMNI, SHORT_LEASES, AppendOnlyFile
from tests.harness import (
    ANSWER_TIMEOUT_S,
    EdgeArrays,
    answer,
    assert_same,
    build,
    fake_spec_of,
    in_step,
    open_processes,
)
from tests.support import RedisProcess

pytestmark = pytest.mark.one_file_in(3, "control with many processes")

AUDIO, CODEC = EdgeName("audio"), StageName("code2wav")
NUM_FRAMES = 110
FIRST = (2, 4, 8, 16, 25)
"""Audio window sizes, in frames, of the first owner, which streams frame by frame."""


class Windows(FakeTask):
    """Fake codec task that emits audio in windows of the given sizes, one item per window; the last
    size is repeated.
    """

    def __init__(self, spec: RequestSpec, options: BuildOptions, sizes: Sequence[int]) -> None:
        super().__init__(spec, options)
        self._sizes = itertools.chain(sizes, itertools.repeat(sizes[-1]))
        self._size, self._waiting = next(self._sizes), list[np.ndarray]()

    def produce(self, output: EngineOutput) -> Sequence[EdgeItem]:
        items: list[EdgeItem] = []
        for item in super().produce(output):
            self._waiting += item.arrays.values()
            if len(self._waiting) >= self._size or item.final:
                arrays = {"pcm": np.concatenate(self._waiting)} if self._waiting else {}
                items.append(
                    EdgeItem(edge=item.edge, walk=item.walk, arrays=arrays, final=item.final)
                )
                self._size, self._waiting = next(self._sizes), []
        return items


def build_with_windows(again: Sequence[int]) -> Callable[[FleetConfig, StageName], BuiltStage]:
    """Return a stage builder that gives a task's later owners the window sizes `again`. A step
    computes one frame: then the audio edge's credit limits the chunks exactly, while a step that
    computed all available frames could complete the answer.
    """

    def build_stage(config: FleetConfig, stage: StageName) -> BuiltStage:
        plain = build(config, stage)
        if stage != CODEC:
            return plain
        owners: dict[RequestId, int] = {}

        def adapter(spec: RequestSpec, _blob: bytes | None) -> FakeTask:
            owners[spec.id] = owners.get(spec.id, 0) + 1
            options = build_options(config, stage, Path())
            return Windows(spec, options, FIRST if owners[spec.id] == 1 else again)

        return BuiltStage(engine=FakeEngine(max_batch=8), adapter=adapter)

    return build_stage


def sizes_of(url: str, request: RequestId) -> list[int]:
    """Return the number of frames of each logged audio chunk."""
    with connect(url) as client:
        entries = client.xrange(keys.edge(request, AUDIO))
    return [decode_chunk(pairs(raw)["h"]).num_rows // 1920 for _, raw in entries]  # pyright: ignore


async def answer_with_actions(
    client: FleetClient, spec: RequestSpec, actions: Mapping[int, Callable[[], object]]
) -> EdgeArrays:
    """Return the answer. `actions`: functions to run after the audio chunk with their index has
    arrived.
    """
    parts: dict[EdgeName, list[np.ndarray]] = {edge: [] for edge in spec.outputs}
    async with asyncio.timeout(ANSWER_TIMEOUT_S):
        async for chunk in await client.requests.submit(spec, None):
            parts[chunk.edge] += [
                np.frombuffer(tensor.data or b"", tensor.dtype) for tensor in chunk.tensors.values()
            ]
            if (
                chunk.edge == AUDIO
                and chunk.index == len(parts[AUDIO]) - 1
                and chunk.index in actions
            ):
                await asyncio.to_thread(actions[chunk.index])
    return {edge: np.concatenate(arrays) for edge, arrays in parts.items()}


@pytest.mark.parametrize("later_sizes", [(25,), (1,), (11,), (NUM_FRAMES,)], ids=str)
@pytest.mark.parametrize(("num_kept", "num_received"), [(2, 4), (0, 3), (1, 4)])
async def test_recomputed_audio_with_other_chunk_bounds_has_no_gap_and_no_repeat(
    own_redis: RedisProcess,
    tmp_path: Path,
    later_sizes: Sequence[int],
    num_kept: int,
    num_received: int,
) -> None:
    """Audio recomputed with other chunk boundaries has no gap and no repetition. The client has the
    chunks up to `num_received`; the restarted Redis has the chunks up to `num_kept`, and perhaps
    one more.
    """
    paced = (*in_step(OMNI, credits=3), f"edges.{AUDIO}.credits=1")
    config = load_config(
        None, ("engine=fake", "device=cpu", "numerics=fast", *SHORT_LEASES, *paced)
    )
    log_file = AppendOnlyFile(own_redis, tmp_path)
    async with open_processes(own_redis.url, config, build_with_windows(later_sizes)) as (
        _,
        client,
    ):
        whole = fake_spec_of(config, num_tokens=NUM_FRAMES)
        expected = await answer(client, whole)
        before = sizes_of(own_redis.url, whole.id)

        spec = fake_spec_of(config, num_tokens=NUM_FRAMES)
        assert_same(
            await answer_with_actions(
                client, spec, {num_kept: log_file.record_size, num_received: log_file.restart}
            ),
            expected,
        )
        after = sizes_of(own_redis.url, spec.id)
        assert sum(after) == sum(before) == NUM_FRAMES
        assert after[: num_kept + 1] == before[: num_kept + 1] and after != before, (
            "the recomputed chunks have other sizes"
        )


class BlockingCodec(FakeEngine):
    """A codec engine that blocks within a step after a number of frames."""

    def __init__(self) -> None:
        super().__init__(max_batch=8, autoregressive=False)
        self.within, self.go = threading.Event(), threading.Event()
        self.num_frames = 1_000_000

    def step(self) -> Sequence[EngineOutput]:
        outputs = super().step()
        self.num_frames -= sum(len(output.arrays[OUT]) for output in outputs)
        if self.num_frames <= 0 and not self.within.is_set():
            self.within.set()
            assert self.go.wait(timeout=30), "the test did not resume the step"
        return outputs


async def test_worker_in_a_step_while_redis_lost_writes_recomputes_its_task(
    own_redis: RedisProcess, tmp_path: Path
) -> None:
    """A worker is in a step while Redis loses writes: the chunks that it has consumed are gone from
    the log and are produced again with other sizes, so the worker recomputes its task.
    """
    settings = (
        "engine=fake",
        "device=cpu",
        "numerics=fast",
        "transfer.kind=redis",
        "lease.worker_ttl_s=20",
        "lease.conductor_ttl_s=1",
    )
    config = load_config(None, (*settings, *in_step(OMNI, credits=3)))
    log_file, codec = AppendOnlyFile(own_redis, tmp_path), BlockingCodec()

    def build_blocking(config: FleetConfig, stage: StageName) -> BuiltStage:
        plain = build(config, stage)
        return BuiltStage(engine=codec, adapter=plain.adapter) if stage == CODEC else plain

    def restart_during_step() -> None:
        assert codec.within.wait(timeout=30), "the codec takes no step"
        log_file.restart()
        codec.go.set()

    async with open_processes(own_redis.url, config, build_blocking) as (_, client):
        whole = fake_spec_of(config, num_tokens=NUM_FRAMES)
        expected = await answer(client, whole)
        spec = fake_spec_of(config, num_tokens=NUM_FRAMES)
        codec.num_frames = 50
        restarting = asyncio.create_task(asyncio.to_thread(restart_during_step))
        assert_same(await answer_with_actions(client, spec, {3: log_file.record_size}), expected)
        await restarting
