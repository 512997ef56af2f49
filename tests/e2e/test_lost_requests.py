"""The Redis of a running fleet is killed, or loses all its data: clients that leave meanwhile hold
no place, and an answer that was resumed at another gateway continues.
"""

import json
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import redis

from fleet.control import keys
from fleet.graphs import DEFAULT_GRAPH, GRAPHS
from tests.e2e.fleets import FAKE, START_S, ProcessFleet, fleet_up
from tests.e2e.gateways import another_gateway
from tests.support import redis_answers, wait_until
from tests.web.test_resume import events, reported

pytestmark = pytest.mark.one_file_in(5, "answers of processes")

NUM_CLIENTS, NUM_FRAMES = 16, 150
GRAPH = GRAPHS[DEFAULT_GRAPH]
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "what is the opposite of hot?"}],
    "stream": True,
    "seed": 7,
    "modalities": ["text", "audio"],
    "audio": {"format": "pcm16"},
    "stream_options": {"include_event_ids": True},
}
PATH = "/v1/chat/completions"


@contextmanager
def fleet_of(folder: Path, *, step_ms: int) -> Iterator[ProcessFleet]:
    """Run a fleet whose answers last for `NUM_FRAMES` steps."""
    stages = [stage.name for stage in GRAPH.stages if stage.default_sampling]
    settings = (
        *FAKE,
        "numerics=invariant",
        f"limits.max_requests={NUM_CLIENTS}",
        "lease.gateway_timeout_s=3600",
        *(f"stages.{stage}.extra.step_ms={step_ms}" for stage in stages),
        *(f"stages.{stage}.sampling.max_tokens={NUM_FRAMES}" for stage in stages),
    )
    with fleet_up(folder, *settings) as fleet:
        yield fleet


def redis_process(fleet: ProcessFleet) -> psutil.Process:
    with redis.Redis.from_url(fleet.redis_url) as client:
        return psutil.Process(int(client.info("server")["process_id"]))


def body_of(fleet: ProcessFleet) -> dict[str, Any]:
    return {**BODY, "model": fleet.get("/v1/models")["data"][0]["id"]}


def test_places_of_clients_that_left_while_redis_was_killed_are_free_at_its_return(
    tmp_path: Path,
) -> None:
    """Sixteen clients, which hold every place for a minute, leave while Redis is away. The next
    client is answered although requests of absent clients may wait for an hour.
    """
    with (
        fleet_of(tmp_path, step_ms=400) as fleet,
        httpx.Client(base_url=fleet.url, timeout=60) as http,
    ):
        body = body_of(fleet)
        with ExitStack() as clients:
            unread: list[Iterator[str]] = []  # an iterator that is dropped closes its connection
            for _ in range(NUM_CLIENTS):
                response = clients.enter_context(http.stream("POST", PATH, json=body))
                unread.append(response.iter_lines())
                assert response.status_code == 200 and next(unread[-1])
            assert http.post(PATH, json=body).status_code == 429
            redis_process(fleet).send_signal(signal.SIGKILL)
        wait_until(lambda: redis_answers(fleet.redis_url), "Redis to be back", START_S)
        back_s = time.monotonic()
        with redis.Redis.from_url(fleet.redis_url) as client:
            wait_until(lambda: not client.scard(keys.LIVE), "every place to be free")
        print(f"every place was free {(time.monotonic() - back_s) * 1000:.0f} ms after its return")
        wait_until(lambda: is_admitted(http, body), "a request to be admitted")


def is_admitted(http: httpx.Client, body: dict[str, Any]) -> bool:
    """Return True if a request is answered, False if workers are still about to join again."""
    with http.stream("POST", PATH, json=body) as response:
        assert response.status_code in (200, 503)
        return response.status_code == 200


def test_answer_resumed_at_another_gateway_continues_although_redis_lost_all_data(
    tmp_path: Path,
) -> None:
    with (
        fleet_of(tmp_path, step_ms=40) as fleet,
        another_gateway(fleet) as (_, port),
        httpx.Client(base_url=fleet.url, timeout=60) as http,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as other,
        redis.Redis.from_url(fleet.redis_url) as admin,
    ):
        body = body_of(fleet)
        expected = reported(events(http.post(PATH, json=body).text))
        with http.stream("POST", PATH, json=body) as begun:
            request, lines = begun.headers["x-request-id"], begun.iter_lines()
            had = read_events(lines, 20)
            path = f"/v1/fleet/requests/{request}/stream"
            last_id = [event_id for event_id, _ in had if event_id][-1]
            with other.stream("GET", path, headers={"last-event-id": last_id}) as resumed:
                more_lines = resumed.iter_lines()
                more = read_events(more_lines, 10)
                admin.flushall()
                rest = events("\n".join(more_lines))
        assert "error" not in json.dumps([data for _, data in rest])
        assert reported([*had, *more, *rest]) == expected


def read_events(lines: Iterator[str], number: int) -> list[tuple[str, dict[str, object]]]:
    """Read events up to the end of event number `number`."""
    read: list[str] = []
    while number:
        read.append(next(lines))
        number -= not read[-1]
    return events("\n".join(read))
