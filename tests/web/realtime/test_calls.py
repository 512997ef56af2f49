"""Calls over WebRTC: the same sessions as over WebSockets, with sound as Opus."""

import asyncio
import json
import logging
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from aiortc import RTCSessionDescription

from fleet.config.api_keys import ApiKey, KeysFile, Scope, digest_of, encode_keys_file
from tests.web.conftest import (
    KEY,
    LIMITS,
    Loaded,
    ServedGateway,
    bearer,
    bounded,
    serving,
)
from tests.web.fake_client import FRAME_SAMPLES, RATE_HZ, Script, sine
from tests.web.realtime.call_client import (
    HEARD_HZ,
    called,
    drop_packets,
    offered,
    post_offer,
    sessions,
    until_away,
    until_listed,
    until_over,
)
from tests.web.realtime.socket_client import opened, transcript
from tests.web.realtime.speech_samples import QUESTION, question, silence, speech
from web.realtime.webrtc import routes

pytestmark = [
    pytest.mark.one_file_in(2, "voice sockets"),
    pytest.mark.usefixtures("only_loopback"),
]

G711 = {"type": "audio/pcmu"}
TONE_S = 1.5
ANSWER = Script(text="Hello there, this is it.", num_samples=int(TONE_S * RATE_HZ), heard="what")
LONG_S = 8
WORDS = ("one", " two", " three", " four", " five", " six", " seven", " eight", " nine", " ten")
LONG = Script(
    text="".join(WORDS),
    num_samples=LONG_S * RATE_HZ,
    samples_per_chunk=FRAME_SAMPLES,
    heard="stop it now",
    words=[(word, (at + 1) * LONG_S * RATE_HZ // 10) for at, word in enumerate(WORDS)],
)


@pytest.fixture
def locked(loaded: Loaded) -> Iterator[ServedGateway]:
    with serving(loaded, KEY) as gateway:
        yield gateway


@pytest.mark.parametrize("lose_each", [None, 50])
async def test_spoken_question_is_answered_as_over_a_websocket(
    gateway: ServedGateway, monkeypatch: pytest.MonkeyPatch, lose_each: int | None
) -> None:
    """`lose_each`: distance between two lost packets of audio, of both sides; None: none is
    lost.
    """
    if lose_each is not None:
        drop_packets(monkeypatch, lose_each)
    gateway.client.script = ANSWER
    async with opened(gateway, "/v1/realtime") as page:
        await page.append(question())
        begun = await page.until("input_audio_buffer.speech_started")
        ended = await page.until("input_audio_buffer.speech_stopped")
        expected = (await page.done())["output"][0]
    async with called(gateway) as client:
        client.microphone.say(question())
        started = await client.until("input_audio_buffer.speech_started")
        stopped = await client.until("input_audio_buffer.speech_stopped")
        response = await client.played()
        await client.until_heard(TONE_S * 0.95)
    length_ms = ended["audio_end_ms"] - begun["audio_start_ms"]
    assert stopped["audio_end_ms"] - started["audio_start_ms"] == pytest.approx(length_ms, abs=150)
    assert response["status"] == "completed"
    assert transcript(response["output"][0]) == transcript(expected)
    sound, sent = client.sound(), sine(int(TONE_S * RATE_HZ))
    assert len(sound) / HEARD_HZ == pytest.approx(TONE_S, abs=0.1)
    assert client.longest_pause_s() < 0.2
    middle = sound[HEARD_HZ // 2 : HEARD_HZ].astype(np.float64)
    assert np.sqrt(np.mean(middle**2)) == pytest.approx(
        np.sqrt(np.mean(sent.astype(np.float64) ** 2)), rel=0.2
    )
    assert abs(int(np.abs(np.fft.rfft(middle)).argmax()) * 2 - 440) <= 4
    kinds = client.kinds()
    assert "response.output_audio.delta" not in kinds and "response.output_audio.done" in kinds
    assert kinds.index("output_audio_buffer.started") < kinds.index("output_audio_buffer.stopped")


async def test_speech_during_an_answer_silences_it_at_once(gateway: ServedGateway) -> None:
    gateway.client.script = LONG
    async with called(gateway) as client:
        client.ask()
        await client.until("output_audio_buffer.started")
        await client.until_heard(1.0)
        client.microphone.say(speech(QUESTION) + silence(800))
        cleared = await client.until("output_audio_buffer.cleared")
        done = (await client.until("response.done"))["response"]
        assert (done["status"], done["status_details"]["reason"]) == ("cancelled", "turn_detected")
        assert cleared["response_id"] == done["id"]
        before_s = client.loud_s()
        gateway.client.script = ANSWER
        await client.until("input_audio_buffer.speech_stopped")
        # What was under way, and what the listener's own buffer held.
        assert client.loud_s() - before_s < 0.4
        said = transcript(done["output"][0]).split()
        num_heard = client.loud_s() / LONG_S * len(WORDS)
        assert abs(len(said) - num_heard) <= 1, "the words that were heard are kept"


async def test_client_clears_what_is_played(gateway: ServedGateway) -> None:
    gateway.client.script = LONG
    async with called(gateway) as client:
        client.ask()
        await client.until("output_audio_buffer.started")
        await client.until_heard(0.5)
        client.send("output_audio_buffer.clear")
        cleared = await client.until("output_audio_buffer.cleared")
        done = (await client.until("response.done"))["response"]
        assert done["status_details"]["reason"] == "client_cancelled"
        assert cleared["response_id"] == done["id"]


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


async def test_settings_arrive_with_the_offer(gateway: ServedGateway) -> None:
    session: Any = {"type": "realtime", "instructions": "Be brief.", "max_output_tokens": 7}
    async with offered() as offer:
        answer = await asyncio.to_thread(
            lambda: gateway.openai().realtime.calls.create(sdp=offer.sdp, session=session)
        )
        assert answer.response.status_code == 201
        await offer.client.peer.setRemoteDescription(RTCSessionDescription(answer.text, "answer"))
        created = (await offer.client.until("session.created"))["session"]
        assert (created["instructions"], created["max_output_tokens"]) == ("Be brief.", 7)


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
        async with called(gateway) as client, offered() as offer:
            refused = await post_offer(gateway, offer.sdp)
            assert refused.status_code == 429 and "try again" in refused.json()["error"]["message"]
            assert sessions(gateway) == {client.session["id"]}
        await until_over(gateway, client.session["id"])
        async with called(gateway) as client:
            assert sessions(gateway) == {client.session["id"]}


async def test_calls_have_a_limit_below_that_of_sessions(loaded: Loaded) -> None:
    """A call that continues another call's session takes its place; to continue a WebSocket's
    session needs a new place.
    """
    voice = loaded.config.voice.model_copy(update={"max_calls": 1})
    few = replace(loaded, config=loaded.config.model_copy(update={"voice": voice}))
    with serving(few) as gateway:
        async with opened(gateway) as talker, called(gateway) as client, offered() as offer:
            for session in ("", talker.session):
                refused = await post_offer(gateway, offer.sdp, query={"session": session})
                assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
                assert "1 WebRTC calls (voice.max_calls" in refused.json()["error"]["message"]
            query = {"session": client.session["id"]}
            async with called(gateway, query=query) as again:
                await asyncio.wait_for(client.closed.wait(), 20)
                refused = await post_offer(gateway, offer.sdp)
                assert refused.status_code == 429, "the call that was replaced left no place"
            await until_over(gateway, again.session["id"])
        async with called(gateway):
            pass


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
    held = sessions(gateway)
    async with offered() as offer:
        assert before in offer.sdp
        refused = await post_offer(gateway, offer.sdp.replace(before, after))
    assert refusal(refused) == (400, "sdp")
    assert sessions(gateway) <= held


async def test_body_that_is_no_offer_is_refused(gateway: ServedGateway) -> None:
    path, post, held = "/v1/realtime/calls", gateway.http.post, sessions(gateway)
    async with offered() as offer:
        sdp = offer.sdp
    assert refusal(post(path, json={"sdp": sdp})) == (400, None)
    assert refusal(post(path, files={"session": (None, "{}")})) == (400, "sdp")
    wrong = {"sdp": (None, sdp), "session": (None, json.dumps({"instructions": 1}))}
    assert refusal(post(path, files=wrong)) == (400, "session.instructions")
    unknown = {"sdp": (None, sdp), "video": (None, "on")}
    assert refusal(post(path, files=unknown)) == (400, "video")
    assert (await post_offer(gateway, sdp * 200)).status_code == 413
    assert refusal(await post_offer(gateway, sdp, query={"session": "sess_none"})) == (
        404,
        "session",
    )
    assert sessions(gateway) <= held


async def test_missing_package_is_named(
    gateway: ServedGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "find_spec", lambda _: None)
    answer = await post_offer(gateway, "v=0")
    assert answer.status_code == 400
    assert "pip install 'fleet-serving[webrtc]'" in answer.json()["error"]["message"]


async def test_response_in_another_format_is_heard(gateway: ServedGateway) -> None:
    gateway.client.script = ANSWER
    async with called(gateway) as client:
        client.ask(audio={"output": {"format": G711}})
        response = await client.played()
        await client.until_heard(TONE_S * 0.95)
    assert (response["status"], response["audio"]["output"]["format"]) == ("completed", G711)


async def test_call_transcribes_in_a_transcription_session(gateway: ServedGateway) -> None:
    gateway.client.script = ANSWER
    session = {"type": "transcription", "audio": {"input": {"format": G711}}}
    async with called(gateway, session_settings=session) as client:
        client.microphone.say(question())
        heard = await client.until("conversation.item.input_audio_transcription.completed")
        assert heard["transcript"] == ANSWER.heard
    assert "response.created" not in client.kinds()


async def test_microphone_that_fills_the_buffer_is_refused_once(gateway: ServedGateway) -> None:
    async with called(gateway) as client:
        client.send("session.update", session={"audio": {"input": {"turn_detection": None}}})
        await client.until("session.updated")
        second = b64encode(bytes(2 * RATE_HZ)).decode()
        for _ in range(int(LIMITS.max_audio_s) - 1):
            client.send("input_audio_buffer.append", audio=second)
        assert (await client.until("error"))["error"]["param"] == "audio"
        await client.until_said(20)
        client.send("input_audio_buffer.clear")
        await client.until("input_audio_buffer.cleared")
        client.send("input_audio_buffer.append", audio=second)
        client.send("input_audio_buffer.commit")
        await client.until("input_audio_buffer.committed")
    assert client.kinds().count("error") == 1


async def test_other_channels_and_binary_messages_are_not_read(gateway: ServedGateway) -> None:
    async with called(gateway) as client:
        other, closed = client.peer.createDataChannel("other"), asyncio.Event()
        other.on("close", closed.set)
        await asyncio.wait_for(closed.wait(), 20)
        client.channel.send(b"audio")
        assert "binary messages" in (await client.until("error"))["error"]["message"]
        client.send("no.such.event")
        assert (await client.until("error"))["error"]["param"] == "type"


async def never_read(*_: object) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    "changes",
    [
        {"aiortc.rtcsctptransport.SCTP_DATA_LAST_FRAG": 0},
        {
            "web.realtime.session.Session.receive": never_read,
            "web.realtime.webrtc.call.MAX_INPUT_BYTES": 1_000_000,
        },
    ],
    ids=["a message without end", "a session that does not read"],
)
async def test_input_that_is_not_read_ends_the_call_beyond_a_limit(
    gateway: ServedGateway,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, object],
) -> None:
    async with called(gateway) as client:
        for name, value in changes.items():
            monkeypatch.setattr(name, value)
        with caplog.at_level(logging.INFO, "fleet.web"):
            for _ in range(40):
                client.channel.send("x" * 60_000)
            await until_away(gateway, client.session["id"])
    assert "a call ends: its client sends more than is read" in caplog.messages


SCOPES_OF: dict[str, tuple[Scope, ...]] = {
    "caller": ("talk",),
    "other": ("talk", "watch"),
    "operator": ("talk", "operate"),
    "watcher": ("watch",),
}


@pytest.fixture
def keyed(loaded: Loaded, tmp_path: Path) -> Loaded:
    """A configuration with these keys, each of which is its name."""
    path = tmp_path / "keys.json"
    keys = {
        name: ApiKey(sha256=digest_of(name.encode()), scopes=scopes)
        for name, scopes in SCOPES_OF.items()
    }
    path.write_text(encode_keys_file(KeysFile(keys=keys)))
    path.chmod(0o600)
    return bounded(loaded, keys_file=path)


@pytest.mark.parametrize("key", ["caller", "operator"])
@pytest.mark.parametrize("is_own", [True, False], ids=["its gateway", "another gateway"])
async def test_key_hangs_up_its_own_calls_and_with_operate_those_of_others(
    keyed: Loaded, key: str, is_own: bool
) -> None:
    with serving(keyed, KEY) as first, serving(keyed, KEY, client=first.client) as second:
        http = (first if is_own else second).http

        def hang_up(key: str, call_id: str) -> int:
            where = f"/v1/realtime/calls/{call_id}/hangup"
            return http.post(where, headers=bearer(key)).status_code

        async with called(first, "caller") as client:
            await until_listed(first, client.session["id"])
            assert hang_up("other", client.call_id) == hang_up("other", "rtc_none") == 404
            assert hang_up("watcher", client.call_id) == 403
            assert hang_up(key, client.call_id) == 200
            await asyncio.wait_for(client.closed.wait(), 20)
        await until_over(first, client.session["id"])


async def test_call_needs_the_scope_talk(keyed: Loaded) -> None:
    with serving(keyed, KEY) as gateway:
        async with offered() as offer:
            refused = await post_offer(gateway, offer.sdp, "watcher")
        assert refused.status_code == 403 and refused.json()["error"]["code"] == "missing_scope"
