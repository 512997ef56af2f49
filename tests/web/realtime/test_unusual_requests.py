"""Unusual requests on a voice socket are served, or refused by name, and the session continues."""

from dataclasses import replace

import pytest

from tests.web.conftest import LIMITS, Loaded, ServedGateway, serving
from tests.web.fake_client import FRAME_SAMPLES, RATE_HZ, Script
from tests.web.realtime.socket_client import Event, SocketClient, message, opened, transcript

pytestmark = pytest.mark.one_file_in(2, "voice sockets")

CONTROL = "<|im_end|>"
LONG = Script(
    text="one two three four five six seven",
    num_samples=4 * RATE_HZ,
    samples_per_chunk=FRAME_SAMPLES,
    gap_s=0.01,
)


async def answering(page: SocketClient, gateway: ServedGateway) -> tuple[str, str]:
    """Begin a response; return its id and its item's id once its first audio has arrived."""
    gateway.client.script = LONG
    await page.ask("count")
    added = await page.until("response.output_item.added")
    await page.until("response.output_audio.delta")
    return added["response_id"], added["item"]["id"]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        (message(f"hello {CONTROL}"), "item.content[0]"),
        (message("root", id="root"), "item.id"),
        (
            {
                **message("x"),
                "content": [{"type": "input_text"}, {"type": "input_text", "text": "x"}],
            },
            "item.content[0].text",
        ),
        ({**message("x"), "content": [{"type": "input_audio"}]}, "item.content[0].audio"),
        (
            {**message("x"), "content": [{"type": "output_audio", "transcript": "x"}]},
            "item.content[0].type",
        ),
        ({**message("x"), "content": []}, "item.content"),
        (message(CONTROL, "assistant", "output_text"), "item.content[0]"),
    ],
)
async def test_item_that_no_prompt_can_hold_is_refused(
    client: SocketClient, item: dict[str, object], param: str
) -> None:
    assert (await client.refusal_of("conversation.item.create", item=item))["param"] == param
    await client.complete("hello")


@pytest.mark.parametrize(
    ("response", "param"),
    [
        ({"instructions": CONTROL}, "response.instructions"),
        ({"input": [message(CONTROL)]}, "response.input[0].content[0]"),
        ({"input": [{"type": "item_reference"}]}, "response.input[0].id"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "response.input[0].id"),
        ({"input": [message("x", id="a"), message("y", id="a")]}, "response.input[1].id"),
        ({"input": []}, "response.input"),
        (
            {"audio": {"output": {"format": {"type": "audio/pcm", "rate": 16_000}}}},
            "response.audio.output.format.rate",
        ),
    ],
)
async def test_response_that_cannot_be_served_is_refused_before_it_begins(
    client: SocketClient, gateway: ServedGateway, response: dict[str, object], param: str
) -> None:
    assert (
        await client.refusal_of("response.create", response={"conversation": "none", **response})
    )["param"] == param
    assert not gateway.client.submitted


async def test_unknown_event_type_is_refused_with_the_known_ones(client: SocketClient) -> None:
    error = await client.refusal_of("response.audio.delta" + "x" * 1000)
    await client.send("input_audio_buffer.clear", event_id="e" * 100_000)
    long = await client.error()
    assert "'response.audio.delta" in error["message"] and "response.create" in error["message"]
    assert len(error["message"]) < 500 and "fleet." not in error["message"]
    assert long["param"] == "event_id" and long["event_id"] is None


async def test_requested_tokens_are_limited_to_the_bound(
    client: SocketClient, gateway: ServedGateway
) -> None:
    errors, now = await client.update(max_output_tokens=1_000_000)
    assert not errors and now["max_output_tokens"] == 1_000_000
    await client.complete("hello", max_output_tokens=LIMITS.max_answer_tokens + 1)
    await client.complete("hello")
    asked = [
        spec.sampling[next(iter(spec.sampling))].max_tokens for spec, _ in gateway.client.submitted
    ]
    assert asked == [LIMITS.max_answer_tokens] * 2


async def test_cleared_voice_is_the_default_one(client: SocketClient) -> None:
    first = client.events[0]["session"]["audio"]["output"]["voice"]
    for voice in (None, ""):
        await client.update(audio={"output": {"voice": "chelsie"}})
        errors, now = await client.update(audio={"output": {"voice": voice}})
        assert not errors and now["audio"]["output"]["voice"] == first != "chelsie"


