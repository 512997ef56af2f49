"""Splits a long text at the pauses of a reader. Knows no tokenizer and no model."""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

_CUTS = (
    # the lookbehind changes no match: without it, a run of stops is read again from each of them
    re.compile(r"(?<![.!?…])[.!?…]+[\"'”’)\]]*\s+|[。！？]+|\n+"),  # after a sentence
    re.compile(r"[,;:—–]\s+|[，；：、]"),
    re.compile(r"\s+"),
    re.compile(r"(?s:.)"),
)


def split_text(text: str, fits: Callable[[str], bool]) -> list[str]:
    """Split a text into as few pieces as possible for which `fits` returns True: after sentences if
    possible, else after clauses, words, or characters.

    Invariants: the pieces joined are the text; only a single character may not fit.
    """
    return list(_pieces(text, fits, _CUTS))


def _pieces(
    text: str, fits: Callable[[str], bool], cuts: Sequence[re.Pattern[str]]
) -> Iterator[str]:
    if not cuts or fits(text):
        yield text
        return
    parts, start = list(_parts(text, cuts[0])), 0
    while start < len(parts):
        end = start + _num_fitting(parts, start, fits)
        yield from _pieces("".join(parts[start:end]), fits, cuts[1:])
        start = end


def _num_fitting(parts: Sequence[str], start: int, fits: Callable[[str], bool]) -> int:
    """Return how many parts from index `start` on fit together, at least 1. Calls `fits` a few
    times, and never with a text much longer than the result.
    """

    def fit(num: int) -> bool:
        return start + num <= len(parts) and fits("".join(parts[start : start + num]))

    most = 1
    while fit(2 * most):
        most *= 2
    return most + bisect_left(range(most + 1, 2 * most), True, key=lambda num: not fit(num))


def _parts(text: str, cut: re.Pattern[str]) -> Iterator[str]:
    """Yield the parts of a text that end with a match of `cut`, and the rest of the text."""
    ends = [found.end() for found in cut.finditer(text)]
    for start, end in zip([0, *ends], [*ends, len(text)], strict=True):
        if start < end:
            yield text[start:end]
