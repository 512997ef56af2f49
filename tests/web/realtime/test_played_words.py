"""Interrupted answers at a gateway whose graph tells when each word ends: the item and the next
prompt keep exactly the words whose end was played.
"""

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest

from tests.support import wait_until
from tests.web.build import build, tensor_chunk
from tests.web.conftest import ServedGateway
from tests.web.fake_client import FRAME_SAMPLES, Script
from tests.web.fake_client import RATE_HZ as ANSWER_HZ
from tests.web.realtime.manual_clock import ManualClock
from tests.web.realtime.socket_client import Event, SocketClient, transcript
from tests.web.realtime.speech_samples import QUESTION, silence, speech
from web.gateway.answer_words import AnswerWords

NUM_SAMPLES = 4 * ANSWER_HZ
LEAD = ANSWER_HZ // 2
WORDS = "Ünder the **old** bridge, 3 boats - one of them torn - wait for ships: e.g. the Ada."


def drawn_words(seed: int) -> list[tuple[str, int]]:
    """Return the words of `WORDS` with uneven ends; some words take no time."""
    draw = random.Random(seed)
    words = [word + " " for word in WORDS.split(" ")]
    words[-1] = words[-1].rstrip()
    lengths = [draw.choice([0, *range(1, 40)]) for _ in words[1:]]
    ends, at = [], draw.randrange(1, 3000)
    for length in [0, *lengths]:
        at += length * (NUM_SAMPLES - LEAD - 4000) // max(1, sum(lengths))
        ends.append(LEAD + at)
    return list(zip(words, ends, strict=True))


def words_before(words: list[tuple[str, int]], sample: int, trimmed: int) -> str:
    return "".join(word for word, end in words if end - trimmed <= sample).rstrip()


def test_words_are_the_same_however_the_chunks_are_cut() -> None:
    words, pcm = [("Gr\u00fc\u00df ", 5), ("dich", 9), (".", 9)], np.zeros(4, np.int16)
    whole, cut = AnswerWords(), AnswerWords()
    for spoken, groups in ((whole, [words]), (cut, [words[:1], [], words[1:]])):
        spoken.add(tensor_chunk("r", "audio", "pcm", pcm))
        assert spoken.ends(0) is None, "a voice that tells no words"
        for group in groups:
            ends = tensor_chunk("r", "audio", "word_ends", np.array([e for _, e in group], "<i4"))
            raw = b"".join(word.encode() + b"\0" for word, _ in group)
            text = tensor_chunk("r", "audio", "words", np.frombuffer(raw, np.uint8))
            spoken.add(build(type(ends), edge="audio", tensors={**ends.tensors, **text.tensors}))
    assert whole.ends(0) == cut.ends(0) == [(5, 5), (9, 9), (10, 9)]
    assert whole.ends(7) == [(5, 0), (9, 2), (10, 2)]


@pytest.fixture(scope="module")
def shared_gateway(timed_cascade: ServedGateway) -> ServedGateway:
    return timed_cascade


def spoken_script(words: list[tuple[str, int]]) -> Script:
    """Return the script of a spoken answer whose text arrives ahead of its audio."""
    return Script(
        samples_per_chunk=480,
        text="".join(word for word, _ in words),
        num_samples=NUM_SAMPLES - LEAD,
        lead_samples=LEAD,
        heard="",
        words=words,
    )


async def answering(page: SocketClient, gateway: ServedGateway, script: Script) -> Event:
    gateway.client.script = script
    await page.ask("count")
    response: Event = (await page.until("response.created"))["response"]
    await page.until_audio(response["id"], FRAME_SAMPLES)
    return response


def trimmed_of(gateway: ServedGateway) -> int:
    """Return the number of samples that the gateway removed from the silence before the answer."""
    kept_ms = gateway.config.web.max_leading_silence_ms
    assert kept_ms is not None
    return LEAD - int(kept_ms) * ANSWER_HZ // 1000


def last_prompt(gateway: ServedGateway) -> str:
    spec, _ = gateway.client.submitted[-1]
    ids = [token for token in spec.prompt_ids if token >= 0]
    return gateway.client.tokenizer.decode(ids, skip_special_tokens=False)


async def next_prompt(page: SocketClient, gateway: ServedGateway) -> str:
    before = len(gateway.client.submitted)
    gateway.client.script = Script()
    await page.ask("and then?")
    await asyncio.to_thread(
        wait_until, lambda: len(gateway.client.submitted) > before, "the next question"
    )
    return last_prompt(gateway)


