"""Spoken text (lower-case words of letters and apostrophes), and the symbols in which models read
and write it.

Spaces have no symbol: the first letter of a word has a symbol of its own (a capital here), so that
about one symbol is spoken per 80 ms and text never falls behind speech. A model's special symbols
have the ids after these.
"""

import re
import unicodedata
from collections.abc import Iterable
from string import ascii_lowercase, ascii_uppercase

from fleet.core.errors import BadInput

SYMBOLS = ascii_lowercase + "'" + ascii_uppercase
"""All symbols, in the order of their ids; a capital is the first letter of a word."""

ACCENT = "[\N{COMBINING GRAVE ACCENT}-\N{COMBINING LATIN SMALL LETTER X}]"
"""Combining accents, which NFKD separates from their letters."""
_BLANKS = r"[ \t\r\n]*"


def _between_digits(signs: str) -> str:
    return f"(?<=[0-9]){_BLANKS}[{signs}]{_BLANKS}(?=[0-9])"


SIGNS = {
    "[+]": "plus",
    _between_digits("-\N{MINUS SIGN}"): "minus",
    _between_digits("*\N{MULTIPLICATION SIGN}"): "times",
}
"""Patterns of signs, and the words in which they are spoken."""

_ID_OF = {symbol: index for index, symbol in enumerate(SYMBOLS)}
_SPOKEN = re.compile(r"([a-z][a-z']*( [a-z][a-z']*)*)?")
_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


def encode(text: str) -> list[int]:
    """Return the symbol ids of a spoken text, one per letter and apostrophe.

    Invariants: `decode(encode(text)) == text`.
    Raises: BadInput if `text` is not normalized by `spoken`.
    """
    if not _SPOKEN.fullmatch(text):
        raise BadInput(
            f"{text!r} is not spoken text: words of a-z and apostrophes, separated by one space",
            param="text",
        )
    return [_ID_OF[symbol] for word in text.split() for symbol in word[0].upper() + word[1:]]


def decode(ids: Iterable[int]) -> str:
    """Return the text of symbol ids below `len(SYMBOLS)`, including sequences that `encode` never
    returns.
    """
    symbols = "".join(SYMBOLS[index] for index in ids)
    return re.sub("(?=[A-Z])", " ", symbols).lower().lstrip()


def spoken(text: str) -> str:
    """Normalize typed text: numbers as words, lower case, no accents, no punctuation but
    apostrophes within words.
    """
    plain = unicodedata.normalize(
        "NFKD", text.lower().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
    )
    plain = re.sub(ACCENT, "", plain)
    for sign, word in SIGNS.items():
        plain = re.sub(sign, f" {word} ", plain)
    plain = re.sub(r"[0-9]+", lambda digits: f" {_digits_in_words(digits.group())} ", plain)
    return " ".join(
        word.strip("'") for word in re.sub(r"[^a-z']", " ", plain).split() if word.strip("'")
    )


def _digits_in_words(digits: str) -> str:
    return (
        number(int(digits))
        if len(digits) <= 3
        else " ".join(number(int(digit)) for digit in digits)
    )


def number(value: int) -> str:
    """Return a number from 0 to 999 in words."""
    if value < 20:
        return _ONES[value]
    if value < 100:
        tens, ones = divmod(value, 10)
        return _TENS[tens - 2] + (f" {_ONES[ones]}" if ones else "")
    hundreds, rest = divmod(value, 100)
    return f"{_ONES[hundreds]} hundred" + (f" {number(rest)}" if rest else "")
