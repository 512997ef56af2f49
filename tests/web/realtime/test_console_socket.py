"""The console's voice socket: the same session as at the OpenAI socket, with audio in binary
frames, and lost connections.
"""

import base64
import json

import httpx
import msgspec
import numpy as np
import pytest
from websockets.asyncio.client import connect

from fleet.control.client import VoiceHold
from fleet.core.errors import EngineError, RedisUnreachable
from fleet.core.ids import RequestId, request_id_of
from tests.support import wait_until
from tests.web.conftest import Loaded, ServedGateway, bounded, serving
from tests.web.fake_client import FRAME_SAMPLES, RATE_HZ, Script, sine
from tests.web.realtime.socket_client import SocketClient, opened, transcript
from tests.web.realtime.speech_samples import QUESTION, question, silence, speech
from web.realtime import session_registry

pytestmark = pytest.mark.one_file_in(2, "voice sockets")

PARTS = ["endpointing", "queue", "thinker", "talker", "code2wav", "gateway", "silence"]
LONG = Script(num_samples=10 * RATE_HZ, samples_per_chunk=RATE_HZ)


def sessions(gateway: ServedGateway) -> dict[str, dict[str, object]]:
    return {view["id"]: view for view in gateway.http.get("/v1/fleet/sessions").json()["data"]}


async def test_typed_message_is_answered_in_binary_frames(
    page: SocketClient, gateway: ServedGateway
) -> None:
    await page.ask("hello")
    request = await page.until("fleet.request")
    response = (await page.done())["id"]
    assert (
        bytes(page.audio[response]) == sine(Script().num_samples).tobytes()
        and page.first[response] == 0
    )
    assert request["response_id"] == response and request["request_id"] in gateway.client.traces
    assert request_id_of(response) == request["request_id"]
    states = [event["state"] for event in page.events if event["type"] == "fleet.state"]
    assert states == ["listening", "thinking", "speaking"]
    timing = next(event for event in page.events if event["type"] == "fleet.timing")
    assert [part["name"] for part in timing["parts"]] == PARTS
    assert timing["voice_to_voice_ms"] is None, "the turn was typed"


def counted(gateway: ServedGateway) -> float:
    lines = gateway.http.get("/metrics").text.splitlines()
    return sum(
        float(line.split()[-1])
        for line in lines
        if line.startswith("fleet_voice_to_voice_seconds_count{")
    )


async def test_voice_to_voice_ends_at_the_first_voiced_sample(loaded: Loaded) -> None:
    """The voice-to-voice latency lasts from the end of the user's speech to the first voiced sample
    of the answer. Turns by voice activity and by push to talk have it, typed turns do not. The
    gateway is set not to trim the answer's leading silence.
    """
    with serving(bounded(loaded, max_leading_silence_ms=None)) as gateway:
        gateway.client.script = Script(lead_samples=5 * FRAME_SAMPLES, num_samples=RATE_HZ)
        async with opened(gateway) as page:
            await page.speak(question())
            spoken = await page.until("fleet.timing")
            voiced = next(event for event in page.events if event["type"] == "fleet.voiced")
            await page.until("response.done")
            assert voiced == {
                **voiced,
                "response_id": spoken["response_id"],
                "sample": 5 * FRAME_SAMPLES,
            }
            assert (
                abs(sum(part["ms"] for part in spoken["parts"]) - spoken["voice_to_voice_ms"]) < 1
            )
            assert [part["name"] for part in spoken["parts"]] == PARTS
            assert spoken["parts"][-1]["ms"] > 350 and spoken["voice_to_voice_ms"] > 900, (
                "400 ms, after 500 ms of the user's"
            )
            await page.ask("hello")
            typed = await page.until("fleet.timing")
            await page.until("response.done")
            assert typed["voice_to_voice_ms"] is None
            wait_until(
                lambda: sessions(gateway)[page.session]["turns"] == 2, "both turns to be listed"
            )
            view = sessions(gateway)[page.session]
            assert (
                view["voice_to_voice_last_ms"]
                == view["voice_to_voice_median_ms"]
                == spoken["voice_to_voice_ms"]
            )
            await page.detect_turns(None)
            await page.socket.send(speech(QUESTION))
            await page.send("input_audio_buffer.commit")
            await page.send("response.create")
            pushed = await page.until("fleet.timing")
            assert pushed["voice_to_voice_ms"] > 350
            await page.until("response.done")
        assert counted(gateway) == 2


