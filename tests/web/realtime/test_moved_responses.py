"""Responses under way while their session moves to another gateway, which submits the request if
the former gateway could not, and may read the answer late.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from redis.exceptions import ConnectionError

from fleet.control import keys
from fleet.core.ids import RequestId
from tests.harness import ThreadFleet, stop_claims, thread_fleet
from tests.support import await_until
from tests.web.conftest import Loaded
from tests.web.realtime.socket_client import SocketClient
from tests.web.realtime.test_secret_access import (
    KEY,
    HttpxGateway,
    first,
    opening,
    second,
    serving,
)
from web.realtime import session_records

__all__ = ["first", "second"]
reachable = first


@pytest.fixture
def workers(redis_url: str) -> Iterator[ThreadFleet]:
    with thread_fleet(redis_url) as fleet:
        yield fleet


@pytest.fixture
async def cut_off(
    loaded: Loaded, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[HttpxGateway]:
    """A gateway whose submissions do not reach Redis."""
    over = asyncio.Event()

    async def wait(*_: object) -> None:
        await over.wait()
        raise ConnectionError

    async with serving(loaded, redis_url) as gateway:
        monkeypatch.setattr(gateway.client.requests, "_replicate", wait)
        yield gateway
        over.set()


async def begin(
    client: SocketClient, gateway: HttpxGateway, **response: object
) -> tuple[str, RequestId]:
    """Ask for a response, and wait until another gateway could continue it. Return the response's
    id and its request's id.
    """
    await client.ask("hello", output_modalities=["text"], **response)
    created = (await client.until("response.created"))["response"]["id"]
    request = RequestId((await client.until("fleet.request"))["request_id"])

    async def is_written() -> bool:
        state = await gateway.redis.execute_command(
            "HGET", keys.voice(client.session), "state", NEVER_DECODE=True
        )
        return state is not None and request.encode() in state

    await await_until(is_written, "the response to be written down")
    return created, request


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize(
    "options",
    [{}, {"instructions": "answer at once"}],
    ids=["session's instructions", "own instructions"],
)
async def test_response_is_submitted_by_the_gateway_that_continues_its_session(
    cut_off: HttpxGateway, reachable: HttpxGateway, options: dict[str, object]
) -> None:
    async with opening(cut_off, KEY, "?fleet=1") as client:
        session = client.session
        response, request = await begin(client, cut_off, **options)
        await client.drop()
    assert not await reachable.redis.exists(keys.request(request))
    async with opening(
        reachable, KEY, f"?fleet=1&session={session}&response={response}&samples=0"
    ) as again:
        assert (await again.until("fleet.resumed"))["response_id"] == response
        done = (await again.until("response.done"))["response"]
    assert done["id"] == response and done["status"] in ("completed", "incomplete"), done
    assert await reachable.redis.hget(keys.request(request), "state") == "finished"
    body = (await reachable.http.get(f"/v1/fleet/requests/{request}")).text
    assert "hello" in body and all(str(value) in body for value in options.values())


@pytest.mark.usefixtures("workers")
async def test_response_to_its_own_input_fails_with_the_remedy(
    cut_off: HttpxGateway, reachable: HttpxGateway
) -> None:
    """A response with input of its own fails with the remedy when its gateway is lost: such input
    is stored only with the request, which was never submitted.
    """
    item = {
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "something else"}],
    }
    async with opening(cut_off, KEY, "?fleet=1") as client:
        session = client.session
        response, _ = await begin(client, cut_off, input=[item])
        await client.drop()
    async with opening(
        reachable, KEY, f"?fleet=1&session={session}&response={response}&samples=0"
    ) as again:
        done = (await again.until("response.done"))["response"]
    assert done["status"] == "failed" and "ask again" in str(done["status_details"])


@pytest.mark.usefixtures("workers")
async def test_cancelled_response_is_not_submitted_by_the_next_gateway(
    cut_off: HttpxGateway, reachable: HttpxGateway
) -> None:
    async with opening(cut_off, KEY, "?fleet=1") as client:
        session = client.session
        _, request = await begin(client, cut_off)
        before = await cut_off.redis.execute_command(
            "HGET", keys.voice(session), "state", NEVER_DECODE=True
        )
        await client.send("response.cancel")
        await client.until("response.done")

        async def is_written() -> bool:
            return (
                await cut_off.redis.execute_command(
                    "HGET", keys.voice(session), "state", NEVER_DECODE=True
                )
                != before
            )

        await await_until(is_written, "the cancellation to be written down")
        await client.drop()
    async with opening(reachable, KEY, f"?fleet=1&session={session}") as again:
        await again.until("fleet.resumed")
        await again.ask("hello", output_modalities=["text"])
        await again.done()
    assert not await reachable.redis.exists(keys.request(request))


async def test_former_gateway_leaves_an_answer_to_the_holder_of_its_session_however_late_it_reads(
    first: HttpxGateway,
    second: HttpxGateway,
    workers: ThreadFleet,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gateway that continues a session reads its answer only after the former gateway has seen
    five times that the session goes on. The former one aborts nothing.
    """
    awaited, num_looks = asyncio.Event(), 0
    resume, exists = second.client.requests.resume, first.client.voice.exists

    async def resume_late(*arguments: Any) -> Any:
        await awaited.wait()
        return await resume(*arguments)

    async def counted(session: str) -> bool:
        nonlocal num_looks
        num_looks += 1
        if num_looks == 5:
            workers.loops[0].availability.draining = False
            awaited.set()
        return await exists(session)

    monkeypatch.setattr(session_records, "RENEW_S", 0.1)
    monkeypatch.setattr(session_records, "SPARE_S", 0.1)
    monkeypatch.setattr(second.client.requests, "resume", resume_late)
    monkeypatch.setattr(first.client.voice, "exists", counted)
    await asyncio.to_thread(stop_claims, workers.loops[0])
    async with opening(first, KEY, "?fleet=1") as client:
        session = client.session
        response, request = await begin(client, first)
        await client.drop()
    query = f"?fleet=1&session={session}&response={response}&samples=0"
    async with opening(second, KEY, query) as again:
        done = (await again.until("response.done"))["response"]
    assert done["status"] in ("completed", "incomplete"), done["status_details"]
    assert await second.redis.hget(keys.request(request), "state") == "finished"
