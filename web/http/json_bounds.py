"""Limits of a JSON text, checked before parsing: parsed values take up to a hundred times the
memory of their text.

Knows no route and no field.
"""

from dataclasses import dataclass
from typing import cast

from pydantic import BeforeValidator

from fleet.core.errors import InputTooLarge

MAX_VALUES = 65_536
"""Limit of JSON values in the body of a request. The largest legitimate bodies list a hundred
tools, each with a schema of hundreds of values.
"""
MAX_WIDE_BYTES = 8 * 1024 * 1024
"""Limit of the total size of strings with characters beyond ASCII, which take up to four bytes of
memory per character. Base64 has no such characters.
"""
MAX_OUTSIDE_BYTES = 4 * 1024 * 1024
"""Limit of the bytes outside of strings: numbers, white space, punctuation. A number of four
thousand digits takes five times the memory of its text.
"""
_PIECE_BYTES = 64 * 1024
"""Size of a step of the scan, which takes at most a millisecond; between two steps other threads
may run.
"""


def check_json(raw: bytes, *, max_values: int = MAX_VALUES, whole: str = "the body") -> None:
    """Check that a JSON text is cheap to parse: at most `max_values` values, `MAX_OUTSIDE_BYTES`
    outside of strings, and `MAX_WIDE_BYTES` of strings with characters beyond ASCII. `whole` names
    the text in errors.

    Invalid JSON is counted as a parser reads it, up to its first error. Time: half a millisecond
    per MiB.
    Raises: InputTooLarge.
    """
    if len(raw) <= 2 * max_values:
        return  # each value takes one character and a separator
    scan = _Scan()
    for start in range(0, len(raw), _PIECE_BYTES):
        scan.feed(raw[start : start + _PIECE_BYTES])
        if scan.num_values > max_values:
            raise InputTooLarge(
                f"{whole}: more than {max_values} JSON values, this server's limit; send fewer"
            )
        if scan.outside_bytes > MAX_OUTSIDE_BYTES:
            raise InputTooLarge(
                f"{whole}: more than {MAX_OUTSIDE_BYTES} bytes beside strings, this server's "
                "limit; send less"
            )
        if scan.wide_bytes > MAX_WIDE_BYTES:
            raise InputTooLarge(
                f"{whole}: more than {MAX_WIDE_BYTES} bytes of strings with characters beyond "
                "ASCII, this server's limit; send "
                "shorter texts"
            )


@dataclass(slots=True)
class _Scan:
    """Counters of a JSON text that is scanned in pieces. Separators are commas and opening brackets
    outside of strings. `complete_wide_bytes` is the size of all complete strings with characters
    beyond ASCII.
    """

    num_separators: int = 0
    num_strings: int = 0
    outside_bytes: int = 0
    complete_wide_bytes: int = 0
    in_string: bool = False
    open_bytes: int = 0
    """Length so far of a string whose end has not been scanned."""
    open_is_wide: bool = False
    _carry: bytes = b""
    """A backslash at the end of the last piece; the character that it escapes is in the next piece.
    """

    @property
    def num_values(self) -> int:
        """Estimate the number of values scanned so far: the number of separators, since all values
        but the first follow a separator; or half the number of strings if that is larger, since an
        object has two strings per separator.
        """
        return max(self.num_separators, self.num_strings // 2)

    @property
    def wide_bytes(self) -> int:
        return self.complete_wide_bytes + (self.open_bytes if self.open_is_wide else 0)

    def feed(self, piece: bytes) -> None:
        piece, self._carry = self._carry + piece, b""
        if b"\\" in piece:
            if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
                piece, self._carry = piece[:-1], b"\\"
            # escaped backslashes first: the remaining ones escape quotes
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        runs = piece.split(b'"')
        self.num_strings += len(runs) // 2
        outside = b"".join(runs[1::2] if self.in_string else runs[::2])
        self.outside_bytes += len(outside)
        self.num_separators += outside.count(b",") + outside.count(b"[") + outside.count(b"{")
        self._measure_strings(piece, runs)

    def _measure_strings(self, piece: bytes, runs: list[bytes]) -> None:
        start, end = 0, len(piece)
        if self.in_string:
            start = len(runs[0])
            self._extend(runs[0])
            if len(runs) > 1:
                self._close()
        was_in_string, self.in_string = self.in_string, self.in_string == (len(runs) % 2 == 1)
        if self.in_string and not (was_in_string and len(runs) == 1):
            end -= len(runs[-1])
            self._extend(runs[-1])
        # strings that begin and end within the piece are measured together
        middle = piece[start:end]
        self.complete_wide_bytes += len(middle) if _is_wide(middle) else 0

    def _extend(self, text: bytes) -> None:
        self.open_bytes += len(text)
        self.open_is_wide = self.open_is_wide or _is_wide(text)

    def _close(self) -> None:
        self.complete_wide_bytes = self.wide_bytes
        self.open_bytes, self.open_is_wide = 0, False


def _is_wide(text: bytes) -> bool:
    return not text.isascii() or (b"\\" in text and b"\\u" in text)


def max_keys(most: int) -> BeforeValidator:
    """Return a validator that limits the number of an object's keys before its values are
    validated: pydantic collects an error of 1 KiB for each invalid value.
    """

    def check(value: object) -> object:
        num_keys = len(cast("dict[str, object]", value)) if isinstance(value, dict) else 0
        if num_keys > most:
            raise ValueError(f"{num_keys} keys; at most {most} are allowed")
        return value

    return BeforeValidator(check)