@pytest.mark.parametrize("cancelled", [True, False])
async def test_response_under_way_can_be_truncated(
    client: SocketClient, gateway: ServedGateway, cancelled: bool
) -> None:
    """A response under way can be truncated, before or after it is cancelled; `openai-agents`
    truncates first.
    """
    _, item = await answering(client, gateway)
    too_far = await refused_now(client, item, 60_000)
    assert "beyond the item's" in too_far["message"]
    await client.send("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=10)
    assert (await client.until("conversation.item.truncated"))["audio_end_ms"] == 10
    if cancelled:
        await client.send("response.cancel")
    done = await client.done()
    assert done["status"] == ("cancelled" if cancelled else "completed")
    assert transcript(await client.retrieve(item)) == ""


async def refused_now(page: SocketClient, item: str, audio_end_ms: int) -> Event:
    await page.send(
        "conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=audio_end_ms
    )
    return await page.error()


async def test_refused_truncation_removes_nothing(
    client: SocketClient, gateway: ServedGateway
) -> None:
    _, item = await answering(client, gateway)
    await refused_now(client, item, 60_000)
    await client.until("response.done")
    assert transcript(await client.retrieve(item)) == LONG.text


async def test_cancelled_response_reports_its_usage(
    client: SocketClient, gateway: ServedGateway
) -> None:
    await answering(client, gateway)
    await client.send("response.cancel")
    usage = (await client.done())["usage"]
    spec, _ = gateway.client.submitted[0]
    assert usage["input_tokens"] == len(spec.prompt_ids) and usage["output_tokens"] > 0
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


async def test_failed_response_keeps_only_words_with_audio(loaded: Loaded) -> None:
    """A failed response keeps only the words whose audio exists: its text is complete, but it has
    about one of four seconds of audio, and no speaking rate is learned yet.
    """
    with serving(loaded) as gateway:
        gateway.client.script = replace(LONG, gap_s=0, samples_per_chunk=960, fail_at=50)
        async with opened(gateway, "/v1/realtime") as page:
            await page.ask("count")
            done = await page.done()
            text = "".join(
                event["delta"]
                for event in page.events
                if event["type"] == "response.output_audio_transcript.delta"
            )
            assert (done["status"], text) == ("failed", LONG.text)
            kept = transcript(await page.retrieve(done["output"][0]["id"]))
            gateway.client.script = Script()
            await page.complete("and then?")
        spec, _ = gateway.client.submitted[-1]
        prompt = gateway.client.tokenizer.decode(list(spec.prompt_ids), skip_special_tokens=False)
    assert LONG.text.startswith(f"{kept} ") and 1 <= len(kept.split()) <= 4
    assert f"{kept}<" in prompt.replace("\n", ""), "the next prompt holds no more"


async def test_item_deleted_during_its_response_has_no_further_events(
    client: SocketClient, gateway: ServedGateway
) -> None:
    _, item = await answering(client, gateway)
    await client.send("conversation.item.delete", item_id=item)
    await client.until("conversation.item.deleted")
    begin = len(client.events)
    await client.send("response.cancel")
    await client.until("response.done")
    assert "conversation.item.done" not in client.kinds()[begin:]
    assert (await client.refusal_of("conversation.item.retrieve", item_id=item))[
        "code"
    ] == "not_found"


async def test_out_of_band_response_leaves_the_active_one_alone(
    client: SocketClient, gateway: ServedGateway
) -> None:
    active, _ = await answering(client, gateway)
    aside = {"conversation": "none", "output_modalities": ["text"], "metadata": {"topic": "aside"}}
    await client.send("response.create", response=aside)
    done = await client.done()
    assert (
        done["metadata"] == aside["metadata"]
        and done["conversation_id"] is None
        and done["status"] == "completed"
    )
    await client.send("response.cancel")
    assert (await client.done())["id"] == active


async def test_idle_timeout_of_an_empty_conversation_begins_no_response(
    client: SocketClient, caplog: pytest.LogCaptureFixture
) -> None:
    done = await client.complete("hello")
    for item in (
        *(
            event["item"]["id"]
            for event in client.events
            if event["type"] == "conversation.item.done"
        ),
    ):
        await client.send("conversation.item.delete", item_id=item)
    await client.detect_turns({"type": "server_vad", "idle_timeout_ms": 1000})
    await client.until("input_audio_buffer.timeout_triggered")
    assert (await client.complete("again"))["id"] != done["id"]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_conversation_that_may_not_be_shortened_fails_if_too_long(
    client: SocketClient,
) -> None:
    await client.update(truncation="disabled")
    for _ in range(3):
        await client.send("conversation.item.create", item=message("word " * 900))
    await client.send("response.create")
    failed = await client.done()
    assert (
        failed["status"] == "failed"
        and failed["status_details"]["error"]["code"] == "context_length_exceeded"
    )
    assert failed["status_details"]["error"]["message"].startswith(
        "conversation: This model's maximum context length is"
    )
    await client.update(truncation="auto")
    await client.complete()


async def test_new_voice_is_that_of_the_next_response(
    client: SocketClient, gateway: ServedGateway
) -> None:
    await client.complete("hello")
    _, now = await client.update(audio={"output": {"voice": "chelsie"}})
    assert now["audio"]["output"]["voice"] == "chelsie"
    await client.complete("hello", audio={"output": {"voice": {"id": "ethan"}}})
    await client.complete("hello")
    assert [spec.params["voice"] for spec, _ in gateway.client.submitted] == [
        "ethan",
        "ethan",
        "chelsie",
    ]
