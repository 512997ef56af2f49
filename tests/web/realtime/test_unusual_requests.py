"""Unusual requests are served or refused by name, and the session continues."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tests.support import wait_until
from tests.web.conftest import LIMITS, Loaded, ServedGateway, serving
from tests.web.fake_client import FRAME_SAMPLES, RATE_HZ, Script
from tests.web.realtime.socket_client import Event, SocketClient, opened

CONTROL = "<|im_end|>"
LONG = Script(text="one two three four five six seven", num_samples=4 * RATE_HZ, samples_per_chunk=FRAME_SAMPLES, gap_s=0.01)


def says(text: str, role: str = "user", kind: str = "input_text", **fields: object) -> dict[str, object]:
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}], **fields}


async def events_of(page: SocketClient, kind: str, **fields: object) -> list[Event]:
    """Send an event, and return all events up to the refusal of a second one."""
    await page.send(kind, event_id="asked", **fields)
    await page.send("no.such.event", event_id="after")
    begin = len(page.events)
    while not page.events[begin:] or page.events[-1].get("error", {}).get("event_id") != "after":
        await page.next()
    return page.events[begin:-1]


async def refused(page: SocketClient, kind: str, **fields: object) -> dict[str, Any]:
    """Send an event and return its only error, which names the field and the event."""
    (answer,) = await events_of(page, kind, **fields)
    error = answer["error"]
    assert error["event_id"] == "asked" and error["param"] is None or str(error["message"]).startswith(str(error["param"]))
    return error


async def answering(page: SocketClient, gateway: ServedGateway) -> tuple[str, str]:
    """Begin a response, and return the ids of it and its item once its first audio has arrived."""
    gateway.client.script = LONG
    await page.ask("count")
    added = await page.until("response.output_item.added")
    await page.until("response.output_audio.delta")
    return added["response_id"], added["item"]["id"]


async def transcript_of(page: SocketClient, item: str) -> str:
    await page.send("conversation.item.retrieve", item_id=item)
    return (await page.until("conversation.item.retrieved"))["item"]["content"][0]["transcript"]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        (says(f"hello {CONTROL}"), "item.content[0]"),
        (says("root", id="root"), "item.id"),
        ({"type": "function_call_output", "call_id": "c", "output": "3"}, "item.type"),
        ({**says("x"), "content": [{"type": "input_text"}, {"type": "input_text", "text": "x"}]}, "item.content[0].text"),
        ({**says("x"), "content": [{"type": "input_audio"}]}, "item.content[0].audio"),
        ({**says("x"), "content": [{"type": "output_audio", "transcript": "x"}]}, "item.content[0].type"),
        ({**says("x"), "content": []}, "item.content"),
        (says(CONTROL, "assistant", "output_text"), "item.content[0]"),
    ],
)
async def test_item_that_no_prompt_can_hold_is_refused(gateway: ServedGateway, item: dict[str, object], param: str) -> None:
    async with opened(gateway, "/v1/realtime") as page:
        assert (await refused(page, "conversation.item.create", item=item))["param"] == param
        await page.ask("hello")
        assert (await page.until("response.done"))["response"]["status"] == "completed"


@pytest.mark.parametrize(
    ("response", "param"),
    [
        ({"instructions": CONTROL}, "response.instructions"),
        ({"input": [says(CONTROL)]}, "response.input[0].content[0]"),
        ({"input": [{"type": "item_reference"}]}, "response.input[0].id"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "response.input[0].id"),
        ({"input": [says("x", id="a"), says("y", id="a")]}, "response.input[1].id"),
        ({"input": []}, "response.input"),
        ({"audio": {"output": {"format": {"type": "audio/pcm", "rate": 16_000}}}}, "response.audio.output.format.rate"),
        ({"audio": {"output": {"format": {"type": "audio/pcmu"}}}}, "response.audio.output.format"),
        ({"tool_choice": "required"}, "response.tool_choice"),
        ({"prompt": {"id": "pmpt_1"}}, "response.prompt"),
    ],
)
async def test_response_that_cannot_be_served_is_refused_before_it_begins(
    gateway: ServedGateway, response: dict[str, object], param: str
) -> None:
    async with opened(gateway, "/v1/realtime") as page:
        assert (await refused(page, "response.create", response={"conversation": "none", **response}))["param"] == param
    assert not gateway.client.submitted


async def test_unknown_event_type_is_refused_with_the_known_ones(gateway: ServedGateway) -> None:
    async with opened(gateway, "/v1/realtime") as page:
        error = await refused(page, "response.audio.delta" + "x" * 1000)
        await page.send("input_audio_buffer.clear", event_id="e" * 100_000)
        long = (await page.until("error"))["error"]
    assert "'response.audio.delta" in error["message"] and "response.create" in error["message"]
    assert len(error["message"]) < 500 and "fleet." not in error["message"]
    assert long["param"] == "event_id" and long["event_id"] is None


async def test_requested_tokens_are_limited_to_the_bound(gateway: ServedGateway) -> None:
    async with opened(gateway, "/v1/realtime") as page:
        (updated,) = await events_of(page, "session.update", session={"type": "realtime", "max_output_tokens": 1_000_000})
        assert updated["session"]["max_output_tokens"] == 1_000_000
        await page.ask("hello", max_output_tokens=LIMITS.max_answer_tokens + 1)
        assert (await page.until("response.done"))["response"]["status"] == "completed"
        await page.ask("hello")
        assert (await page.until("response.done"))["response"]["status"] == "completed"
    asked = [spec.sampling[next(iter(spec.sampling))].max_tokens for spec, _ in gateway.client.submitted]
    assert asked == [LIMITS.max_answer_tokens] * 2


async def test_cleared_voice_is_the_default_one(gateway: ServedGateway) -> None:
    async with opened(gateway, "/v1/realtime") as page:
        first = page.events[0]["session"]["audio"]["output"]["voice"]
        for voice in (None, ""):
            await events_of(page, "session.update", session={"type": "realtime", "audio": {"output": {"voice": "chelsie"}}})
            (updated,) = await events_of(
                page, "session.update", session={"type": "realtime", "audio": {"output": {"voice": voice}}}
            )
            assert updated["session"]["audio"]["output"]["voice"] == first != "chelsie"


@pytest.mark.parametrize("cancelled", [True, False])
async def test_response_under_way_can_be_truncated(gateway: ServedGateway, cancelled: bool) -> None:
    """`openai-agents` truncates first and cancels then."""
    async with opened(gateway, "/v1/realtime") as page:
        _, item = await answering(page, gateway)
        too_far = await refused_now(page, item, 60_000)
        assert "beyond the item's" in too_far["message"]
        await page.send("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=10)
        assert (await page.until("conversation.item.truncated"))["audio_end_ms"] == 10
        if cancelled:
            await page.send("response.cancel")
        done = (await page.until("response.done"))["response"]
        assert done["status"] == ("cancelled" if cancelled else "completed")
        assert await transcript_of(page, item) == ""


async def refused_now(page: SocketClient, item: str, audio_end_ms: int) -> dict[str, Any]:
    await page.send("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=audio_end_ms)
    return (await page.until("error"))["error"]


async def test_refused_truncation_removes_nothing(gateway: ServedGateway) -> None:
    async with opened(gateway, "/v1/realtime") as page:
        _, item = await answering(page, gateway)
        await refused_now(page, item, 60_000)
        await page.until("response.done")
        assert await transcript_of(page, item) == LONG.text


async def test_cancelled_response_reports_its_usage(gateway: ServedGateway) -> None:
    async with opened(gateway, "/v1/realtime") as page:
        await answering(page, gateway)
        await page.send("response.cancel")
        usage = (await page.until("response.done"))["response"]["usage"]
    spec, _ = gateway.client.submitted[0]
    assert usage["input_tokens"] == len(spec.prompt_ids) and usage["output_tokens"] > 0
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


async def test_failed_response_keeps_only_words_with_audio(loaded: Loaded) -> None:
    """Its text is complete, and about one of four seconds of audio exists. No speaking rate is learned yet."""
    with serving(loaded) as gateway:
        gateway.client.script = replace(LONG, gap_s=0, samples_per_chunk=960, fail_at=50)
        async with opened(gateway, "/v1/realtime") as page:
            await page.ask("count")
            done = (await page.until("response.done"))["response"]
            text = "".join(event["delta"] for event in page.events if event["type"] == "response.output_audio_transcript.delta")
            assert (done["status"], text) == ("failed", LONG.text)
            kept = await transcript_of(page, done["output"][0]["id"])
            gateway.client.script = Script()
            await page.ask("and then?")
            await page.until("response.done")
        spec, _ = gateway.client.submitted[-1]
        prompt = gateway.client.tokenizer.decode(list(spec.prompt_ids), skip_special_tokens=False)
    assert LONG.text.startswith(f"{kept} ") and 1 <= len(kept.split()) <= 4
    assert f"{kept}<" in prompt.replace("\n", ""), "the next prompt holds no more"


async def test_item_deleted_during_its_response_has_no_further_events(gateway: ServedGateway) -> None:
    async with opened(gateway, "/v1/realtime") as page:
        _, item = await answering(page, gateway)
        await page.send("conversation.item.delete", item_id=item)
        await page.until("conversation.item.deleted")
        begin = len(page.events)
        await page.send("response.cancel")
        await page.until("response.done")
        assert "conversation.item.done" not in page.kinds()[begin:]
        assert (await refused(page, "conversation.item.retrieve", item_id=item))["code"] == "not_found"


async def test_out_of_band_response_leaves_the_active_one_alone(gateway: ServedGateway) -> None:
    async with opened(gateway, "/v1/realtime") as page:
        active, _ = await answering(page, gateway)
        aside = {"conversation": "none", "output_modalities": ["text"], "metadata": {"topic": "aside"}}
        await page.send("response.create", response=aside)
        done = (await page.until("response.done"))["response"]
        assert done["metadata"] == aside["metadata"] and done["conversation_id"] is None and done["status"] == "completed"
        await page.send("response.cancel")
        assert (await page.until("response.done"))["response"]["id"] == active


async def test_idle_timeout_of_an_empty_conversation_begins_no_response(
    gateway: ServedGateway, caplog: pytest.LogCaptureFixture
) -> None:
    detection = {"type": "server_vad", "idle_timeout_ms": 1000}
    async with opened(gateway, "/v1/realtime") as page:
        await page.ask("hello")
        done = (await page.until("response.done"))["response"]
        for item in (*(event["item"]["id"] for event in page.events if event["type"] == "conversation.item.done"),):
            await page.send("conversation.item.delete", item_id=item)
        await page.send("session.update", session={"type": "realtime", "audio": {"input": {"turn_detection": detection}}})
        await page.until("session.updated")
        await page.until("input_audio_buffer.timeout_triggered")
        await page.ask("again")
        assert (await page.until("response.done"))["response"]["id"] != done["id"]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_conversation_that_may_not_be_shortened_fails_if_too_long(gateway: ServedGateway) -> None:
    async with opened(gateway, "/v1/realtime") as page:
        await events_of(page, "session.update", session={"type": "realtime", "truncation": "disabled"})
        for _ in range(3):
            await events_of(page, "conversation.item.create", item=says("word " * 900))
        await page.send("response.create")
        failed = (await page.until("response.done"))["response"]
        assert failed["status"] == "failed" and failed["status_details"]["error"]["code"] == "context_length_exceeded"
        assert failed["status_details"]["error"]["message"].startswith("conversation: This model's maximum context length is")
        await events_of(page, "session.update", session={"type": "realtime", "truncation": "auto"})
        await page.send("response.create")
        assert (await page.until("response.done"))["response"]["status"] == "completed"


async def test_new_voice_is_that_of_the_next_response(gateway: ServedGateway) -> None:
    async with opened(gateway, "/v1/realtime") as page:
        await page.ask("hello")
        await page.until("response.done")
        (updated,) = await events_of(
            page, "session.update", session={"type": "realtime", "audio": {"output": {"voice": "chelsie"}}}
        )
        assert updated["session"]["audio"]["output"]["voice"] == "chelsie"
        await page.ask("hello", audio={"output": {"voice": {"id": "ethan"}}})
        await page.until("response.done")
        await page.ask("hello")
        await page.until("response.done")
        await asyncio.to_thread(wait_until, lambda: len(gateway.client.submitted) == 3, "three answers")
    assert [spec.params["voice"] for spec, _ in gateway.client.submitted] == ["ethan", "ethan", "chelsie"]
