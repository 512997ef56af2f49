"""The shipped configurations of a divided model: killed span workers change no answer."""

import asyncio
from collections.abc import Callable, Iterator
from typing import cast

import pytest
from openai import AsyncOpenAI

from fleet.control import keys
from fleet.control.connect import connect, text
from fleet.core.ids import RoleName, StageName, WorkerId
from tests.e2e.fleets import PATIENCE_S, ProcessFleet, fleet_up, process_of
from tests.support import REPO, wait_until

ANCHOR, SPAN = RoleName("lm"), RoleName("lm.span")
NUM_REQUESTS, MAX_TOKENS = 6, 150
SETTINGS = ("numerics=invariant", "web.port=0", "lease.worker_ttl_s=1.0", "stages.lm.spans.standby=1")
LAYOUTS = ("spans_forward", "spans_reverse", "spans_three")
Answers = list[str]


@pytest.fixture(scope="module", params=[pytest.param(layout, marks=pytest.mark.one_in(3, "spans")) for layout in LAYOUTS])
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessFleet]:
    config = str(REPO / "configs" / f"{request.param}.yaml")
    with fleet_up(tmp_path_factory.mktemp("fleet"), *SETTINGS, options=("--config", config)) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def expected(fleet: ProcessFleet) -> Answers:
    """The answers of an undisturbed fleet."""
    return asyncio.run(answers_of(fleet, undisturbed))


def undisturbed() -> None:
    """Do nothing in mid-answer."""


async def answers_of(fleet: ProcessFleet, disturb: Callable[[], None]) -> Answers:
    """Return the answers to some requests at a time; `disturb` is called once some tokens of them have arrived."""
    some_arrived = asyncio.Event()

    async def ask(client: AsyncOpenAI, number: int) -> str:
        stream = await client.chat.completions.create(
            model="text-tiny", messages=[{"role": "user", "content": f"say something about {number}"}], max_tokens=MAX_TOKENS,
            temperature=0.9 if number % 2 else 0.0, seed=number, stream=True, timeout=PATIENCE_S,
        )  # fmt: skip
        parts: list[str] = []
        async for chunk in stream:
            parts += [choice.delta.content or "" for choice in chunk.choices]
            if len(parts) > 5 + number:
                some_arrived.set()
        return "".join(parts)

    async with AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0) as client:
        asked = [asyncio.create_task(ask(client, number)) for number in range(NUM_REQUESTS)]
        await some_arrived.wait()
        await asyncio.to_thread(disturb)
        assert disturb is undisturbed or not all(task.done() for task in asked), "the disturbance came after the answers"
        return list(await asyncio.gather(*asked))


def listed(fleet: ProcessFleet, role: RoleName) -> list[WorkerId]:
    with connect(fleet.redis_url) as client:
        found = [client.zrange(keys.role_workers(role, status), 0, -1) for status in ("accepting", "standby")]
    return sorted(WorkerId(text(name)) for names in cast("list[list[bytes]]", found) for name in names)


def route_of(fleet: ProcessFleet) -> dict[WorkerId, str]:
    """Return the span workers in the live anchor's route, each with its span."""
    anchors = listed(fleet, ANCHOR)
    found: dict[WorkerId, str] = {}
    with connect(fleet.redis_url) as client:
        for worker in listed(fleet, SPAN):
            fields = cast("list[bytes | None]", client.hmget(keys.worker(worker), ["anchor", "span"]))
            anchor, span = map(text, fields)
            found |= {worker: span} if anchor in anchors else {}
    return found


def wait_for_route(fleet: ProcessFleet) -> dict[WorkerId, str]:
    """Wait until every configured span has a worker in the route."""
    spans = fleet.config.stage(StageName("lm")).spans
    assert spans is not None
    wanted = sorted(spans.workers)

    def complete_route() -> dict[WorkerId, str] | None:
        found = route_of(fleet)
        return found if sorted(found.values()) == wanted else None

    return wait_until(complete_route, "a complete route", PATIENCE_S) or {}


def test_killed_span_workers_change_no_answer(fleet: ProcessFleet, expected: Answers) -> None:
    for worker in wait_for_route(fleet):
        assert asyncio.run(answers_of(fleet, process_of(worker).kill)) == expected
