"""Text as it is spoken: lower-case words of letters and apostrophes, and the symbols a model reads and writes them in.

There is no symbol for the space: the first letter of a word is a symbol of its own (written here as a capital), so that about
one symbol is spoken per 80 ms and text never falls behind speech. Knows no model's special
symbols; they are numbered after these.
"""

import re
import unicodedata
from collections.abc import Iterable
from string import ascii_lowercase, ascii_uppercase

from fleet.core.errors import BadInput

SYMBOLS = ascii_lowercase + "'" + ascii_uppercase
"""The symbol of id i is `SYMBOLS[i]`; a capital is the first letter of a word."""

ACCENT = "[\N{COMBINING GRAVE ACCENT}-\N{COMBINING LATIN SMALL LETTER X}]"
"""What is left of an accent on a Latin letter when the two are taken apart."""
_BLANKS = r"[ \t\r\n]*"


def _between_digits(signs: str) -> str:
    return f"(?<=[0-9]){_BLANKS}[{signs}]{_BLANKS}(?=[0-9])"


SIGNS = {
    "[+]": "plus",
    _between_digits("-\N{MINUS SIGN}"): "minus",
    _between_digits("*\N{MULTIPLICATION SIGN}"): "times",
}
"""Patterns of the signs that are said."""

_ID_OF = {symbol: index for index, symbol in enumerate(SYMBOLS)}
_SPOKEN = re.compile(r"([a-z][a-z']*( [a-z][a-z']*)*)?")
_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


def encode(text: str) -> list[int]:
    """The ids of a spoken text, one per letter and apostrophe.

    Invariants: `decode(encode(text)) == text`.
    Raises: BadInput if `text` is not as `spoken` would write it.
    """
    if not _SPOKEN.fullmatch(text):
        raise BadInput(f"{text!r} is not spoken text: words of a-z and apostrophes, one space between", param="text")
    return [_ID_OF[symbol] for word in text.split() for symbol in word[0].upper() + word[1:]]


def decode(ids: Iterable[int]) -> str:
    """The text of any ids below `len(SYMBOLS)`, also of those that no text has: a word may then begin amid."""
    symbols = "".join(SYMBOLS[index] for index in ids)
    return re.sub("(?=[A-Z])", " ", symbols).lower().lstrip()


def spoken(text: str) -> str:
    """Typed text as it is said: numbers in words, no case, no accents, no punctuation but the apostrophe within a word."""
    plain = unicodedata.normalize("NFKD", text.lower().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'"))
    plain = re.sub(ACCENT, "", plain)
    for sign, word in SIGNS.items():
        plain = re.sub(sign, f" {word} ", plain)
    plain = re.sub(r"[0-9]+", lambda digits: f" {_said(digits.group())} ", plain)
    return " ".join(word.strip("'") for word in re.sub(r"[^a-z']", " ", plain).split() if word.strip("'"))


def _said(digits: str) -> str:
    return number(int(digits)) if len(digits) <= 3 else " ".join(number(int(digit)) for digit in digits)


def number(value: int) -> str:
    """0..999 in words."""
    if value < 20:
        return _ONES[value]
    if value < 100:
        tens, ones = divmod(value, 10)
        return _TENS[tens - 2] + (f" {_ONES[ones]}" if ones else "")
    hundreds, rest = divmod(value, 100)
    return f"{_ONES[hundreds]} hundred" + (f" {number(rest)}" if rest else "")
