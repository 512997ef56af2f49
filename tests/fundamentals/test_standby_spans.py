"""A span worker that no route uses loads a span beforehand, and replaces one that leaves without
loading anything.
"""

import threading
from pathlib import Path

import pytest
import redis

from fleet.control import keys
from fleet.control.connect import connect, text
from fleet.core.errors import ConfigError
from fleet.core.ids import WorkerId
from fleet.spans.protocol.layers import LayerSpan
from fleet.stages.base import BuiltSpan
from fleet.stages.options import BuildOptions
from fleet.stages.text import build_span
from tests.capabilities import remote_of
from tests.span_threads import FORWARD, REVERSE, SpanThreads, span_threads
from tests.support import wait_until

pytestmark = pytest.mark.one_file_in(2, "fundamentals with many processes")

WAIT_S = 20.0
AUTOMATIC = "stages.lm.spans={anchor: '0:0', workers: auto, replicas: 2, standby: 1}"


def span_of(control: redis.Redis, worker: WorkerId | None) -> str:
    assert worker is not None
    return text(control.hget(keys.worker(worker), "span"))


def anchor_of(control: redis.Redis, worker: WorkerId | None) -> str:
    assert worker is not None
    return text(control.hget(keys.worker(worker), "anchor"))


@pytest.mark.parametrize(
    "division", [FORWARD, REVERSE, AUTOMATIC], ids=["forward", "reverse", "automatic"]
)
def test_unused_span_worker_takes_the_place_of_another_without_loading(
    redis_url: str, tmp_path: Path, division: str
) -> None:
    loads: list[str] = []

    def build(options: BuildOptions, span: LayerSpan) -> BuiltSpan:
        loads.append(str(span))
        return build_span(options, span)

    with span_threads(redis_url, tmp_path, division) as fleet, connect(redis_url) as control:
        fleet.add_anchor()
        workers = [fleet.add_span_worker(build) for _ in range(3)]
        fleet.wait_route()
        (unused,) = wait_unused(fleet, control, [worker.last_id for worker in workers])
        wait_until(lambda: span_of(control, unused), "a span of the unused worker")
        span = span_of(control, unused)
        assert sorted(loads) == sorted(
            [
                span,
                *(
                    span_of(control, worker.last_id)
                    for worker in workers
                    if worker.last_id != unused
                ),
            ]
        )
        leaving = next(
            worker
            for worker in workers
            if worker.last_id != unused and span_of(control, worker.last_id) == span
        )
        leaving.stop.set()
        wait_until(lambda: anchor_of(control, unused), "the unused worker to be used")
        fleet.wait_route()
        assert span_of(control, unused) == span and len(loads) == 3


def test_worker_that_cannot_load_its_part_stays_out_of_the_route_and_unclaimed(
    redis_url: str, tmp_path: Path
) -> None:
    with (
        span_threads(redis_url, tmp_path, AUTOMATIC.replace(", standby: 1", "")) as fleet,
        connect(redis_url) as control,
    ):
        anchor = fleet.add_anchor()
        workers = [fleet.add_span_worker() for _ in range(1)]
        fleet.wait_route()
        before = route_of(control, anchor.last_id)
        tried = threading.Event()

        def fail(_options: BuildOptions, _span: LayerSpan) -> BuiltSpan:
            tried.set()
            raise ConfigError("no memory")

        broken = fleet.add_span_worker(fail)
        assert tried.wait(WAIT_S)
        wait_until(lambda: anchor_of(control, broken.last_id) == "", "the worker to be released")
        assert (
            route_of(control, anchor.last_id) == before
            and anchor_of(control, workers[0].last_id) == anchor.last_id
        )
        assert remote_of(anchor.settings.built.engine).accepts_requests()


def route_of(control: redis.Redis, anchor: WorkerId | None) -> str:
    assert anchor is not None
    return text(control.hget(keys.worker(anchor), "route"))


def wait_unused(
    fleet: SpanThreads, control: redis.Redis, workers: list[WorkerId | None]
) -> list[WorkerId]:
    """Wait until two of the workers have an anchor, and return the others."""

    def unused() -> list[WorkerId]:
        return [
            worker for worker in workers if worker is not None and not anchor_of(control, worker)
        ]

    wait_until(lambda: len(unused()) == len(workers) - 2, "a route of two span workers")
    return unused()
