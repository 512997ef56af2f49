"""Word errors between a text and what was heard of it. Pure.

Texts are compared as they sound: "7.30" and "seven thirty", "Mr." and "mister", "it's" and "it is"
are equal words, and punctuation, case and Markdown do not count.
"""

import re
from collections.abc import Iterable, Sequence

import msgspec

from fleet.processing.spoken.clauses import Clause
from fleet.processing.spoken.normalize import spoken_text

LANGUAGE = "en-US"
ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
).split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
SCALES = ((10**9, "billion"), (10**6, "million"), (1000, "thousand"), (100, "hundred"))
ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}
SAME = {
    "okay": "ok",
    "mr": "mister",
    "mrs": "missus",
    "dr": "doctor",
    "colour": "color",
    "favourite": "favorite",
    "grey": "gray",
    "metre": "meter",
    "metres": "meters",
    "centre": "center",
}
"""Spellings of one word."""
CONTRACTIONS = (
    (r"\bwon't\b", "will not"),
    (r"\bcan't\b|\bcannot\b", "can not"),
    (r"n't\b", " not"),
    (r"'re\b", " are"),
    (r"'ll\b", " will"),
    (r"'ve\b", " have"),
    (r"'m\b", " am"),
    (r"\b(it|that|what|there|here|who|where|how|he|she|let)'s\b", r"\1 is"),
)
_TIME = re.compile(r"(?i)\b(at|by|until|till|before|after|from|to|past)( \d{1,2})\.([0-5]\d)\b")
_NUMBER = re.compile(r"(\d[\d,]*)(\.\d+)?(st|nd|rd|th)?")
_WORD = re.compile(r"[a-z]+(?:'[a-z]+)*")


class WordErrors(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of words said, and of words that were heard wrong, not heard, or added."""

    words: int = 0
    errors: int = 0

    @property
    def percent(self) -> float:
        return 100 * self.errors / self.words if self.words else 0.0


def word_errors(pairs: Iterable[tuple[str, str]]) -> WordErrors:
    """Count the word errors of pairs of texts: said, and heard."""
    words = errors = 0
    for said, heard in pairs:
        reference = words_of(said)
        words += len(reference)
        errors += edit_distance(reference, words_of(heard))
    return WordErrors(words=words, errors=errors)


def words_of(text: str) -> list[str]:
    """Return the words of a text as they sound, in lower case and without punctuation."""
    text = _TIME.sub(r"\1\2:\3", text.replace("’", "'"))
    lines = (Clause(text=line, starts_line=True, ends_line=True) for line in text.splitlines())
    said = " ".join(spoken_text(line, LANGUAGE).text for line in lines).lower()
    for pattern, full in CONTRACTIONS:
        said = re.sub(pattern, full, said)
    said = _NUMBER.sub(lambda match: f" {_number_words(*match.groups())} ", said)
    words: list[str] = []
    for word in _WORD.findall(said):
        if word != "and" or words[-1:] not in (["hundred"], ["thousand"]):
            words.append(SAME.get(word, word))
    return words


def edit_distance(said: Sequence[str], heard: Sequence[str]) -> int:
    """Return the least number of words to insert, remove and replace."""
    row = list(range(len(heard) + 1))
    for number, word in enumerate(said, 1):
        diagonal, row[0] = row[0], number
        for at, other in enumerate(heard, 1):
            best = min(row[at] + 1, row[at - 1] + 1, diagonal + (word != other))
            diagonal, row[at] = row[at], best
    return row[-1]


def _number_words(digits: str, decimals: str | None, ordinal: str | None) -> str:
    number = int(digits.replace(",", ""))
    if decimals:
        return " ".join([_cardinal(number), "point", *(ONES[int(each)] for each in decimals[1:])])
    if ordinal:
        return _ordinal(_cardinal(number))
    is_year = len(digits) == 4 and (1100 <= number < 2000 or 2010 <= number < 2100)
    return _year(number) if is_year else _cardinal(number)


def _cardinal(number: int) -> str:
    for scale, name in SCALES:
        if number >= scale:
            rest = f" {_cardinal(number % scale)}" if number % scale else ""
            return f"{_cardinal(number // scale)} {name}{rest}"
    if number < len(ONES):
        return ONES[number]
    return f"{TENS[number // 10 - 2]}{f' {ONES[number % 10]}' if number % 10 else ''}"


def _year(number: int) -> str:
    century, rest = divmod(number, 100)
    end = "hundred" if not rest else f"oh {ONES[rest]}" if rest < 10 else _cardinal(rest)
    return f"{_cardinal(century)} {end}"


def _ordinal(cardinal: str) -> str:
    before, _, last = cardinal.rpartition(" ")
    ending = ORDINALS.get(last) or (f"{last[:-1]}ieth" if last[-1] == "y" else f"{last}th")
    return f"{before} {ending}".strip()
