"""What is said for an answer's text: clauses, and their words."""

import re

import pytest
from hibari.g2p import G2P
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fleet.processing.spoken.clauses import MAX_CLAUSE_CHARS, RAMP, Clause, ClauseCutter
from fleet.processing.spoken.normalize import SpokenWords, spoken_text
from tests.unit.spoken_cases import CASES, READINGS

PARTS = st.sampled_from(
    "a word Hello, Dr. e.g. etc. 3.14 7:30 U.S. $5 ** * ` ``` [ ] ( ) # - 1. > | — … ? ! . : \n "
    "http://a.b/c,d a@b.co 5-10 &amp; <b> 😀 。 longerwordslikethis".split(" ")
)
TEXTS = st.lists(st.tuples(PARTS, st.sampled_from(["", " ", " ", "\n", "\n\n"])), max_size=40).map(
    lambda pairs: "".join(part + gap for part, gap in pairs)
)
PUNCTUATION = ".,:;!?…()\"'“”"
ATOMS = (
    "3.14|7:30|1,250.50|$3.99|Dr. Smith|e.g. this|bob.smith@example.com|https://a.com/x,y;z?q=1:2"
    "|March 5, 2024|the U.S. economy|J. K. Rowling|`f(a, b); c`"
    "|[the docs, all of them](http://x.y/z)|No. 5|vs. them|etc. and so"
).split("|")


def clauses_of(text: str, pieces: list[str] | None = None) -> list[Clause]:
    cutter = ClauseCutter()
    fed = [clause for piece in pieces or [text] for clause in cutter.feed(piece)]
    return fed + cutter.finish()


def said(text: str, language: str = "en-US") -> list[SpokenWords]:
    return [spoken_text(clause, language) for clause in clauses_of(text)]


def words_of(text: str, language: str = "en-US") -> str:
    return " ".join(spoken.text for spoken in said(text, language) if spoken.text)


@settings(max_examples=60, deadline=None)
@given(st.one_of(TEXTS, st.text(max_size=100)), st.lists(st.integers(0, 400), max_size=30))
@example("x" * 1000 + " " + "```\n" + "y" * 700, [3, 500, 1003, 1004])
def test_clauses_depend_on_the_text_alone_and_cover_it(text: str, cuts: list[int]) -> None:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in zip(places, places[1:], strict=False)]
    clauses = clauses_of(text)
    for arrival in (pieces, list(text), re.findall(r"\S+\s*|\s+", text)):
        assert clauses_of(text, arrival) == clauses
    assert "".join(clause.text for clause in clauses) == text
    assert all(0 < len(clause.text) <= MAX_CLAUSE_CHARS for clause in clauses)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(ATOMS)), min_size=1, max_size=12))
def test_no_clause_ends_inside_a_number_abbreviation_address_link_or_date(
    parts: list[tuple[int, str]],
) -> None:
    check_atoms(parts)


def test_first_and_second_clause_do_not_end_inside_an_atom() -> None:
    for atom in ATOMS:
        for num_words in range(4):
            check_atoms([(num_words, atom), (num_words, atom), (2, "3.14"), (3, atom)])


def check_atoms(parts: list[tuple[int, str]]) -> None:
    """Check the clauses of a text of atoms, each after a few words, with or without a comma."""
    text, inside = "", set[int]()
    for num_words, atom in parts:
        text += "Then we saw, as usual, "[: 12 * num_words].rpartition(" ")[0] + " "
        inside |= set(range(len(text) + 1, len(text) + len(atom)))
        text += atom + " "
    place = 0
    for clause in clauses_of(text)[:-1]:
        place += len(clause.text)
        assert place not in inside, (text, clause)


def test_first_clause_is_short_and_later_ones_are_sentences() -> None:
    assert [
        clause.text for clause in clauses_of("Sure, of course, I can. Well, it is so. And?")
    ] == [
        "Sure, of course, ",
        "I can. Well, it is so. ",
        "And?",
    ]
    long = "this sentence has no comma and goes on and on for quite a while until it ends at last. "
    first, second, *_ = clauses_of(long * 2)
    assert RAMP[0].space <= len(first.text) <= 60
    assert first.text + second.text == long


def test_code_blocks_are_not_spoken_and_hide_their_marks() -> None:
    text = "Run this now:\n```python\nprint('a. b, c')  # **x**\n~~~\n```\nThen *stop*."
    assert words_of(text) == "Run this now: Then stop."
    assert [clause.is_code for clause in clauses_of(text)] == [False, True, True, True, True, False]


def test_texts_are_said_as_a_person_would() -> None:
    assert len(CASES) >= 100
    wrong = {text: words_of(text) for text, words in CASES if words_of(text) != words}
    assert wrong == {}


@settings(max_examples=60, deadline=None)
@given(st.one_of(TEXTS, st.sampled_from([text for text, _ in CASES]), st.text(max_size=60)))
def test_written_words_cover_the_clause_and_count_every_spoken_word(text: str) -> None:
    for clause in clauses_of(text):
        spoken = spoken_text(clause, "en-US")
        counts = [word.num_spoken for word in spoken.written]
        assert "".join(word.text for word in spoken.written) == clause.text
        assert counts == sorted(counts) and counts[-1] == len(spoken.text.split())
        assert all(word.strip(PUNCTUATION) for word in spoken.text.split())


def test_amount_ends_with_its_last_written_word() -> None:
    (spoken,) = said("It costs $3.50 or +1 555 123 4567 now.")
    at = {word.text.strip(): word.num_spoken for word in spoken.written}
    words = spoken.text.split()
    assert words[at["$3.50"] - 1] == "cents" and words[at["or"] - 1] == "or"
    assert (words[at["4567"] - 1], at["555"], at["123"]) == ("7", at["or"], at["or"])


def test_other_languages_lose_only_markdown() -> None:
    assert words_of("**Es kostet** 3,50 € & [mehr](http://x.y), z.B. `so`. 😀", "de-DE") == (
        "Es kostet 3,50 € & mehr, z.B. so."
    )


@pytest.fixture(scope="module")
def pronunciation() -> G2P:
    return G2P()


def test_digits_that_stay_are_read_as_the_same_number(pronunciation: G2P) -> None:
    def sounds(text: str) -> str:
        return re.sub(r"[ˈˌ ]", "", pronunciation(text, normalize_text=False))

    assert [a for a, b in READINGS if sounds(a) != sounds(b)] == []
