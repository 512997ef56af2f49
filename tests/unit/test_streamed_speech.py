"""A text that is spoken while it arrives has the samples and words of the whole text, however it
arrives.
"""

import asyncio
from collections.abc import Sequence

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fleet.graphs.cascade import CLAUSE_PARAM
from fleet.processing.spoken.clauses import Clause, ClauseCutter
from fleet.processing.spoken.given_clause import GivenClause, place_of
from tests.unit.test_spoken_text import TEXTS
from tests.unit.test_voice_engine import ANSWER, joined, speak, spec_of, tone_stage, words_in
from web.gateway.word_times import WordTimes
from web.speech_stream.growing_text import SLICE_CHARS, GrowingText

CUTS = st.lists(st.integers(0, 1000), max_size=30)


def pieces_of(text: str, cuts: Sequence[int]) -> list[str]:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    return [text[a:b] for a, b in zip(places, places[1:], strict=False)]


async def arriving(pieces: Sequence[str]) -> list[Clause]:
    """Return the clauses of a text whose pieces arrive while its clauses are taken."""
    text, taken = GrowingText(), list[Clause]()

    async def take() -> None:
        async for clause in text.clauses():
            taken.append(clause)

    taking = asyncio.create_task(take())
    for piece in pieces:
        text.add(piece)
        await asyncio.sleep(0)
    text.finish()
    await taking
    assert text.num_waiting == 0
    return taken


@settings(max_examples=60, deadline=None)
@given(TEXTS, CUTS)
@example(ANSWER * (2 * SLICE_CHARS // len(ANSWER) + 1), [1, 700])
def test_clauses_of_a_growing_text_are_those_of_the_whole(text: str, cuts: list[int]) -> None:
    cutter = ClauseCutter()
    whole = cutter.feed(text) + cutter.finish()
    assert asyncio.run(arriving(pieces_of(text, cuts))) == whole
    for clause in whole:
        given_clause = GivenClause(place_of(clause))
        assert given_clause.feed(clause.text) == [] and given_clause.finish() == [clause]


@settings(max_examples=30, deadline=None)
@given(TEXTS.filter(lambda text: "boom" not in text), CUTS)
@example(ANSWER, [3, 20, 21, 90])
def test_requests_of_the_clauses_have_the_samples_and_words_of_the_whole_text(
    text: str, cuts: list[int]
) -> None:
    if not text:
        return
    whole = speak(tone_stage(), spec_of(speech_text=text), [])
    waves, words, ends = [np.zeros(0, np.int16)], list[str](), list[int]()
    for clause in asyncio.run(arriving(pieces_of(text, cuts))):
        spec = spec_of(speech_text=clause.text, params={CLAUSE_PARAM: place_of(clause)})
        items = speak(tone_stage(), spec, [])
        begin = sum(map(len, waves))
        if any(item.arrays for item in items):
            waves.append(joined(items, "pcm"))
            words += words_in(items)
            ends += [begin + int(end) for end in joined(items, "word_ends")]
    if len(waves) > 1:
        assert np.concatenate(waves).tobytes() == joined(whole, "pcm").tobytes()
        assert (words, ends) == (words_in(whole), joined(whole, "word_ends").tolist())


def test_each_word_is_told_once_with_its_time() -> None:
    words = WordTimes("It is  7:30,\n`code` now.", 24_000, offset_samples=24_000)
    first = words.take([(3, 2400), (7, 4800)])
    assert [(each.word, each.start_ms, each.end_ms) for each in first] == [
        ("It", 1000, 1100),
        ("is", 1100, 1200),
    ]
    rest = words.take([(3, 2400), (7, 4800), (13, 9600), (19, 9600), (24, 12_000)])
    assert [(each.word, each.start_ms, each.end_ms) for each in rest] == [
        ("7:30,", 1200, 1400),
        ("`code`", 1400, 1400),
        ("now.", 1400, 1500),
    ]
    assert words.take([(3, 2400)] * 5) == []
