"""Splits a long text at the pauses of a reader. Knows no tokenizer and no model."""

import re
from collections.abc import Callable, Iterator, Sequence

_CUTS = (
    # the lookbehind changes no match: without it, a run of stops is read again from each of them
    re.compile(r"(?<![.!?…])[.!?…]+[\"'”’)\]]*\s+|[。！？]+|\n+"),  # after a sentence
    re.compile(r"[,;:—–]\s+|[，；：、]"),
    re.compile(r"\s+"),
    re.compile(r"(?s:.)"),
)


def split_text(text: str, fits: Callable[[str], bool]) -> list[str]:
    """Split the text into as few pieces as possible, each of which fits: at sentences, else at clauses, words, characters.

    Invariants: the pieces joined are the text; only a single character may not fit.
    """
    return list(_pieces(text, fits, _CUTS))


def _pieces(text: str, fits: Callable[[str], bool], cuts: Sequence[re.Pattern[str]]) -> Iterator[str]:
    if fits(text) or not cuts:
        yield text
        return
    held = ""
    for part in _parts(text, cuts[0]):
        if held and not fits(held + part):
            yield from _pieces(held, fits, cuts[1:])
            held = ""
        held += part
    yield from _pieces(held, fits, cuts[1:])


def _parts(text: str, cut: re.Pattern[str]) -> Iterator[str]:
    """Yield the parts that end with a cut, the cut included, and the rest."""
    ends = [found.end() for found in cut.finditer(text)]
    for start, end in zip([0, *ends], [*ends, len(text)], strict=True):
        if start < end:
            yield text[start:end]
