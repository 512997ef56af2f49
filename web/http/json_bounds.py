"""Limits of a JSON text, checked before parsing: parsed values take up to a hundred times the
memory of their text.

Knows no route and no field.
"""

from dataclasses import dataclass
from typing import cast

from pydantic import BeforeValidator

from fleet.core.errors import InputTooLarge

MAX_VALUES = 65_536
"""Values in the body of a request. The largest legitimate ones list a hundred tools, each with a
schema of hundreds of values.
"""
MAX_WIDE_BYTES = 8 * 1024 * 1024
"""Limit of strings with characters beyond ASCII, which take up to four bytes per character. Base64
has none.
"""
MAX_OUTSIDE_BYTES = 4 * 1024 * 1024
"""Limit of numbers, white space and punctuation: a number of four thousand digits takes five times
its text.
"""
_PIECE_BYTES = 64 * 1024
"""One step of the scan, at most a millisecond, after which other threads may run."""


def check_json(raw: bytes, *, max_values: int = MAX_VALUES, whole: str = "the body") -> None:
    """Check the number of values, the bytes outside of strings, and the bytes of wide strings;
    `whole` names the text in errors.

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
    """State of the scan between two pieces. Separators are commas and opening brackets outside of
    strings.
    """

    num_separators: int = 0
    num_strings: int = 0
    outside_bytes: int = 0
    complete_wide_bytes: int = 0
    in_string: bool = False
    open_bytes: int = 0
    """Length so far of a string that continues in the next piece."""
    open_is_wide: bool = False
    _carry: bytes = b""
    """A backslash whose character is in the next piece."""

    @property
    def num_values(self) -> int:
        """Number of values: each but the first follows a separator. Strings alone count too, two
        per separator in an object.
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
    """Return a limit of an object's keys, checked before its values: a validator collects the
    errors of all, 1 KiB each.
    """

    def check(value: object) -> object:
        num_keys = len(cast("dict[str, object]", value)) if isinstance(value, dict) else 0
        if num_keys > most:
            raise ValueError(f"{num_keys} keys; at most {most} are allowed")
        return value

    return BeforeValidator(check)
