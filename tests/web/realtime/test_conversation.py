"""Items of a conversation: bounded in number, in order, and with only the played words of
responses.
"""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.core.errors import BadInput, NotFound
from fleet.processing import AudioPart, Recording, TextPart
from web.realtime.conversation import Clip, Conversation, Item, Part, PlayedSpeech
from web.realtime.prompt import make_prompt
from web.realtime.recognitions import Recognitions

RATE_HZ = 24_000
SECOND = bytes(2 * 16_000)


def text(item_id: str, words: str, role: str = "user") -> Item:
    kind = "output_text" if role == "assistant" else "input_text"
    parts = [Part(kind=kind, text=words)]
    return Item(id=item_id, role=role, parts=parts)  # pyright: ignore[reportArgumentType]


def spoken(item_id: str, words: str, seconds: float) -> Item:
    samples = int(seconds * RATE_HZ)
    played = PlayedSpeech(text=words, whole=samples, sent=samples, played=samples)
    return Item(
        id=item_id, role="assistant", parts=[Part(kind="output_audio", text=words, speech=played)]
    )


def voiced(item_id: str) -> tuple[Item, dict[str, Clip]]:
    name = f"{item_id}.0"
    return Item(id=item_id, role="user", parts=[Part(kind="input_audio", clip=name)]), {
        name: Clip(SECOND)
    }


def test_items_are_inserted_at_their_position() -> None:
    talk = Conversation(10, 60)
    for name, after in (("b", None), ("d", None), ("a", "root"), ("c", "b")):
        talk.add(text(name, name), after=after)
    assert [item.id for item in talk.items] == ["a", "b", "c", "d"]
    assert talk.previous("a") is None and talk.previous("c") == "b"
    with pytest.raises(NotFound, match="previous_item_id"):
        talk.add(text("e", "e"), after="x")
    with pytest.raises(BadInput, match=r"item\.id"):
        talk.add(text("a", "again"))
    talk.remove("b")
    with pytest.raises(NotFound, match="'b'"):
        talk.find("b")


def test_later_cut_removes_more_words() -> None:
    talk = Conversation(10, 60)
    talk.add(spoken("a", "one two three four five", 5.0))
    talk.truncate("a", 0, 3_250)
    assert talk.items[0].parts[0].text == "one two three"
    talk.truncate("a", 0, 1_250)
    assert talk.items[0].parts[0].text == "one"
    talk.truncate("a", 0, 4_250)
    assert talk.items[0].parts[0].text == "one", "what was taken does not come back"
    talk.truncate("a", 0, 0)
    assert talk.messages("") == []


def test_truncation_beyond_the_audio_is_refused_except_within_a_frame() -> None:
    talk = Conversation(10, 60)
    talk.add(spoken("a", "one two", 2.0))
    talk.truncate("a", 0, 2_080)
    assert talk.items[0].parts[0].text == "one two"
    for item, index, end_ms in (("a", 0, 2_081), ("a", 1, 10), ("x", 0, 10)):
        with pytest.raises((BadInput, NotFound)):
            talk.truncate(item, index, end_ms)
    talk.add(text("b", "typed"))
    with pytest.raises(BadInput, match="content_index"):
        talk.truncate("b", 0, 10)


def test_prompt_merges_consecutive_responses() -> None:
    talk = Conversation(10, 60)
    talk.add(text("a", "hi"))
    talk.add(spoken("b", "one two", 2.0))
    talk.add(spoken("c", "three", 1.0))
    item, clips = voiced("d")
    talk.add(item, clips)
    messages = talk.messages("Be brief.")
    assert [message.role for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[2].content == TextPart(text="one two three", where="messages[2].content")
    assert isinstance(messages[3].content, tuple)
    (speech,) = messages[3].content
    assert (
        isinstance(speech, AudioPart)
        and isinstance(speech.data, Recording)
        and len(speech.data.samples) == 16_000
    )


@given(st.lists(st.sampled_from(["text", "sound"]), max_size=40))
def test_conversation_stays_within_its_bounds(kinds: list[str]) -> None:
    talk, here = Conversation(6, 3.0), set[str]()
    for number, kind in enumerate(kinds):
        item, clips = voiced(f"i{number}") if kind == "sound" else (text(f"i{number}", "x"), {})
        gone = talk.add(item, clips)
        here = (here | {item.id}) - set(gone)
        assert {item.id for item in talk.items} == here, "removed items are reported"
        assert len(talk.items) <= 6 and sum(clip.seconds for clip in talk.clips.values()) <= 3.0
        assert {part.clip for item in talk.items for part in item.parts if part.clip} == set(
            talk.clips
        )
        assert talk.items[-1].id == f"i{number}"


def test_old_speech_leaves_its_transcript() -> None:
    talk = Conversation(10, 2.0)
    for name in ("a", "b"):
        talk.add(*voiced(name))
    talk.set_transcript("a", 0, "good morning")
    talk.add(*voiced("c"))
    assert [item.id for item in talk.items] == ["a", "b", "c"]
    assert talk.messages("")[0].content == TextPart(
        text="good morning", where="messages[0].content"
    )


@pytest.mark.parametrize("sends_transcripts", [True, False])
async def test_prompt_waits_for_a_transcript_only_if_it_has_the_transcript(
    sends_transcripts: bool,
) -> None:
    talk = Conversation(10, 60, sends_transcripts=sends_transcripts)
    talk.add(*voiced("a"))
    asked = make_prompt(
        "m", talk.messages(""), spoken=False, voice="", max_output_tokens=None, session=None
    )
    recognitions = Recognitions(talk)
    async with recognitions.recognizing("a.0"):
        waiting = asyncio.create_task(recognitions.until_ended(asked.clip_names))
        await asyncio.sleep(0)
        assert waiting.done() != sends_transcripts
        talk.set_transcript("a", 0, "good morning")
    await waiting
    assert recognitions.with_transcripts(asked).clip_names == ([] if sends_transcripts else ["a.0"])


def test_truncation_of_the_client_counts_more_than_the_estimate() -> None:
    """The gateway estimated 1 s of playback; the client says 2 s, and later 3 s, of which no word
    comes back.
    """
    talk, words = Conversation(10, 60), "one two three four"
    item = spoken("a", words, 4.0)
    ends = [(3, 20_000), (7, 44_000), (13, 70_000), (18, 96_000)]
    item.parts[0].speech = PlayedSpeech(
        text=words, whole=0, sent=96_000, played=96_000, word_ends=ends
    )
    talk.add(item)
    kept: list[str] = []
    talk.cut(item, RATE_HZ)
    kept.append(item.parts[0].text)
    for end_ms in (2_000, 3_000, 834, 833):
        talk.truncate("a", 0, end_ms)
        kept.append(item.parts[0].text)
    assert kept == ["one", "one two", "one two", "one", ""]
