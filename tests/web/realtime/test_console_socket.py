"""The console's socket: the same session, sound in binary frames, and a connection that may be lost."""

import base64
import json
from dataclasses import replace

import httpx
import msgspec
import pytest
from websockets.asyncio.client import connect

from fleet.core.errors import EngineError
from tests.support import wait_until
from tests.web.conftest import Gateway, Loaded, serving
from tests.web.fake_client import FRAME_SAMPLES, RATE_HZ, Script, sine
from tests.web.realtime.socket_client import opened
from tests.web.realtime.speech_samples import blocks, silence, speech
from web.realtime import session_registry

PARTS = ["endpointing", "queue", "thinker", "talker", "code2wav", "gateway", "silence"]
LONG = Script(num_samples=10 * RATE_HZ, samples_per_chunk=RATE_HZ)


def sessions(gateway: Gateway) -> dict[str, dict[str, object]]:
    return {view["id"]: view for view in gateway.http.get("/v1/fleet/sessions").json()["data"]}


async def test_a_typed_message_is_answered_in_binary_frames(gateway: Gateway) -> None:
    async with opened(gateway) as page:
        await page.ask("hello")
        request = await page.until("fleet.request")
        done = await page.until("response.done")
    response = done["response"]["id"]
    assert bytes(page.sound[response]) == sine(Script().num_samples).tobytes() and page.first[response] == 0
    assert request["response_id"] == response and request["request_id"] in gateway.client.traces
    states = [event["state"] for event in page.events if event["type"] == "fleet.state"]
    assert states == ["listening", "thinking", "speaking"]
    timing = next(event for event in page.events if event["type"] == "fleet.timing")
    assert [part["name"] for part in timing["parts"]] == PARTS
    assert timing["voice_to_voice_ms"] is None, "the turn was typed"


def counted(gateway: Gateway) -> float:
    lines = gateway.http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("fleet_voice_to_voice_seconds_count{"))


async def test_voice_to_voice_is_counted_to_the_first_voiced_sample_of_answers_to_speech_alone(loaded: Loaded) -> None:
    """By voice activity, by push to talk, and typed. All leading silence is kept here."""
    config = loaded.config.model_copy(update={"web": loaded.config.web.model_copy(update={"max_leading_silence_ms": None})})
    with serving(replace(loaded, config=config)) as gateway:
        gateway.client.script = Script(lead_samples=5 * FRAME_SAMPLES, num_samples=RATE_HZ)
        async with opened(gateway) as page:
            for block in blocks(silence(300) + speech("what day comes after monday") + silence(800)):
                await page.socket.send(block)
            spoken = await page.until("fleet.timing")
            voiced = next(event for event in page.events if event["type"] == "fleet.voiced")
            await page.until("response.done")
            assert voiced == {**voiced, "response_id": spoken["response_id"], "sample": 5 * FRAME_SAMPLES}
            assert abs(sum(part["ms"] for part in spoken["parts"]) - spoken["voice_to_voice_ms"]) < 1
            assert [part["name"] for part in spoken["parts"]] == PARTS
            assert spoken["parts"][-1]["ms"] > 350 and spoken["voice_to_voice_ms"] > 900, "400 ms, after 500 ms of the user's"
            await page.ask("hello")
            typed = await page.until("fleet.timing")
            await page.until("response.done")
            assert typed["voice_to_voice_ms"] is None
            wait_until(lambda: sessions(gateway)[page.session]["turns"] == 2, "both turns to be listed")
            view = sessions(gateway)[page.session]
            assert view["voice_to_voice_last_ms"] == view["voice_to_voice_median_ms"] == spoken["voice_to_voice_ms"]
            audio = {"input": {"turn_detection": None}}
            await page.send("session.update", session={"type": "realtime", "audio": audio})
            await page.socket.send(speech("what day comes after monday"))
            await page.send("input_audio_buffer.commit")
            await page.send("response.create")
            pushed = await page.until("fleet.timing")
            assert pushed["voice_to_voice_ms"] > 350
            await page.until("response.done")
        assert counted(gateway) == 2


