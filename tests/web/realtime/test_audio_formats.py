"""Audio formats of a voice session: while a requested format is refused, no audio is read or sent
in another format.
"""

import base64

import pytest

from tests.web.conftest import ServedGateway
from tests.web.fake_client import FRAME_SAMPLES, RATE_HZ, Script
from tests.web.realtime.socket_client import SocketClient
from tests.web.realtime.speech_samples import QUESTION, question, silence, speech

PCM = {"type": "audio/pcm", "rate": 24_000}
OPUS = {"type": "audio/opus"}
WIDE_PCMU = {"type": "audio/pcmu", "rate": 16_000}
UNSERVED = "unsupported_value"
LONG = Script(num_samples=4 * RATE_HZ, samples_per_chunk=FRAME_SAMPLES, gap_s=0.01)


def input_format(form: object) -> dict[str, object]:
    return {"audio": {"input": {"format": form}}}


def output_format(form: object) -> dict[str, object]:
    return {"audio": {"output": {"format": form}}}


REFUSED_FORMATS: dict[str, list[object]] = {
    "format": ["pcm16", "g711_ulaw", ["audio/pcm"]],
    "format.type": [OPUS, {"type": 5}],
    "format.rate": [
        {"type": "audio/pcm", "rate": 4_000},
        {"type": "audio/pcm", "rate": "24000"},
        WIDE_PCMU,
    ],
}


@pytest.mark.parametrize(
    ("field", "form"), [(field, form) for field, forms in REFUSED_FORMATS.items() for form in forms]
)
async def test_audio_is_not_read_while_its_format_is_refused(
    client: SocketClient, gateway: ServedGateway, field: str, form: object
) -> None:
    """Audio is not read while its format is refused: Opus read as PCM16 would be noise, and
    classified as speech or silence.
    """
    spoken = question()
    errors, now = await client.update(**input_format(form))
    assert [error["param"] for error in errors] == [f"session.audio.input.{field}"]
    assert errors[0]["code"] == (UNSERVED if form == WIDE_PCMU else "invalid_value")
    assert now["audio"]["input"]["format"] is None
    await client.append(spoken)
    await client.send("input_audio_buffer.commit", event_id="commit")
    first, commit = await client.events_before_refusal()
    assert (
        first["error"]["param"] == "audio"
        and "session.audio.input.format" in first["error"]["message"]
    )
    assert (
        commit["error"]["code"] == "input_audio_buffer_commit_empty"
        and commit["error"]["event_id"] == "commit"
    )
    assert "session.audio.input.format" in commit["error"]["message"]
    content = [{"type": "input_audio", "audio": base64.b64encode(spoken).decode()}]
    await client.send(
        "conversation.item.create", item={"type": "message", "role": "user", "content": content}
    )
    (item,) = await client.events_before_refusal("after the item")
    assert item["error"]["param"] == "item.content[0].audio"
    assert not gateway.client.submitted
    errors, now = await client.update(**input_format(PCM))
    assert not errors and now["audio"]["input"]["format"] == PCM
    await client.append(spoken)
    await client.completed()


async def test_refused_audio_is_named_again_after_the_next_refused_format(
    client: SocketClient,
) -> None:
    for marker in ("first", "second"):
        await client.update(**input_format(OPUS))
        await client.append(silence(1000))
        assert len(await client.events_before_refusal(marker)) == 1
    errors, now = await client.update(instructions="Be brief.")
    assert not errors and now["audio"]["input"]["format"] is None, (
        "another update does not bring a format back"
    )


async def test_binary_audio_is_not_read_while_its_format_is_refused(
    page: SocketClient, gateway: ServedGateway
) -> None:
    await page.update(**input_format(OPUS))
    await page.speak(question())
    (error,) = await page.events_before_refusal()
    assert error["error"]["param"] == "audio" and not gateway.client.submitted


