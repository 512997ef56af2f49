"""Clients that read a few bytes a second hold no slot of real processes: other answers end
meanwhile, a killed worker changes nothing, and at last the slow ones have every byte.
"""

import threading
from pathlib import Path

import pytest
import redis

from fleet.control import keys
from fleet.control.connect import connect, text
from fleet.core.ids import RequestId
from fleet.graphs import DEFAULT_GRAPH, GRAPHS
from fleet.lab.faults.clients import Gateways
from fleet.lab.faults.load import ChaosLoad
from fleet.lab.faults.slow import SlowGateways, SlowReaders
from fleet.lab.measure.prompts import PROMPTS
from fleet.lab.measure.serving import encode_call, stage_bounds
from tests.e2e.fleets import (
    FAKE,
    PATIENCE_S,
    fleet_up,
    process_of,
    wait_for_workers,
    worker_ids,
)
from tests.support import wait_until

pytestmark = pytest.mark.one_file_in(10, "processes")

STAGES = [stage.name for stage in GRAPHS[DEFAULT_GRAPH].stages]
LAST = STAGES[-1]
NUM_REQUESTS, NUM_SLOW = 4, 6
SETTINGS = (
    *FAKE,
    *(f"stages.{stage}.max_batch=2" for stage in STAGES),
    "limits.max_unread_bytes=16384",
    "edges.codes.credits=2",
    "web.send_timeout_s=300",
)
NUM_TOKENS, NUM_FRAMES = 32, 400
"""Length of an answer: its audio, 1.5 MB, is more than a gateway and the kernel hold of it."""


def owned_tasks(control: redis.Redis) -> set[str]:
    """Return the tasks of all workers, as `request|stage`."""
    stages = [worker for worker in worker_ids(control) if worker.split("@")[0] in STAGES]
    return {task for worker in stages for task in members(control, keys.worker_tasks(worker))}


def members(control: redis.Redis, key: str) -> list[str]:
    return [text(raw) for raw in control.smembers(key)]  # pyright: ignore[reportGeneralTypeIssues]


def are_parked(control: redis.Redis, count: int) -> bool:
    """Return True if `count` requests are live, each with a parked task, and no worker has any."""
    live = [RequestId(request) for request in members(control, keys.LIVE)]
    states = [
        {text(control.hget(keys.task(request, stage), "state")) for stage in STAGES}
        for request in live
    ]
    return len(live) == count and not owned_tasks(control) and all("parked" in of for of in states)


def answer_all(load: ChaosLoad) -> None:
    load.start(NUM_REQUESTS, lambda: None)
    lost = [outcome for outcome in load.finish() if outcome.lost or outcome.difference]
    assert not lost


@pytest.mark.timeout(300)
def test_slow_readers_hold_no_slots_and_have_every_byte_at_last(tmp_path: Path) -> None:
    with fleet_up(tmp_path, *SETTINGS) as fleet, connect(fleet.redis_url) as control:
        bounds = stage_bounds(fleet.config, NUM_TOKENS, NUM_FRAMES)
        model = fleet.api.model()
        bodies = [
            encode_call(model, prompt, fleet.config, bounds) for prompt in PROMPTS[:NUM_REQUESTS]
        ]
        reference = ChaosLoad(Gateways([fleet.url]), bodies, once=True)
        answer_all(reference)
        expected = [reference.answers[number] for number in range(NUM_REQUESTS)]
        gateways = SlowGateways([fleet.url])
        slow = SlowReaders(lambda: gateways, bodies, expected, NUM_SLOW)
        reading = threading.Thread(target=slow.read, args=(lambda: 0.0, PATIENCE_S), daemon=True)
        reading.start()
        try:
            wait_until(lambda: are_parked(control, NUM_SLOW), "all answers to park", PATIENCE_S)
            answer_all(ChaosLoad(Gateways([fleet.url]), bodies, expected, once=True))
            assert control.scard(keys.LIVE) == NUM_SLOW, "the slow ones are still read"
            (last,) = (worker for worker in worker_ids(control) if worker.startswith(f"{LAST}@"))
            process_of(last).kill()
            wait_until(lambda: last not in worker_ids(control), "the death to be noticed")
            wait_for_workers(control, LAST, 1)
            assert are_parked(control, NUM_SLOW)
        finally:
            gateways.hurry.set()
            reading.join(PATIENCE_S)
        assert not reading.is_alive() and len(slow.outcomes) == NUM_SLOW
        assert [o for o in slow.outcomes if o.lost or o.difference or o.changed] == []
        wait_until(
            lambda: not owned_tasks(control) and not control.scard(keys.LIVE), "nothing to be live"
        )
