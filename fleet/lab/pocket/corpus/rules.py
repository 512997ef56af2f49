"""Table rows whose answers follow from a rule: sums, counting, the clock, spelling. Independent of
phrasings.
"""

from collections.abc import Callable, Mapping

from fleet.lab.pocket.corpus.table import Row
from fleet.lab.pocket.corpus.text import number
from fleet.lab.pocket.corpus.words import WORDS

MAX_SPELLED_LETTERS = 8


def _sums(operation: str, triples: list[tuple[int, int, int]]) -> list[Row]:
    return [
        {"operation": operation, "a": number(a), "b": number(b), "c": number(c)}
        for a, b, c in triples
    ]


def _compared() -> list[Row]:
    """Return rows that compare each pair of numbers in one order only, alternating: with both
    orders, a held-out answer would occur in training.
    """
    return [
        {"a": number(a), "b": number(b), "more": number(max(a, b)), "less": number(min(a, b))}
        for a in range(1, 21)
        for b in range(1, 21)
        if a != b and (a < b) == ((a + b) % 2 == 0)
    ]


def _count(first: int, last: int) -> str:
    step = 1 if last > first else -1
    return " ".join(number(value) for value in range(first, last + step, step))


def _counts() -> list[Row]:
    return [
        {"a": number(a), "b": number(b), "counted": _count(a, b)}
        for a in range(2, 21)
        for b in range(a - 5, a + 6)
        if b >= 0 and abs(a - b) >= 2
    ]


def _hours() -> list[Row]:
    return [
        {
            "gap": "one hour" if gap == 1 else f"{number(gap)} hours",
            "way": way,
            "from": number(hour),
            "to": number((hour + sign * gap - 1) % 12 + 1),
        }
        for way, sign in (("after", 1), ("before", -1))
        for hour in range(1, 13)
        for gap in range(1, 7)
    ]


RULES: Mapping[str, Callable[[], list[Row]]] = {
    "plus": lambda: _sums("plus", [(a, b, a + b) for a in range(21) for b in range(21)]),
    "minus": lambda: _sums("minus", [(a, b, a - b) for a in range(21) for b in range(a + 1)]),
    "times": lambda: _sums("times", [(a, b, a * b) for a in range(2, 11) for b in range(2, 11)]),
    "compared": _compared,
    "counts_from_one": lambda: [
        {"last": number(last), "counted": _count(1, last)} for last in range(2, 11)
    ],
    "counts": _counts,
    "next_numbers": lambda: [{"a": number(value), "b": number(value + 1)} for value in range(99)],
    "previous_numbers": lambda: [
        {"a": number(value), "b": number(value - 1)} for value in range(1, 100)
    ],
    "hours": _hours,
}
"""Functions that return the rows of a table, by the table's `rule`."""

WORD_RULES: Mapping[str, Callable[[str], Row]] = {
    "letters": lambda word: {"word": word, "letters": " ".join(word)},
    "first_letter": lambda word: {"word": word, "letter": word[0]},
    "num_letters": lambda word: {"word": word, "count": number(len(word))},
}
"""Functions from any word to its table row, by the table's `of_word`."""

_LISTS = ("objects", "animals", "colours", "foods", "places")
SPELLED = [word for name in _LISTS for word in WORDS[name] if len(word) <= MAX_SPELLED_LETTERS]
