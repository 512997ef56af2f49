"""Calls over WebRTC: the same sessions as over WebSockets, with sound as Opus."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from aiortc import RTCSessionDescription

from tests.support import wait_until
from tests.web.conftest import KEY, Loaded, ServedGateway, serving
from tests.web.fake_client import FRAME_SAMPLES, RATE_HZ, Script, sine
from tests.web.realtime.call_client import (
    HEARD_HZ,
    CallClient,
    called,
    make_offer,
    post_offer,
)
from tests.web.realtime.socket_client import message, opened, transcript
from tests.web.realtime.speech_samples import QUESTION, question, silence, speech
from web.realtime.webrtc import routes

pytestmark = pytest.mark.one_file_in(2, "voice sockets")

TONE_S = 1.5
ANSWER = Script(text="Hello there, this is it.", num_samples=int(TONE_S * RATE_HZ), heard="what")
LONG = Script(
    text="one two three four five six seven eight nine ten",
    num_samples=8 * RATE_HZ,
    samples_per_chunk=FRAME_SAMPLES,
    heard="stop it now",
)


@pytest.fixture(autouse=True)
def only_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let both sides use loopback, so that the tests need no network."""
    monkeypatch.setattr("aioice.ice.get_host_addresses", lambda **_: ["127.0.0.1"])


@pytest.fixture
def locked(loaded: Loaded) -> Iterator[ServedGateway]:
    with serving(loaded, KEY) as gateway:
        yield gateway


def ask(client: CallClient, text: str = "hello") -> None:
    client.send("conversation.item.create", item=message(text))
    client.send("response.create")


async def all_sent(client: CallClient) -> dict[str, Any]:
    """Return the response that is done, once its audio was played."""
    done = await client.until("response.done")
    await client.until("output_audio_buffer.stopped")
    return done["response"]


def sessions(gateway: ServedGateway) -> set[str]:
    return set(gateway.client.voice.held)


async def until_over(gateway: ServedGateway, session: str) -> None:
    await asyncio.to_thread(wait_until, lambda: session not in sessions(gateway), "the end")