async def test_voice_to_voice_of_a_requested_response_begins_at_the_end_of_speech(
    gateway: ServedGateway,
) -> None:
    """The voice-to-voice latency of a requested response counts from the end of speech, found by
    the detector or, in committed audio, by the gateway; the silence after it counts as waiting.
    """
    spoken = speech(QUESTION)
    for detection, silent_ms in (
        ({"type": "server_vad", "create_response": False}, 500),
        (None, 900),
    ):
        async with opened(gateway) as page:
            await page.detect_turns(detection)
            await page.speak(silence(300) + spoken + silence(900))
            if detection is None:
                await page.send("input_audio_buffer.commit")
            await page.until("input_audio_buffer.committed")
            await page.send("response.create")
            timing = await page.until("fleet.timing")
        assert timing["voice_to_voice_ms"] > silent_ms and timing["parts"][0]["ms"] > silent_ms
        assert abs(sum(part["ms"] for part in timing["parts"]) - timing["voice_to_voice_ms"]) < 1
        assert abs(timing["voiced_end_ms"] - (300 + len(spoken) // 48)) < 150
        turn = gateway.client.telemetry.turns[timing["request_id"]]
        waited_ms = (turn.decided_us - turn.voiced_end_us) / 1000
        assert abs(waited_ms - timing["parts"][0]["ms"]) < 1, "the trace tells the same wait"


async def test_voice_to_voice_is_null_without_a_known_end_of_speech(
    page: SocketClient, gateway: ServedGateway
) -> None:
    """The voice-to-voice latency is null for a recording and for committed silence, which have no
    known end of speech.
    """
    before = counted(gateway)
    recording = {"type": "input_audio", "audio": base64.b64encode(speech(QUESTION)).decode()}
    await page.detect_turns(None)
    await page.send(
        "conversation.item.create", item={"type": "message", "role": "user", "content": [recording]}
    )
    await page.send("response.create")
    timings = [await page.until("fleet.timing")]
    await page.until("response.done")
    await page.speak(silence(500))
    await page.send("input_audio_buffer.commit")
    await page.send("response.create")
    timings.append(await page.until("fleet.timing"))
    assert [timing["voice_to_voice_ms"] for timing in timings] == [None, None] and counted(
        gateway
    ) == before


async def test_trimmed_leading_silence_counts_as_played(
    page: SocketClient, gateway: ServedGateway
) -> None:
    """Trimmed leading silence counts as played: the trace counts positions in the generated audio,
    the session counts positions in the sent audio.
    """
    gateway.client.script = Script(lead_samples=5 * FRAME_SAMPLES, num_samples=RATE_HZ)
    kept = RATE_HZ * 60 // 1000
    done = await page.complete("hello")
    assert len(page.audio[done["id"]]) // 2 == RATE_HZ + kept and page.first[done["id"]] == 0
    assert next(event["sample"] for event in page.events if event["type"] == "fleet.voiced") == kept
    await page.send("fleet.played", response_id=done["id"], samples=1000)
    reports = gateway.client.telemetry.heard
    wait_until(lambda: reports, "the playback to be recorded")
    (request,) = gateway.client.traces
    assert reports[-1] == (request, 1000 + 5 * FRAME_SAMPLES - kept, 0)
    await page.send(
        "conversation.item.truncate",
        item_id=done["output"][0]["id"],
        content_index=0,
        audio_end_ms=kept // 24,
    )
    item = await page.retrieve(done["output"][0]["id"])
    assert item["content"][0]["transcript"] == "", "silence says no word"


async def test_input_rate_of_the_settings_is_applied(
    page: SocketClient, gateway: ServedGateway
) -> None:
    await page.update(audio={"input": {"format": {"type": "audio/pcm", "rate": 48_000}}})
    await page.speak(np.repeat(np.frombuffer(question(), "<i2"), 2).tobytes())
    await page.until("response.done")
    spec, _ = gateway.client.submitted[0]
    assert 1_800 < spec.audio[0].num_samples / 16 < 3_200


async def test_audio_is_sent_at_most_the_configured_time_ahead(
    page: SocketClient, gateway: ServedGateway
) -> None:
    gateway.client.script = LONG
    await page.ask("hello")
    response = (await page.until("response.created"))["response"]["id"]
    await page.until_audio(response, RATE_HZ // 2)
    wait_until(lambda: "speaking" in str(sessions(gateway)), "the session to be seen speaking")
    await page.send("response.cancel")
    assert (await page.done())["status"] == "cancelled"
    assert len(page.audio[response]) // 2 < 6 * RATE_HZ


async def test_failed_stage_is_named_and_the_session_continues(
    page: SocketClient, gateway: ServedGateway
) -> None:
    gateway.client.script = Script(fail_at=3, failure=EngineError("the engine ran out of memory"))
    await page.ask("hello")
    done = await page.done()
    assert (
        done["status"] == "failed" and "out of memory" in done["status_details"]["error"]["message"]
    )
    gateway.client.script = Script()
    await page.complete("again")


async def test_reconnected_client_is_sent_the_audio_it_lacks(gateway: ServedGateway) -> None:
    gateway.client.script = Script(
        num_samples=4 * RATE_HZ, samples_per_chunk=FRAME_SAMPLES, gap_s=0.01
    )
    async with opened(gateway) as page:
        await page.ask("hello")
        response = (await page.until("response.created"))["response"]["id"]
        await page.until_audio(response, RATE_HZ // 2)
        await page.drop()
    had = RATE_HZ // 3
    async with opened(gateway, session=page.session, response=response, samples=had) as again:
        resumed = await again.until("fleet.resumed")
        assert resumed["response_id"] == response and again.session == page.session
        assert (await again.completed())["id"] == response
    whole = bytes(page.audio[response][: 2 * had]) + bytes(again.audio[response])
    assert again.first[response] == had and whole == sine(4 * RATE_HZ).tobytes()
    assert len(gateway.client.submitted) == 1


async def test_text_sent_during_an_absence_arrives_once(gateway: ServedGateway) -> None:
    script = gateway.client.script = Script(
        text="And so it goes on, word by word. " * 4, gap_s=0.01
    )
    async with opened(gateway) as page:
        await page.ask("hello")
        response = (await page.until("response.output_audio_transcript.delta"))["response_id"]
        await page.drop()
    wait_until(
        lambda: sessions(gateway).get(page.session, {}).get("state") == "away",
        "the loss to be seen",
    )
    before = _num_text_chunks(gateway)
    wait_until(lambda: _num_text_chunks(gateway) > before + 10, "text without a client")
    async with opened(gateway, session=page.session, response=response, samples=0) as again:
        await again.until("response.output_audio_transcript.done")
    assert again.shown(response, page.shown(response)) == script.text


def _num_text_chunks(gateway: ServedGateway) -> int:
    """Return the number of chunks produced on the text edge of the only request."""
    (trace,) = gateway.client.traces.values()
    return next(edge.produced for edge in trace.edges if edge.name == "text")


async def test_lost_end_of_a_response_is_sent_again(gateway: ServedGateway) -> None:
    async with opened(gateway) as page:
        await page.ask("hello")
        response = (await page.done())["id"]
        await page.drop()
    async with opened(gateway, session=page.session, response=response, samples=1920) as again:
        await again.until_audio(response, Script().num_samples - 1920)
    assert bytes(again.audio[response]) == sine(Script().num_samples).tobytes()[2 * 1920 :]


async def half_answered(page: SocketClient, gateway: ServedGateway) -> tuple[str, int]:
    """Ask by voice, and wait until a part of the answer has come and the session is written; return
    the response's id and the number of samples that have come.
    """
    await page.speak(question())
    response = (await page.until("response.created"))["response"]["id"]
    await page.until_audio(response, RATE_HZ)
    wait_until(
        lambda: (
            page.session in gateway.client.voice.held
            and any(
                name.startswith("turn:") for name in gateway.client.voice.held[page.session].fields
            )
        ),
        "written",
    )
    return response, len(page.audio[response]) // 2


async def test_session_continues_at_another_gateway(loaded: Loaded) -> None:
    with serving(loaded) as first, serving(loaded, client=first.client) as second:
        script = Script(num_samples=4 * RATE_HZ, samples_per_chunk=FRAME_SAMPLES, gap_s=0.01)
        first.client.script = script
        async with opened(first) as page:
            response, had = await half_answered(page, first)
            async with opened(
                second, session=page.session, response=response, samples=had
            ) as again:
                done = await again.completed()
                assert transcript(done["output"][0]) == script.text
                await again.complete("and then?")
            # what else was on its way: a close that is never read is no close
            async for _ in page.socket:
                pass
        whole = bytes(page.audio[response][: 2 * had]) + bytes(again.audio[response])
        assert whole == sine(4 * RATE_HZ).tobytes()
        spec, _ = first.client.submitted[-1]
        assert len(spec.audio) == 1, "the user's earlier speech is still in the prompt"
        (other, _) = first.client.submitted[0]
        assert first.client.streams[other.id].aborted is None, (
            "the gateway that lost the session stops nothing"
        )


async def test_response_under_way_waits_for_redis_at_another_gateway(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A response continues at another gateway after its first gateway is lost. While Redis refuses
    writes, the other gateway cannot take the request over, and waits. The gateway names its right
    to the session, which the client may have continued at a third gateway meanwhile.
    """
    with serving(loaded) as first, serving(loaded, client=first.client) as second:
        first.client.script = Script(
            num_samples=4 * RATE_HZ, samples_per_chunk=FRAME_SAMPLES, gap_s=0.01
        )
        resume, refusals = (
            first.client.requests.resume,
            [RedisUnreachable("Redis refuses writes (MISCONF)")] * 2,
        )

        rights: list[VoiceHold | None] = []

        async def resume_later(request: RequestId, voice: VoiceHold | None = None) -> object:
            if refusals:
                raise refusals.pop()
            rights.append(voice)
            return await resume(request, voice)

        monkeypatch.setattr(first.client.requests, "resume", resume_later)
        async with opened(first) as page:
            response, had = await half_answered(page, first)
            async with opened(
                second, session=page.session, response=response, samples=had
            ) as again:
                assert (await again.done())["status"] == "completed" and not refusals
                epoch = first.client.voice.held[page.session].epoch
        assert epoch == 2 and rights == [VoiceHold(page.session, epoch)]
        assert (
            bytes(page.audio[response][: 2 * had]) + bytes(again.audio[response])
            == sine(4 * RATE_HZ).tobytes()
        )


async def test_text_arrives_once_after_an_old_snapshot(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text arrives once even if the stored session is old: a killed gateway no longer stores it, so
    that only the client knows what it has received.
    """
    with serving(loaded) as first, serving(loaded, client=first.client) as second:
        script = first.client.script = Script(
            text="And so it goes on, word by word. " * 4, gap_s=0.01
        )

        def written(session: str) -> int:
            state = msgspec.msgpack.decode(
                first.client.voice.held[session].fields.get("state", b"\x80")
            )
            return (state.get("response") or {}).get("sent_chars", 0)

        async with opened(first) as page:
            await page.ask("hello")
            response = (await page.until("response.output_audio_transcript.delta"))["response_id"]
            wait_until(lambda: written(page.session), "the answer to be written down")
            monkeypatch.setattr(session_registry, "SETTLE_S", 3600)
            while len(page.shown(response)) < written(page.session) + 15:
                await page.until("response.output_audio_transcript.delta")
            await page.drop()
            had = page.shown(response)
            async with opened(
                second, session=page.session, response=response, samples=0, chars=len(had)
            ) as again:
                await again.until("response.output_audio_transcript.done")
                done = await again.until("response.done")
        assert (
            again.shown(response, had)
            == script.text
            == done["response"]["output"][0]["content"][0]["transcript"]
        )


async def test_normal_closure_ends_the_session_and_its_request(gateway: ServedGateway) -> None:
    gateway.client.script = Script(stall_at=4)
    async with opened(gateway) as page:
        await page.ask("hello")
        await page.until("response.output_audio_transcript.delta")
    (fake,) = gateway.client.streams.values()
    wait_until(lambda: fake.aborted, "the abort")
    wait_until(lambda: page.session not in gateway.client.voice.held, "the session to be forgotten")
    async with connect(
        f"{gateway.url.replace('http', 'ws')}/console/ws?session={page.session}"
    ) as socket:
        assert json.loads(await socket.recv())["error"]["code"] == "not_found"
        await socket.wait_closed()
        assert socket.close_code == 1008


async def test_live_sessions_are_listed_and_can_be_ended(
    page: SocketClient, gateway: ServedGateway
) -> None:
    gateway.client.script = Script(stall_at=4)
    await page.ask("hello")
    await page.until("fleet.state", state="speaking")
    wait_until(
        lambda: sessions(gateway).get(page.session, {}).get("state") == "speaking",
        "the session to be listed",
    )
    view = sessions(gateway)[page.session]
    assert (
        view["turns"] == 1
        and view["request_id"] in gateway.client.traces
        and view["input_rate_hz"] == 24_000
    )
    answer = gateway.http.delete(f"/v1/fleet/sessions/{page.session}")
    assert answer.json() == {"id": page.session, "object": "fleet.session.ended", "ended": True}
    await page.socket.wait_closed()
    (fake,) = gateway.client.streams.values()
    wait_until(lambda: fake.aborted, "the abort")
    missing: httpx.Response = gateway.http.delete("/v1/fleet/sessions/sess_none")
    assert missing.status_code == 404 and missing.json()["error"]["param"] == "session_id"
