"""Calls between two private networks behind routers that translate addresses, over a connection
that loses, delays and reorders packets. Where networks cannot be created, there is no case to run.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import numpy as np
import pytest
from aiortc import RTCSessionDescription

from tests.web.conftest import Loaded, ServedGateway, serving, with_voice
from tests.web.fake_client import FRAME_SAMPLES, RATE_HZ, Script
from tests.web.realtime.call_client import CallClient, offered, post_offer
from tests.web.realtime.routed_networks import (
    CLIENT_NET,
    SERVER_NET,
    SERVER_ROUTER,
    Routers,
    is_possible,
    routed,
    within,
)
from tests.web.realtime.speech_samples import question
from web.realtime.webrtc.speech_in import SpeechIn

pytestmark = pytest.mark.thorough

LONG_S = 8
ANSWER = Script(
    text="This is a long answer.",
    num_samples=LONG_S * RATE_HZ,
    samples_per_chunk=FRAME_SAMPLES,
    heard="what",
)
CONNECTIONS = [Routers(loss=0.02, delay_s=0.04, jitter_s=0.01)] if is_possible() else []
"""Connections of two percent loss, 40 ms delay and 10 ms jitter in each direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FarGateway:
    gateway: ServedGateway
    routers: Routers


@pytest.fixture(params=CONNECTIONS, ids=lambda _: "routed")
def far(request: pytest.FixtureRequest, loaded: Loaded) -> Iterator[FarGateway]:
    """A gateway in a network of its own; the test's thread is in the client's."""
    routers: Routers = request.param
    routers.forget()
    with routed(routers):
        with within(SERVER_NET):
            running = serving(with_voice(loaded, webrtc_address=SERVER_ROUTER))
            gateway = running.__enter__()
        try:
            with within(CLIENT_NET):
                yield FarGateway(gateway=gateway, routers=routers)
        finally:
            running.__exit__(None, None, None)


def signalled(gateway: ServedGateway, sdp: str, query: Mapping[str, str]) -> httpx.Response:
    """Send an offer within the gateway's network: only the call itself is routed."""
    with within(SERVER_NET):
        return asyncio.run(post_offer(gateway, sdp, query=query))


@asynccontextmanager
async def called_from_afar(far: FarGateway, **query: str) -> AsyncIterator[CallClient]:
    async with offered() as offer:
        client = offer.client
        (receiver,) = client.peer.getReceivers()
        SpeechIn(lambda pcm: client.on_heard(np.frombuffer(pcm, "<i2"), [])).attach(receiver)
        answer = await asyncio.to_thread(signalled, far.gateway, offer.sdp, query)
        assert answer.status_code == 201 and SERVER_ROUTER in answer.text, answer.text
        await client.peer.setRemoteDescription(RTCSessionDescription(answer.text, "answer"))
        client.session = (await client.until("session.created"))["session"]
        yield client


def test_spoken_question_is_answered_through_routers_and_losses(far: FarGateway) -> None:
    async def talk() -> None:
        async with called_from_afar(far) as client:
            client.microphone.say(question())
            await client.until("input_audio_buffer.speech_stopped")
            response = await client.played()
            await client.until_heard(LONG_S * 0.95)
            assert response["status"] == "completed"
            assert client.loud_s() == pytest.approx(LONG_S, abs=0.2)
            assert client.longest_pause_s() < 0.2

    far.gateway.client.script = ANSWER
    asyncio.run(talk())
    assert far.routers.num_lost > 0 and far.routers.num_late > 0, "the connection was impaired"


def test_answer_continues_in_a_new_call_after_the_network_changed(far: FarGateway) -> None:
    async def talk() -> None:
        async with called_from_afar(far) as client:
            client.ask()
            started = await client.until("output_audio_buffer.started")
            await client.until_heard(2.0)
            far.routers.forget()
            heard_s = client.loud_s()
            query = {"session": client.session["id"], "response": started["response_id"]}
            query["samples"] = str(int(heard_s * RATE_HZ))
            async with called_from_afar(far, **query) as again:
                assert again.session["id"] == client.session["id"]
                response = await again.played()
                assert (response["id"], response["status"]) == (query["response"], "completed")
                await again.until_heard((LONG_S - heard_s) * 0.95)

    far.gateway.client.script = ANSWER
    asyncio.run(talk())
