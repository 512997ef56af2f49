"""Session registry: the queue of clients, limits of their early frames, and the end of a lost
client's session.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect

from tests.support import wait_until
from tests.web.conftest import Loaded, ServedGateway, serving
from tests.web.fake_client import Script
from tests.web.realtime.socket_client import opened
from web.realtime.transport import voice_socket

VOICE = {"max_sessions": 2, "max_waiting": 2, "reconnect_timeout_s": 0.5}


@pytest.fixture(scope="module")
def small(loaded: Loaded) -> Iterator[ServedGateway]:
    """A gateway limited to two sessions and two queued clients, with a short reconnect timeout."""
    config = loaded.config.model_validate({**loaded.config.model_dump(), "voice": VOICE})
    with serving(
        Loaded(checkpoint=loaded.checkpoint, config=config, frontend=loaded.frontend)
    ) as gateway:
        yield gateway


def address(gateway: ServedGateway, path: str) -> str:
    return gateway.url.replace("http", "ws") + path


SAMPLE = bytes(2)
"""A binary frame of one audio sample, which gets no reply."""


async def next_error(socket: ClientConnection) -> str:
    while (event := await next_event(socket))["type"] != "error":
        continue
    return str(event)


async def next_event(socket: ClientConnection) -> dict[str, Any]:
    return json.loads(await socket.recv())


@asynccontextmanager
async def two_queued(small: ServedGateway) -> AsyncIterator[tuple[ClientConnection, ...]]:
    """Connect two clients that wait in the queue."""
    async with (
        connect(address(small, "/console/ws")) as third,
        connect(address(small, "/console/ws")) as fourth,
    ):
        assert (await next_event(third))["position"] == 1
        assert (await next_event(fourth))["position"] == 2
        yield third, fourth


async def test_queued_clients_are_sent_their_position(small: ServedGateway) -> None:
    async with opened(small) as first, opened(small):
        async with (
            connect(address(small, "/console/ws")) as third,
            connect(address(small, "/v1/realtime")) as fourth,
        ):
            assert (await next_event(third))["position"] == 1
            queued = await next_event(fourth)
            assert queued["type"] == "error" and queued["error"]["code"] == "session_queued"
            assert "place 2" in str(queued)
            async with connect(address(small, "/console/ws")) as fifth:
                refused = await next_event(fifth)
                assert refused["error"]["code"] == "rate_limit_exceeded"
                counted = [error.code for error in small.client.telemetry.refusals]
                assert counted == ["rate_limit_exceeded"], "for the journal"
                await fifth.wait_closed()
                assert fifth.close_code == 1013
                assert (fifth.close_reason or "").startswith(
                    "rate_limit_error.rate_limit_exceeded: "
                )
            # Frames sent while queued are replayed once there is a session.
            await third.send('{"type":"input_audio_buffer.clear"}')
            await first.socket.close()
            assert (await next_event(third))["type"] == "session.created"
            assert "place 1" in str(await next_event(fourth))
            kinds = [(await next_event(third))["type"] for _ in range(2)]
            assert "input_audio_buffer.cleared" in kinds
            await third.close()
            assert (await next_event(fourth))["type"] == "session.created"


async def test_client_that_leaves_the_queue_is_skipped(small: ServedGateway) -> None:
    async with opened(small) as first, opened(small):
        async with two_queued(small) as (third, fourth):
            await third.close()
            assert (await next_event(fourth))["position"] == 1
            await first.socket.close()
            assert (await next_event(fourth))["type"] == "session.created"


async def test_session_ends_if_its_client_does_not_reconnect(small: ServedGateway) -> None:
    small.client.script = Script(stall_at=4)
    async with opened(small) as page:
        await page.ask("hello")
        await page.until("response.output_audio_transcript.delta")
        await page.drop()
    (fake,) = [stream for stream in small.client.streams.values() if not stream.finished]
    wait_until(lambda: fake.aborted, "the request to be aborted")
    wait_until(lambda: page.session not in small.client.voice.held, "the session to be forgotten")


async def test_early_frames_are_bounded_in_number(
    small: ServedGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(voice_socket, "MAX_EARLY_BYTES", 100 * voice_socket.FRAME_BYTES)
    async with opened(small), opened(small), connect(address(small, "/console/ws")) as third:
        assert (await next_event(third))["position"] == 1
        for _ in range(101):
            await third.send("")
        assert "too much was sent" in str(await next_event(third))
        await third.wait_closed()


async def test_early_frames_of_all_clients_are_bounded_together(
    small: ServedGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(voice_socket, "MAX_ALL_EARLY_BYTES", 100 * voice_socket.FRAME_BYTES)
    async with opened(small) as first, opened(small):
        async with two_queued(small) as (third, fourth):
            for _ in range(60):
                await third.send(SAMPLE)
                await fourth.send(SAMPLE)
            reading = [asyncio.create_task(next_error(socket)) for socket in (third, fourth)]
            (refused, *_), others = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            assert "too much was sent" in refused.result()
            for task in others:
                task.cancel()
        # what they sent does not count once they have left
        async with connect(address(small, "/console/ws")) as third:
            while (await next_event(third))["position"] != 1:
                continue
            for _ in range(90):
                await third.send(SAMPLE)
            await first.socket.close()
            assert (await next_event(third))["type"] == "session.created"
