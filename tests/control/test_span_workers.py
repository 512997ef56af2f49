"""Fleets with span workers: missing layers, a request that kills span workers, and span workers
that are refused for another secret or a changed record.
"""

import asyncio
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis
from safetensors.torch import load_file
from torch import Tensor

from fleet.control import keys
from fleet.control.connect import connect, text
from fleet.control.dead_letters import read_letters
from fleet.core.errors import FleetError, NoWorker
from fleet.core.ids import WorkerId
from fleet.engine.torch.kv_pool import KVShape
from fleet.engine.torch.layout import Layout
from fleet.process.fleet_secret import FleetSecret
from fleet.spans.protocol.layers import LayerSpan
from fleet.spans.torch.model import SpanLayers, SpanRows
from fleet.stages.base import BuiltSpan
from fleet.stages.options import BuildOptions
from fleet.stages.text import build_span
from fleet.telemetry.routes import SpanRoutes, routes_of
from fleet.worker.process.peers import PeerAccess
from tests.control_plane import commands_run
from tests.harness import EdgeArrays, answer, assert_same, gateway_at, wait_none_live
from tests.span_threads import (
    FORWARD,
    REVERSE,
    SPAN_ROLE,
    DeadSpanWorker,
    SpanThreads,
    span_threads,
)
from tests.support import await_until, run_cli, set_options, wait_until

pytestmark = pytest.mark.one_file_in(3, "control in a process")

SHORT_LEASE = "lease.worker_ttl_s=1"
POISON_ID, NUM_COUNTED_TOKENS = 4, 100
SECRET, OTHER_SECRET = FleetSecret(b"s" * 32), FleetSecret(b"o" * 32)


async def test_requests_fail_while_layers_stay_missing_and_run_again_afterwards(
    redis_url: str, tmp_path: Path
) -> None:
    with span_threads(
        redis_url, tmp_path, FORWARD, "lease.no_worker_timeout_s=0.5", "lease.claim_timeout_s=0.3"
    ) as fleet:
        fleet.add_anchor()
        fleet.add_span_worker()
        await asyncio.to_thread(fleet.wait_joined)
        async with gateway_at(redis_url, fleet.config) as client:
            for seed in range(2):
                with pytest.raises(
                    NoWorker,
                    match="no span worker has layer 2 and the output head of lm; start "
                    f".*{SPAN_ROLE}",
                ):
                    await answer(client, fleet.spec(seed))
            assert await client.telemetry.missing_roles() == [SPAN_ROLE]
            fleet.add_span_worker()
            await asyncio.to_thread(fleet.wait_route)
            assert len((await answer(client, fleet.spec(1)))[fleet.spec(1).outputs[0]]) == 16
            assert await client.telemetry.missing_roles() == []


@dataclass(frozen=True, slots=True)
class PoisonedLayers(SpanLayers):
    """Layers of a span worker that end its process when they compute a certain embedding."""

    layers: SpanLayers
    poison_H: Tensor

    @property
    def span(self) -> LayerSpan:
        return self.layers.span

    @property
    def kv_shape(self) -> KVShape:
        return self.layers.kv_shape

    def forward(self, rows_NH: Tensor, layout: Layout) -> SpanRows:
        if bool((rows_NH == self.poison_H).all(dim=-1).any()):
            raise DeadSpanWorker
        return self.layers.forward(rows_NH, layout)

    def finish(self, rows_NH: Tensor) -> Tensor:
        return self.layers.finish(rows_NH)

    def head(self, last_SH: Tensor) -> Tensor:
        return self.layers.head(last_SH)

    def weights(self) -> Mapping[str, Tensor]:
        return self.layers.weights()


def build_poisoned_span(options: BuildOptions, span: LayerSpan) -> BuiltSpan:
    built = build_span(options, span)
    embeddings = load_file(options.checkpoint / "model.safetensors")["model.embed_tokens.weight"]
    return BuiltSpan(
        layers=PoisonedLayers(built.layers, embeddings[POISON_ID].float()),
        num_bytes=built.num_bytes,
    )


async def test_request_that_kills_span_workers_becomes_a_dead_letter(
    redis_url: str, tmp_path: Path
) -> None:
    """A request that kills span workers becomes a dead letter; concurrent requests get the same
    answers as without it.
    """
    with span_threads(redis_url, tmp_path, REVERSE) as fleet:
        fleet.add_anchor()
        for _ in range(2):
            fleet.add_span_worker(build_poisoned_span)
        await asyncio.to_thread(fleet.wait_route)
        async with gateway_at(redis_url, fleet.config) as client:
            seeds = range(4)
            expected = [await answer(client, fleet.spec(seed)) for seed in seeds]

            async def fail() -> EdgeArrays:
                with pytest.raises(FleetError, match="died over this request"):
                    await answer(client, fleet.spec(0, prompt_ids=(7, 8, POISON_ID, 9)))
                return {}

            _, *received = await asyncio.gather(
                fail(), *(answer(client, fleet.spec(seed)) for seed in seeds)
            )
            for each, undisturbed in zip(received, expected, strict=True):
                assert_same(each, undisturbed)
            assert 2 <= fleet.num_died <= 4
            await wait_none_live(client)
        with connect(redis_url) as control:
            (letter,) = read_letters(control)
            assert letter.stage == "lm"