@pytest.mark.parametrize("seed", [1, 2])
async def test_speech_over_an_answer_keeps_exactly_the_words_that_were_played(
    page: SocketClient, gateway: ServedGateway, seed: int
) -> None:
    """The client reports a playback position and is interrupted; then it truncates where it really
    stopped, which is a little later, and several times earlier.
    """
    words, trimmed = drawn_words(seed), trimmed_of(gateway)
    response = await answering(page, gateway, spoken_script(words))
    await page.until_audio(response["id"], ANSWER_HZ // 2)
    reported = random.Random(seed).randrange(6_000, ANSWER_HZ // 2)
    await page.send("fleet.played", response_id=response["id"], samples=reported)
    await page.speak(silence(50) + speech(QUESTION))
    done = (await page.done())["output"][0]
    expected = words_before(words, reported, trimmed)
    assert transcript(done) == expected and done["status"] == "incomplete"
    assert transcript(await page.retrieve(done["id"])) == expected
    sent = len(page.audio[response["id"]]) // 2
    stops_ms = [(reported + 2000) * 1000 // ANSWER_HZ]
    stops_ms += sorted((end - trimmed) * 1000 // ANSWER_HZ + 1 for _, end in words)[::-1]
    for stop_ms in [stop for stop in stops_ms if stop <= stops_ms[0]]:
        await page.send(
            "conversation.item.truncate",
            item_id=done["id"],
            content_index=0,
            audio_end_ms=stop_ms,
        )
        await page.until("conversation.item.truncated")
        expected = words_before(words, min(sent, stop_ms * ANSWER_HZ // 1000), trimmed)
        assert transcript(await page.retrieve(done["id"])) == expected, stop_ms
    await page.send(
        "conversation.item.truncate", item_id=done["id"], content_index=0, audio_end_ms=stops_ms[0]
    )
    assert transcript(await page.retrieve(done["id"])) == expected, "no word comes back"
    gateway.client.script = Script(heard="and you")
    await page.speak(silence(800))
    await page.completed()
    assert expected in last_prompt(gateway)
    said = next(word for word, _ in words if word.strip() and word.strip() not in expected)
    assert said.strip() not in last_prompt(gateway)


async def test_ends_of_words_are_sent_once_with_their_audio(
    page: SocketClient, gateway: ServedGateway, clock: ManualClock
) -> None:
    words, trimmed = drawn_words(4), trimmed_of(gateway)
    response = await answering(page, gateway, spoken_script(words))

    def told() -> list[list[int]]:
        return [
            end for event in page.events if event["type"] == "fleet.words" for end in event["ends"]
        ]

    sent = len(page.audio[response["id"]]) // 2
    ends: list[list[int]] = []
    chars = 0
    for word, end in words:
        chars += len(word)
        ends.append([chars, end - trimmed])
    assert told() == [end for end in ends if end[1] <= sent] and told() != ends
    while "response.done" not in page.kinds():
        if await page.next() is None:
            clock.advance(1)
    sent = len(page.audio[response["id"]]) // 2
    assert told() == [end for end in ends if end[1] <= sent]


async def test_answer_continued_after_a_false_alarm_loses_and_repeats_no_word(
    page: SocketClient, gateway: ServedGateway, clock: ManualClock
) -> None:
    words, trimmed = drawn_words(3), trimmed_of(gateway)
    first = await answering(page, gateway, spoken_script(words))
    await page.until_audio(first["id"], ANSWER_HZ // 2)
    played = ANSWER_HZ // 2 - 100
    await page.send("fleet.played", response_id=first["id"], samples=played)
    await page.speak(silence(100) + speech(QUESTION)[: 2 * ANSWER_HZ * 3 // 10] + silence(700))
    begun = (await page.done())["output"][0]
    rest = (await page.until("response.created"))["response"]
    await page.until_audio(rest["id"], FRAME_SAMPLES)
    stop_ms = len(page.audio[first["id"]]) // 2 * 1000 // ANSWER_HZ
    await page.send(
        "conversation.item.truncate", item_id=begun["id"], content_index=0, audio_end_ms=stop_ms
    )
    await page.until("conversation.item.truncated")
    head = words_before(words, played, trimmed)
    assert transcript(await page.retrieve(begun["id"])) == head, "the rest is another answer's"
    more = ANSWER_HZ // 2
    await page.until_audio(rest["id"], more)
    await page.send("fleet.played", response_id=rest["id"], samples=more)
    gateway.client.script = replace(gateway.client.script, heard="stop")
    await page.speak(speech(QUESTION))
    tail = transcript((await page.done())["output"][0])
    assert f"{head} {tail.lstrip()}" == words_before(words, played + more, trimmed)


async def test_answer_that_was_played_whole_keeps_all_its_text(
    page: SocketClient, gateway: ServedGateway, clock: ManualClock
) -> None:
    words = drawn_words(4)
    first = await answering(page, gateway, spoken_script(words))
    while "response.done" not in page.kinds():
        if await page.next() is None:
            clock.advance(1)
    item = page.events[-1]["response"]["output"][0]
    assert transcript(item) == WORDS
    samples = len(page.audio[first["id"]]) // 2
    await page.send(
        "conversation.item.truncate",
        item_id=item["id"],
        content_index=0,
        audio_end_ms=samples * 1000 // ANSWER_HZ + 1,
    )
    await page.until("conversation.item.truncated")
    assert WORDS in await next_prompt(page, gateway)