@pytest.mark.parametrize("lose_each", [None, 50])
async def test_spoken_question_is_answered_as_over_a_websocket(
    gateway: ServedGateway, lose_each: int | None
) -> None:
    """`lose_each`: distance between two lost packets of the client; None: no packet is lost."""
    gateway.client.script = ANSWER
    async with opened(gateway, "/v1/realtime") as page:
        await page.append(question())
        begun = await page.until("input_audio_buffer.speech_started")
        ended = await page.until("input_audio_buffer.speech_stopped")
        expected = (await page.done())["output"][0]
    async with called(gateway) as client:
        if lose_each is not None:
            drop_packets(client, lose_each)
        client.microphone.say(question())
        started = await client.until("input_audio_buffer.speech_started")
        stopped = await client.until("input_audio_buffer.speech_stopped")
        response = await all_sent(client)
        await client.until_heard(TONE_S * 0.95)
    length_ms = ended["audio_end_ms"] - begun["audio_start_ms"]
    assert stopped["audio_end_ms"] - started["audio_start_ms"] == pytest.approx(length_ms, abs=150)
    assert response["status"] == "completed"
    assert transcript(response["output"][0]) == transcript(expected)
    sound, sent = client.sound(), sine(int(TONE_S * RATE_HZ))
    assert len(sound) / HEARD_HZ == pytest.approx(TONE_S, abs=0.1)
    middle = sound[HEARD_HZ // 2 : HEARD_HZ].astype(np.float64)
    assert np.sqrt(np.mean(middle**2)) == pytest.approx(
        np.sqrt(np.mean(sent.astype(np.float64) ** 2)), rel=0.2
    )
    assert abs(int(np.abs(np.fft.rfft(middle)).argmax()) * 2 - 440) <= 4
    kinds = client.kinds()
    assert "response.output_audio.delta" not in kinds and "response.output_audio.done" in kinds
    assert kinds.index("output_audio_buffer.started") < kinds.index("output_audio_buffer.stopped")


def drop_packets(client: CallClient, lose_each: int) -> None:
    """Lose one in `lose_each` of the packets that the client sends from now on."""
    transport = client.peer.getSenders()[0].transport
    send, num_sent = transport._send_rtp, 0  # pyright: ignore[reportPrivateUsage]

    async def send_most(data: bytes) -> None:
        nonlocal num_sent
        num_sent += 1
        if num_sent % lose_each:
            await send(data)

    transport._send_rtp = send_most  # pyright: ignore[reportPrivateUsage]


async def test_speech_during_an_answer_silences_it_at_once(gateway: ServedGateway) -> None:
    gateway.client.script = LONG
    async with called(gateway) as client:
        ask(client)
        await client.until("output_audio_buffer.started")
        await client.until_heard(1.0)
        client.microphone.say(speech(QUESTION) + silence(800))
        done = (await client.until("response.done"))["response"]
        assert (done["status"], done["status_details"]["reason"]) == ("cancelled", "turn_detected")
        cleared = await client.until("output_audio_buffer.cleared")
        assert cleared["response_id"] == done["id"]
        before_s = client.loud_s()
        gateway.client.script = ANSWER
        await client.until("input_audio_buffer.speech_stopped")
        # What was under way, and what the listener's own buffer held.
        assert client.loud_s() - before_s < 0.4
        said = transcript(done["output"][0]).split()
        assert len(said) < len(LONG.text.split())


async def test_client_clears_what_is_played(gateway: ServedGateway) -> None:
    gateway.client.script = LONG
    async with called(gateway) as client:
        ask(client)
        await client.until("output_audio_buffer.started")
        await client.until_heard(0.5)
        client.send("output_audio_buffer.clear")
        done = (await client.until("response.done"))["response"]
        assert done["status_details"]["reason"] == "client_cancelled"
        assert (await client.until("output_audio_buffer.cleared"))["response_id"] == done["id"]


async def test_hang_up_ends_call_and_session(gateway: ServedGateway) -> None:
    async with called(gateway) as client:
        assert client.session["id"] in sessions(gateway)
        path = f"/v1/realtime/calls/{client.call_id}/hangup"
        assert gateway.http.post(path).status_code == 200
        await asyncio.wait_for(client.closed.wait(), 20)
    await until_over(gateway, client.session["id"])
    refused = gateway.http.post(path)
    assert refused.status_code == 404 and refused.json()["error"]["param"] == "call_id"


async def test_closing_the_connection_ends_the_session(gateway: ServedGateway) -> None:
    async with called(gateway) as client:
        assert client.session["id"] in sessions(gateway)
    await until_over(gateway, client.session["id"])


async def test_call_continues_at_another_gateway_after_its_own_has_stopped(
    loaded: Loaded,
) -> None:
    with serving(loaded) as first, serving(loaded, client=first.client) as second:
        first.client.script = LONG
        async with called(first) as client:
            ask(client)
            started = await client.until("output_audio_buffer.started")
            await client.until_heard(1.0)
            first.stop()
            await asyncio.wait_for(client.closed.wait(), 20)
            samples = str(int(client.loud_s() * RATE_HZ))
            received = {"response": started["response_id"], "samples": samples}
            async with called(second, session=client.session["id"], **received) as again:
                assert again.session["id"] == client.session["id"]
                response = await all_sent(again)
                assert response["id"] == started["response_id"]
                await again.until_heard(7.0 - 0.5)
                assert client.loud_s() + again.loud_s() == pytest.approx(8.0, abs=0.5)


async def test_settings_arrive_with_the_offer(gateway: ServedGateway) -> None:
    offer = await make_offer()
    session: Any = {"type": "realtime", "instructions": "Be brief.", "max_output_tokens": 7}
    answer = await asyncio.to_thread(
        lambda: gateway.openai().realtime.calls.create(sdp=offer.sdp, session=session)
    )
    assert answer.response.status_code == 201
    await offer.client.peer.setRemoteDescription(RTCSessionDescription(answer.text, "answer"))
    created = (await offer.client.until("session.created"))["session"]
    assert (created["instructions"], created["max_output_tokens"]) == ("Be brief.", 7)
    await offer.client.peer.close()


async def test_client_secret_opens_a_call_from_any_page(locked: ServedGateway) -> None:
    secret = locked.http.post(
        "/v1/realtime/client_secrets",
        json={"session": {"type": "realtime", "instructions": "Be kind."}},
        headers={"authorization": f"Bearer {KEY}"},
    ).json()["value"]
    assert (await post_offer(locked, "v=0", "ek_wrong")).status_code == 401
    assert (await post_offer(locked, "v=0")).status_code == 401
    async with called(locked, secret) as client:
        assert client.session["instructions"] == "Be kind."
    asked = {"origin": "https://app.example.com", "access-control-request-method": "POST"}
    allowed = locked.http.options("/v1/realtime/calls", headers=asked)
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == "*"


async def test_full_gateway_refuses_a_call_instead_of_letting_it_wait(loaded: Loaded) -> None:
    voice = loaded.config.voice.model_copy(update={"max_sessions": 1})
    full = replace(loaded, config=loaded.config.model_copy(update={"voice": voice}))
    with serving(full) as gateway:
        async with called(gateway) as client:
            refused = await post_offer(gateway, (await make_offer()).sdp)
            assert refused.status_code == 429 and "try again" in refused.json()["error"]["message"]
            assert sessions(gateway) == {client.session["id"]}
        await until_over(gateway, client.session["id"])
        async with called(gateway) as client:
            assert sessions(gateway) == {client.session["id"]}


def refusal(answer: httpx.Response) -> tuple[int, str | None]:
    return answer.status_code, answer.json()["error"]["param"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("v=0", "v=1"),
        ("m=application", "m=video"),
        ("opus/48000", "opus/16000"),
        ("a=fingerprint", "a=nothing"),
        ("a=ice-ufrag", "a=nothing"),
        ("a=candidate:", "a=candidate:x\r\na=candidate:"),
        ("m=audio", "m=audio 9 UDP/TLS/RTP/SAVPF 111\r\nm=audio"),
    ],
)
async def test_offer_that_cannot_be_served_is_refused(
    gateway: ServedGateway, before: str, after: str
) -> None:
    sdp, held = (await make_offer()).sdp, sessions(gateway)
    assert before in sdp
    assert refusal(await post_offer(gateway, sdp.replace(before, after))) == (400, "sdp")
    assert sessions(gateway) <= held


async def test_body_that_is_no_offer_is_refused(gateway: ServedGateway) -> None:
    path, sdp = "/v1/realtime/calls", (await make_offer()).sdp
    post, held = gateway.http.post, sessions(gateway)
    assert refusal(post(path, json={"sdp": sdp})) == (400, None)
    assert refusal(post(path, files={"session": (None, "{}")})) == (400, "sdp")
    wrong = {"sdp": (None, sdp), "session": (None, json.dumps({"instructions": 1}))}
    assert refusal(post(path, files=wrong)) == (400, "session.instructions")
    unknown = {"sdp": (None, sdp), "video": (None, "on")}
    assert refusal(post(path, files=unknown)) == (400, "video")
    assert (await post_offer(gateway, sdp * 200)).status_code == 413
    assert refusal(await post_offer(gateway, sdp, session="sess_none")) == (404, "session")
    assert sessions(gateway) <= held


async def test_missing_package_is_named(
    gateway: ServedGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "find_spec", lambda _: None)
    answer = await post_offer(gateway, "v=0")
    assert answer.status_code == 404
    assert "pip install 'fleet-serving[webrtc]'" in answer.json()["error"]["message"]
