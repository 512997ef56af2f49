"""Calls whose client or gateway is lost: the session continues over another call, with the same
answer.
"""

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.web.conftest import Loaded, ServedGateway, serving
from tests.web.fake_client import FRAME_SAMPLES, RATE_HZ, Script
from tests.web.realtime.call_client import (
    HEARD_HZ,
    CallClient,
    called,
    sessions,
    until_over,
)
from tests.web.realtime.socket_client import opened, transcript

pytestmark = [
    pytest.mark.one_file_in(2, "voice sockets"),
    pytest.mark.usefixtures("only_loopback"),
]

G711 = {"type": "audio/pcmu"}
DATAGRAM = "aioice.ice.StunProtocol.datagram_received"
LENGTH_S, LOWEST_HZ, HZ_PER_S = 6.0, 400, 200
"""A rising tone, which tells by its pitch which part of it is heard."""


def rising_tone() -> NDArray[np.int16]:
    at_s = np.arange(int(LENGTH_S * RATE_HZ)) / RATE_HZ
    phase = 2 * np.pi * (LOWEST_HZ * at_s + HZ_PER_S * at_s**2 / 2)
    return (10_000 * np.sin(phase)).astype(np.int16)


RISING = Script(
    text="one two three four five six", wave=rising_tone(), samples_per_chunk=FRAME_SAMPLES
)


def place_s(sound: NDArray[np.int16]) -> float:
    """Return the place in the tone at which 0.2 s of it are centred."""
    spectrum = np.abs(np.fft.rfft(sound[: HEARD_HZ // 5].astype(np.float64)))
    return (int(spectrum.argmax()) * 5 - LOWEST_HZ) / HZ_PER_S


@pytest.fixture
def gateways(loaded: Loaded) -> Iterator[tuple[ServedGateway, ServedGateway]]:
    """Two gateways of one control plane."""
    with serving(loaded) as first, serving(loaded, client=first.client) as second:
        first.client.script = RISING
        yield first, second


async def begin(client: CallClient) -> str:
    """Ask, and return the id of the response once a part of it was heard."""
    client.ask()
    started = await client.until("output_audio_buffer.started")
    await client.until_heard(1.0)
    return started["response_id"]


def continuing(client: CallClient, response_id: str, heard_s: float) -> dict[str, str]:
    """Return the query that continues the session of a client."""
    samples = str(int(heard_s * RATE_HZ))
    return {"session": client.session["id"], "response": response_id, "samples": samples}


async def check_rest(client: CallClient, response_id: str, heard_s: float) -> None:
    """Check that the rest of the tone is heard, after its first `heard_s`."""
    response = await client.played()
    assert (response["id"], response["status"]) == (response_id, "completed")
    assert transcript(response["output"][0]) == RISING.text
    await client.until_heard(LENGTH_S - heard_s - 0.2)
    sound = client.sound()
    assert len(sound) / HEARD_HZ == pytest.approx(LENGTH_S - heard_s, abs=0.2)
    assert place_s(sound) == pytest.approx(heard_s + 0.1, abs=0.15)


@pytest.mark.parametrize("stops", [True, False], ids=["stops", "hangs"])
async def test_call_continues_at_another_gateway(
    gateways: tuple[ServedGateway, ServedGateway], stops: bool
) -> None:
    """`stops`: the first gateway ends its calls; otherwise the client does not wait for it."""
    first, second = gateways
    async with called(first) as client:
        response = await begin(client)
        if stops:
            first.stop()
            await asyncio.wait_for(client.closed.wait(), 20)
        heard_s = client.loud_s()
        async with called(second, query=continuing(client, response, heard_s)) as again:
            assert again.session["id"] == client.session["id"]
            await check_rest(again, response, heard_s)
            await asyncio.wait_for(client.closed.wait(), 20)
        await until_over(second, client.session["id"])


async def never_sent(_: object) -> None:
    await asyncio.Event().wait()


async def test_gateway_that_stops_waits_until_its_calls_are_closed(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the wait, a client would notice only by its own checks, after half a minute."""
    monkeypatch.setattr("web.realtime.webrtc.writer.WebRtcWriter.sent", never_sent)
    with serving(loaded) as gateway:
        async with called(gateway) as client:
            gateway.stop()
            await asyncio.wait_for(client.closed.wait(), 20)


async def test_lost_client_continues_its_session(
    gateway: ServedGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.client.script = RISING
    monkeypatch.setattr("aioice.ice.CONSENT_INTERVAL", 0.2)
    monkeypatch.setattr("aioice.ice.CONSENT_FAILURES", 10**6)
    async with called(gateway) as client:
        response = await begin(client)
        with monkeypatch.context() as network:
            network.setattr(DATAGRAM, lambda *_: None)
            monkeypatch.setattr("aioice.ice.CONSENT_FAILURES", 1)
            await asyncio.wait_for(client.closed.wait(), 30)
        monkeypatch.setattr("aioice.ice.CONSENT_FAILURES", 10**6)
        assert client.session["id"] in sessions(gateway)
        heard_s = client.loud_s()
        async with called(gateway, query=continuing(client, response, heard_s)) as again:
            await check_rest(again, response, heard_s)


async def test_session_in_g711_continues_as_a_call(gateway: ServedGateway) -> None:
    """The samples that a client has received count in the format in which it gets the rest."""
    gateway.client.script = RISING
    async with opened(gateway, "/v1/realtime") as page:
        await page.update(audio={"input": {"format": G711}, "output": {"format": G711}})
        await page.ask("hello")
        response = (await page.until("response.output_audio.delta"))["response_id"]
        query = {"session": page.session, "response": response, "samples": str(RATE_HZ)}
        async with called(gateway, query=query) as client:
            assert client.session["audio"]["output"]["format"] == G711
            await check_rest(client, response, 1.0)