async def test_turn_ends_unanswered_when_its_format_is_refused(
    page: SocketClient, gateway: ServedGateway
) -> None:
    """A user turn ends unanswered when its audio format is refused; later audio does not continue
    it.
    """
    spoken = speech(QUESTION)
    await page.speak(silence(300) + spoken[: len(spoken) // 2])
    started = await page.until("input_audio_buffer.speech_started")
    await page.until("fleet.state", state="hearing")
    await page.send("session.update", session=input_format(OPUS))
    stopped = await page.until("input_audio_buffer.speech_stopped")
    assert (
        stopped["item_id"] == started["item_id"]
        and stopped["audio_end_ms"] > started["audio_start_ms"]
    )
    await page.until("fleet.state", state="listening")
    assert not gateway.client.submitted
    await page.send("session.update", session=input_format(PCM))
    await page.speak(silence(100) + spoken + silence(800))
    assert (await page.until("input_audio_buffer.committed"))["item_id"] != started["item_id"]
    await page.until("response.done")
    (spec, _), *_ = gateway.client.submitted
    assert spec.audio[0].num_samples < (len(spoken) // 48 + 1000) * 16


async def test_uncommitted_audio_is_dropped_when_its_format_is_refused(
    client: SocketClient,
) -> None:
    spoken = speech(QUESTION)
    await client.detect_turns(None)
    await client.append(spoken)
    await client.update(**input_format(OPUS))
    await client.update(**input_format(PCM))
    await client.send("input_audio_buffer.commit")
    (error,) = await client.events_before_refusal()
    assert error["error"]["code"] == "input_audio_buffer_commit_empty"


@pytest.mark.parametrize(
    ("field", "value", "refused"),
    [
        ("input_audio_format", "g711_ulaw", "input"),
        ("output_audio_format", "g711_alaw", "output"),
        ("input_audio_format", "pcm16", None),
        ("output_audio_format", "pcm16", None),
    ],
)
async def test_format_under_its_beta_name_counts_as_one(
    client: SocketClient, field: str, value: str, refused: str | None
) -> None:
    errors, now = await client.update(**{field: value})
    assert [(error["param"], error["code"]) for error in errors] == [(f"session.{field}", UNSERVED)]
    formats = {side: now["audio"][side]["format"] for side in ("input", "output")}
    assert formats == {side: None if side == refused else PCM for side in ("input", "output")}


@pytest.mark.parametrize("side", ["input", "output"])
async def test_null_under_a_beta_name_leaves_the_format_as_it_is(
    client: SocketClient, side: str
) -> None:
    """Null under a field name of the beta dialect leaves the format unchanged: some clients write
    every field of the dialect, with null for fields without a value.
    """
    errors, now = await client.update(**{f"{side}_audio_format": None, "modalities": None})
    assert not errors and now["audio"][side]["format"] == PCM


@pytest.mark.parametrize("side", ["input", "output"])
async def test_format_beside_its_beta_name_ends_an_earlier_refusal(
    client: SocketClient, side: str
) -> None:
    beta = f"{side}_audio_format"
    await client.update(audio={side: {"format": OPUS}})
    _, now = await client.update(**{beta: "pcm16"})
    assert now["audio"][side]["format"] is None, "the beta name sets no format"
    errors, now = await client.update(audio={side: {"format": PCM}}, **{beta: "pcm16"})
    assert [error["param"] for error in errors] == [f"session.{beta}"] and now["audio"][side][
        "format"
    ] == PCM


@pytest.mark.parametrize(
    ("form", "field", "code"),
    [
        (OPUS, "format.type", "invalid_value"),
        ({"type": "audio/pcma", "rate": 16_000}, "format.rate", UNSERVED),
        ({"type": "audio/pcm", "rate": 16_000}, "format.rate", UNSERVED),
        ("pcm16", "format", "invalid_value"),
    ],
)
async def test_no_audio_is_sent_while_its_format_is_refused(
    client: SocketClient, gateway: ServedGateway, form: object, field: str, code: str
) -> None:
    errors, now = await client.update(**output_format(form))
    assert [(error["param"], error["code"]) for error in errors] == [
        (f"session.audio.output.{field}", code)
    ]
    assert now["audio"]["output"]["format"] is None
    await client.ask("hello")
    error = await client.error()
    assert error["param"] == "session.audio.output.format" and "text" in error["message"]
    await client.append(question())
    assert (await client.error())["param"] == "session.audio.output.format"
    assert not gateway.client.submitted
    await client.complete(output_modalities=["text"])
    await client.complete(**output_format(PCM))
    await client.update(**output_format(None))
    await client.complete("and now?")
    assert "response.output_audio.delta" in client.kinds()


async def test_response_ends_when_its_format_is_refused(
    client: SocketClient, gateway: ServedGateway
) -> None:
    gateway.client.script = LONG
    await client.ask("count")
    await client.until("response.output_audio.delta")
    begin = len(client.events)
    await client.update(**output_format(OPUS))
    kinds = [event["type"] for event in client.events[begin:]]
    after = await client.events_before_refusal()
    refused = kinds.index("error")
    assert "response.output_audio.delta" not in kinds[refused:] and not after
    assert kinds[refused:].count("response.done") == 1 and kinds[-1] == "session.updated"


async def test_refused_override_refuses_its_response_only(client: SocketClient) -> None:
    error = await client.refusal_of(
        "response.create", response={"instructions": "hi", **output_format(OPUS)}
    )
    assert error["param"] == "response.audio.output.format.type"
    await client.complete("hello")