async def test_voice_to_voice_of_an_answer_that_the_client_asks_for_begins_with_the_end_of_speech(gateway: Gateway) -> None:
    """Found by the detector, or in the audio that the client commits; the silence behind it is what the user waits through."""
    said = speech("what day comes after monday")
    for detection, silent_ms in (({"type": "server_vad", "create_response": False}, 500), (None, 900)):
        async with opened(gateway) as page:
            await page.send("session.update", session={"audio": {"input": {"turn_detection": detection}}})
            for block in blocks(silence(300) + said + silence(900)):
                await page.socket.send(block)
            if detection is None:
                await page.send("input_audio_buffer.commit")
            await page.until("input_audio_buffer.committed")
            await page.send("response.create")
            timing = await page.until("fleet.timing")
        assert timing["voice_to_voice_ms"] > silent_ms and timing["parts"][0]["ms"] > silent_ms
        assert abs(sum(part["ms"] for part in timing["parts"]) - timing["voice_to_voice_ms"]) < 1
        assert abs(timing["voiced_end_ms"] - (300 + len(said) // 48)) < 150


async def test_answer_to_audio_without_a_known_end_of_speech_is_not_voice_to_voice(gateway: Gateway) -> None:
    """A recording, and silence that was committed."""
    before = counted(gateway)
    recording = {"type": "input_audio", "audio": base64.b64encode(speech("what day comes after monday")).decode()}
    async with opened(gateway) as page:
        await page.send("session.update", session={"audio": {"input": {"turn_detection": None}}})
        await page.send("conversation.item.create", item={"type": "message", "role": "user", "content": [recording]})
        await page.send("response.create")
        timings = [await page.until("fleet.timing")]
        await page.until("response.done")
        for block in blocks(silence(500)):
            await page.socket.send(block)
        await page.send("input_audio_buffer.commit")
        await page.send("response.create")
        timings.append(await page.until("fleet.timing"))
    assert [timing["voice_to_voice_ms"] for timing in timings] == [None, None] and counted(gateway) == before


async def test_leading_silence_that_is_not_sent_counts_as_played(gateway: Gateway) -> None:
    """The request's story holds positions in the sound as it was made; the session's are those of the sound that was sent."""
    gateway.client.script = Script(lead_samples=5 * FRAME_SAMPLES, num_samples=RATE_HZ)
    kept = RATE_HZ * 60 // 1000
    async with opened(gateway) as page:
        await page.ask("hello")
        done = (await page.until("response.done"))["response"]
        assert len(page.sound[done["id"]]) // 2 == RATE_HZ + kept and page.first[done["id"]] == 0
        assert next(event["sample"] for event in page.events if event["type"] == "fleet.voiced") == kept
        await page.send("fleet.played", response_id=done["id"], samples=1000)
        heard = gateway.client.telemetry.heard
        wait_until(lambda: heard, "what was played to be noted")
        (request,) = gateway.client.traces
        assert heard[-1] == (request, 1000 + 5 * FRAME_SAMPLES - kept, 0)
        await page.send("conversation.item.truncate", item_id=done["output"][0]["id"], content_index=0, audio_end_ms=kept // 24)
        await page.send("conversation.item.retrieve", item_id=done["output"][0]["id"])
        item = (await page.until("conversation.item.retrieved"))["item"]
    assert item["content"][0]["transcript"] == "", "silence says no word"


async def test_sound_comes_at_the_rate_that_the_page_says(gateway: Gateway) -> None:
    async with opened(gateway) as page:
        audio = {"input": {"format": {"type": "audio/pcm", "rate": 48_000}}}
        await page.send("session.update", session={"type": "realtime", "audio": audio})
        await page.until("session.updated")
        for block in blocks(silence(300) + speech("what day comes after monday") + silence(800)):
            doubled = b"".join(block[at : at + 2] * 2 for at in range(0, len(block), 2))
            await page.socket.send(doubled)
        await page.until("response.done")
    spec, _ = gateway.client.submitted[0]
    assert 1_800 < spec.audio[0].num_samples / 16 < 3_200


async def test_sound_is_no_further_ahead_than_allowed(gateway: Gateway) -> None:
    gateway.client.script = LONG
    async with opened(gateway) as page:
        await page.ask("hello")
        response = (await page.until("response.created"))["response"]["id"]
        await page.until_sound(response, RATE_HZ // 2)
        wait_until(lambda: "speaking" in str(sessions(gateway)), "the session to be seen speaking")
        await page.send("response.cancel")
        done = await page.until("response.done")
    assert done["response"]["status"] == "cancelled"
    assert len(page.sound[response]) // 2 < 6 * RATE_HZ


async def test_a_stage_that_fails_is_named_and_the_session_goes_on(gateway: Gateway) -> None:
    gateway.client.script = Script(fail_at=3, failure=EngineError("the engine ran out of memory"))
    async with opened(gateway) as page:
        await page.ask("hello")
        done = await page.until("response.done")
        assert done["response"]["status"] == "failed"
        assert "out of memory" in done["response"]["status_details"]["error"]["message"]
        gateway.client.script = Script()
        await page.ask("again")
        assert (await page.until("response.done"))["response"]["status"] == "completed"


async def test_a_lost_connection_goes_on_where_the_page_is(gateway: Gateway) -> None:
    gateway.client.script = Script(num_samples=4 * RATE_HZ, samples_per_chunk=FRAME_SAMPLES, gap_s=0.01)
    async with opened(gateway) as page:
        await page.ask("hello")
        response = (await page.until("response.created"))["response"]["id"]
        await page.until_sound(response, RATE_HZ // 2)
        await page.drop()
    had = RATE_HZ // 3
    async with opened(gateway, session=page.session, response=response, samples=had) as again:
        resumed = await again.until("fleet.resumed")
        assert resumed["response_id"] == response and again.session == page.session
        done = await again.until("response.done")
    assert done["response"]["id"] == response and done["response"]["status"] == "completed"
    whole = bytes(page.sound[response][: 2 * had]) + bytes(again.sound[response])
    assert again.first[response] == had and whole == sine(4 * RATE_HZ).tobytes()
    assert len(gateway.client.submitted) == 1


async def test_words_told_without_a_connection_come_once(gateway: Gateway) -> None:
    script = gateway.client.script = Script(text="And so it goes on, word by word. " * 4, gap_s=0.01)
    async with opened(gateway) as page:
        await page.ask("hello")
        response = (await page.until("response.output_audio_transcript.delta"))["response_id"]
        await page.drop()
    wait_until(lambda: sessions(gateway).get(page.session, {}).get("state") == "away", "the loss to be seen")
    (request,) = gateway.client.traces

    def num_text_chunks() -> int:
        return next(edge.produced for edge in gateway.client.traces[request].edges if edge.name == "text")

    before = num_text_chunks()
    wait_until(lambda: num_text_chunks() > before + 10, "words without a listener")
    async with opened(gateway, session=page.session, response=response, samples=0) as again:
        await again.until("response.output_audio_transcript.done")
    assert again.shown(response, page.shown(response)) == script.text


async def test_the_end_of_an_answer_that_was_lost_on_its_way_is_sent_again(gateway: Gateway) -> None:
    async with opened(gateway) as page:
        await page.ask("hello")
        response = (await page.until("response.done"))["response"]["id"]
        await page.drop()
    async with opened(gateway, session=page.session, response=response, samples=1920) as again:
        await again.until_sound(response, Script().num_samples - 1920)
    assert bytes(again.sound[response]) == sine(Script().num_samples).tobytes()[2 * 1920 :]


async def test_another_gateway_goes_on_with_the_session(loaded: Loaded) -> None:
    with serving(loaded) as first, serving(loaded, client=first.client) as second:
        script = Script(num_samples=4 * RATE_HZ, samples_per_chunk=FRAME_SAMPLES, gap_s=0.01)
        first.client.script = script
        async with opened(first) as page:
            for block in blocks(silence(300) + speech("what day comes after monday") + silence(800)):
                await page.socket.send(block)
            response = (await page.until("response.created"))["response"]["id"]
            await page.until_sound(response, RATE_HZ)
            wait_until(lambda: page.session in first.client.held and len(first.client.held[page.session].fields) == 3, "written")
            had = len(page.sound[response]) // 2
            async with opened(second, session=page.session, response=response, samples=had) as again:
                done = await again.until("response.done")
                assert done["response"]["status"] == "completed"
                item = done["response"]["output"][0]
                assert item["content"][0]["transcript"] == script.text
                await again.ask("and then?")
                await again.until("response.done", **{})
            async for _ in page.socket:  # what else was on its way: a close that is never read is no close
                pass
        whole = bytes(page.sound[response][: 2 * had]) + bytes(again.sound[response])
        assert whole == sine(4 * RATE_HZ).tobytes()
        spec, _ = first.client.submitted[-1]
        assert len(spec.audio) == 1, "what the user said before is still in the prompt"
        (other, _) = first.client.submitted[0]
        assert first.client.streams[other.id].aborted is None, "the gateway that lost the session stops nothing"


async def test_words_come_once_however_long_ago_they_were_written_down(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that is killed writes nothing down any more: where its words were only the page knows."""
    with serving(loaded) as first, serving(loaded, client=first.client) as second:
        script = first.client.script = Script(text="And so it goes on, word by word. " * 4, gap_s=0.01)

        def written(session: str) -> int:
            state = msgspec.msgpack.decode(first.client.held[session].fields.get("state", b"\x80"))
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
            async with opened(second, session=page.session, response=response, samples=0, chars=len(had)) as again:
                await again.until("response.output_audio_transcript.done")
                done = await again.until("response.done")
        assert again.shown(response, had) == script.text == done["response"]["output"][0]["content"][0]["transcript"]


async def test_goodbye_ends_everything(gateway: Gateway) -> None:
    gateway.client.script = Script(stall_at=4)
    async with opened(gateway) as page:
        await page.ask("hello")
        await page.until("response.output_audio_transcript.delta")
    (fake,) = gateway.client.streams.values()
    wait_until(lambda: fake.aborted, "the abort")
    wait_until(lambda: page.session not in gateway.client.held, "the session to be forgotten")
    async with connect(f"{gateway.url.replace('http', 'ws')}/console/ws?session={page.session}") as socket:
        assert json.loads(await socket.recv())["error"]["code"] == "not_found"
        await socket.wait_closed()
        assert socket.close_code == 1008


async def test_live_sessions_are_listed_and_can_be_ended(gateway: Gateway) -> None:
    gateway.client.script = Script(stall_at=4)
    async with opened(gateway) as page:
        await page.ask("hello")
        await page.until("fleet.state", state="speaking")
        wait_until(lambda: sessions(gateway).get(page.session, {}).get("state") == "speaking", "the session to be listed")
        view = sessions(gateway)[page.session]
        assert view["turns"] == 1 and view["request_id"] in gateway.client.traces and view["input_rate_hz"] == 24_000
        answer = gateway.http.delete(f"/v1/fleet/sessions/{page.session}")
        assert answer.json() == {"id": page.session, "object": "fleet.session.ended", "ended": True}
        await page.socket.wait_closed()
    (fake,) = gateway.client.streams.values()
    wait_until(lambda: fake.aborted, "the abort")
    missing: httpx.Response = gateway.http.delete("/v1/fleet/sessions/sess_none")
    assert missing.status_code == 404 and missing.json()["error"]["param"] == "session_id"