@pytest.mark.parametrize(
    ("secret", "why"),
    [(OTHER_SECRET, "its fleet secret is not that of"), (None, "it has no fleet secret")],
)
def test_span_worker_with_another_secret_or_none_is_refused(
    redis_url: str, tmp_path: Path, secret: FleetSecret | None, why: str
) -> None:
    with span_threads(redis_url, tmp_path, FORWARD, secret=SECRET) as fleet:
        fleet.add_span_worker()
        with connect(redis_url) as control:
            wait_until(lambda: control.zcard(keys.WORKERS), "the first worker to join")
        fleet.add_span_worker(access=PeerAccess(secret=secret))
        wait_until(lambda: fleet.refused, "the second one to be refused")
        assert why in fleet.refused[0].message


def test_span_worker_with_a_changed_record_is_not_used(redis_url: str, tmp_path: Path) -> None:
    with (
        span_threads(redis_url, tmp_path, FORWARD, secret=SECRET) as fleet,
        connect(redis_url) as control,
    ):
        changed, *_ = [fleet.add_span_worker() for _ in range(2)]
        wait_until(lambda: control.zcard(keys.WORKERS) == 2, "both span workers to join")
        assert changed.last_id is not None
        control.hset(keys.worker(changed.last_id), "span_address", "127.0.0.1:9")
        anchor = fleet.add_anchor()
        wait_until(
            lambda: anchor.last_id and "no span worker has" in gap_of(control, anchor.last_id),
            "a gap",
        )
        third = fleet.add_span_worker()
        fleet.wait_route()
        assert text(control.hget(keys.worker(changed.last_id), "anchor")) == ""
        assert (
            third.last_id is not None
            and text(control.hget(keys.worker(third.last_id), "anchor")) == anchor.last_id
        )


def gap_of(control: redis.Redis, anchor: WorkerId) -> str:
    return text(control.hget(keys.worker(anchor), "gap"))


@pytest.mark.parametrize("setting", [FORWARD, REVERSE], ids=["forward", "reverse"])
async def test_figures_of_each_process_are_published_and_shown(
    redis_url: str, tmp_path: Path, setting: str
) -> None:
    """The step statistics of every process of a divided model are published and shown: all have the
    same numbers of steps and rows, and bytes sent equal bytes received.
    """
    with span_threads(redis_url, tmp_path, setting, SHORT_LEASE) as fleet:
        fleet.add_anchor()
        for _ in range(3):
            fleet.add_span_worker()
        await asyncio.to_thread(fleet.wait_joined)
        await asyncio.to_thread(fleet.wait_route)
        async with gateway_at(redis_url, fleet.config) as client:
            prompt = tuple(range(5, 17))
            await answer(client, fleet.spec(0, num_tokens=10, prompt_ids=prompt))
            num_rows = len(prompt) + 10 - 1

            async def published() -> SpanRoutes | None:
                shown = routes_of(await client.telemetry.workers())
                (route,) = shown.routes
                is_whole = all(hop.num_rows == num_rows for hop in route.hops)
                received, sent = (
                    sum(each)
                    for each in zip(
                        *((h.received_bytes, h.sent_bytes) for h in route.hops), strict=True
                    )
                )
                return shown if is_whole and received == sent else None

            shown = await await_until(published, "the figures of every process")
        assert shown is not None
        (route,), (unused,) = shown.routes, shown.unused
        assert len({hop.num_passes for hop in route.hops}) == 1 and all(
            hop.weight_bytes > 0 for hop in route.hops
        )
        assert (
            not route.gap and route.pass_us and sum(hop.share or 0 for hop in route.hops) <= 100.5
        )
        assert (
            unused.role == SPAN_ROLE
            and unused.reason == "free: each span of each route has a worker"
        )
        assert {hop.worker for hop in route.hops} | {unused.worker} == {
            process.last_id for process in fleet.processes
        }
        words = ["status", "--json", *set_options("graph=text", setting)]
        status = await asyncio.to_thread(
            run_cli, *words, cwd=tmp_path, env={"REDIS_URL": redis_url}
        )
        printed = json.loads(status.stdout)
        assert [hop["num_rows"] for hop in printed["routes"][0]["hops"]] == [num_rows] * 3
        assert [free["worker"] for free in printed["unused_span_workers"]] == [unused.worker]


async def count_commands(fleet: SpanThreads, control: redis.Redis) -> float:
    """Return the number of Redis commands for a long answer, minus the commands of an idle fleet in
    the same time.
    """
    pause = threading.Event()
    async with gateway_at(fleet.url, fleet.config) as client:
        await answer(client, fleet.spec(0))
        calls, began_s = num_calls(control), time.monotonic()
        await answer(client, fleet.spec(0, num_tokens=NUM_COUNTED_TOKENS))
        took_s, calls = time.monotonic() - began_s, num_calls(control) - calls
        idle_calls, began_s = num_calls(control), time.monotonic()
        await asyncio.to_thread(pause.wait, 1.0)
        return calls - took_s * (num_calls(control) - idle_calls) / (time.monotonic() - began_s)


def num_calls(control: redis.Redis) -> int:
    return sum(commands_run(control).values())


async def test_divided_model_takes_as_many_commands_of_redis_as_a_whole_one(
    redis_url: str, tmp_path: Path
) -> None:
    counted: list[float] = []
    for number, settings in enumerate([(), (FORWARD,), (REVERSE,)]):
        with (
            span_threads(redis_url, tmp_path / str(number), *settings) as fleet,
            connect(redis_url) as control,
        ):
            fleet.add_anchor()
            for _ in range(2 if settings else 0):
                fleet.add_span_worker()
            await asyncio.to_thread(fleet.wait_route)
            await asyncio.to_thread(fleet.wait_joined)
            counted.append(await count_commands(fleet, control) / NUM_COUNTED_TOKENS)
    whole, *divided = counted
    assert all(each < 1.1 * whole for each in divided), counted
