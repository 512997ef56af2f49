"""Pocket's spoken text and its symbols."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.core.errors import BadInput
from fleet.lab.pocket.corpus import SYMBOLS, decode, encode, spoken
from fleet.lab.pocket.corpus.text import number

words = st.from_regex(r"[a-z][a-z']{0,8}", fullmatch=True)
texts = st.lists(words, max_size=8).map(" ".join)


@given(texts)
def test_symbols_decode_to_the_text(text: str) -> None:
    assert decode(encode(text)) == text


@given(texts)
def test_spaces_have_no_symbol(text: str) -> None:
    assert len(encode(text)) == len(text.replace(" ", ""))


@given(st.lists(st.integers(0, len(SYMBOLS) - 1)))
def test_any_ids_decode_to_text(ids: list[int]) -> None:
    """Any ids decode to text, since models may generate any symbols: every symbol keeps its letter,
    and a symbol that begins a word, from the second symbol on, also gets a space.
    """
    text = decode(ids)
    assert text.replace(" ", "") == "".join(SYMBOLS[index] for index in ids).lower()
    assert text.count(" ") == sum(SYMBOLS[index].isupper() for index in ids[1:])


def test_first_letter_of_a_word_has_its_own_symbol() -> None:
    assert [SYMBOLS[index] for index in encode("i don't")] == ["I", "D", "o", "n", "'", "t"]


@pytest.mark.parametrize(
    "text",
    [
        "Hello",
        "two  words",
        " two",
        "two ",
        "'tis",
        "2",
        "hi!",
        "one\n",
        "caf\N{LATIN SMALL LETTER E WITH ACUTE}",
    ],
)
def test_text_that_is_not_spoken_text_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="not spoken text"):
        encode(text)


@pytest.mark.parametrize(
    ("typed", "normalised"),
    [
        ("What's 2+2?", "what's two plus two"),
        ("7 * 8 - 100", "seven times eight minus one hundred"),
        ("I don\N{RIGHT SINGLE QUOTATION MARK}t know THAT.", "i don't know that"),
        ("C-A-T", "c a t"),
        ("'quoted' o'clock", "quoted o'clock"),
        ("caf\N{LATIN SMALL LETTER E WITH ACUTE}\N{SLIGHTLY SMILING FACE}\n\nOui", "cafe oui"),
        ("007, 2024!", "seven two zero two four"),
        ("105", "one hundred five"),
        ("\N{SUPERSCRIPT TWO}", "two"),
        ("...", ""),
    ],
)
def test_typed_text_is_normalised_to_spoken_text(typed: str, normalised: str) -> None:
    assert spoken(typed) == normalised


@given(st.text())
def test_any_typed_text_can_be_encoded(typed: str) -> None:
    normalised = spoken(typed)
    assert decode(encode(normalised)) == normalised == spoken(normalised)


def test_number_names_are_unique() -> None:
    assert [number(value) for value in (0, 13, 20, 21, 99, 100, 342)] == [
        "zero",
        "thirteen",
        "twenty",
        "twenty one",
        "ninety nine",
        "one hundred",
        "three hundred forty two",
    ]
    assert len({number(value) for value in range(1000)}) == 1000
