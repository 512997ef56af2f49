"""Parsing of a multipart form from a body in memory, with limits of fields, files and headers.
Knows no form of a route.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, Headers
from starlette.formparsers import MultiPartException, MultiPartParser

from fleet.core.errors import SHOWN_CHARS, BadInput, InputTooLarge, quoted

MAX_FIELDS = 32
MAX_FILES = 32
MAX_FIELD_BYTES = 64 * 1024
MAX_PART_HEADER_BYTES = 8 * 1024
"""Size limit of the headers of one part of a form."""
MAX_TYPE_CHARS = 1024
"""Length limit of a form's Content-Type header, which contains the boundary."""
CHARSETS = ("utf-8", "utf8", "us-ascii", "ascii", "iso-8859-1", "latin-1")
"""Accepted encodings of a form's texts. Python has further codecs, some of which take quadratic
time or yield texts that cannot be written as UTF-8.
"""
_PIECE_BYTES = 64 * 1024


@asynccontextmanager
async def open_form(headers: Headers, raw: bytes) -> AsyncIterator[FormData]:
    """Parse the fields and files of a multipart body, as an async context. Other tasks run in
    between.

    Raises: BadInput, InputTooLarge.
    """
    kind = headers.get("content-type", "")
    if len(kind) > MAX_TYPE_CHARS:
        raise BadInput(
            f"content-type: more than {MAX_TYPE_CHARS} characters; shorten the form's boundary"
        )
    _check_charset(kind)
    try:
        form = await _Parser(headers, raw).parse()
    except MultiPartException as error:
        raise BadInput(f"the body is not a form that can be read: {error.message}") from error
    try:
        yield form
    finally:
        await form.close()


def _check_charset(kind: str) -> None:
    """Check the encoding in a Content-Type header, if it names one. Raises: BadInput."""
    _, options = parse_options_header(kind)
    charset = options.get(b"charset", b"utf-8").decode("latin-1").strip().lower()
    if charset not in CHARSETS:
        raise BadInput(f"content-type: charset {quoted(charset)} is not read; send UTF-8")


class _Parser(MultiPartParser):
    """Starlette's multipart parser with additional limits. Files stay in memory, like the body, and
    are not written to disk.
    """

    def __init__(self, headers: Headers, raw: bytes) -> None:
        super().__init__(
            headers,
            _pieces(raw),
            max_files=MAX_FILES,
            max_fields=MAX_FIELDS,
            max_part_size=MAX_FIELD_BYTES,
        )
        self.spool_max_size = len(raw) + 1
        self._part_header_bytes = 0

    def on_part_begin(self) -> None:
        self._part_header_bytes = 0
        super().on_part_begin()

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        super().on_header_field(data, start, end)

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        super().on_header_value(data, start, end)

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        part = self._current_part
        if part.file is None and len(part.data) + end - start > MAX_FIELD_BYTES:
            name = part.field_name[:SHOWN_CHARS]
            reason = f"more than {MAX_FIELD_BYTES} bytes; shorten it, or send it as a file"
            raise InputTooLarge(f"{name or 'a field without a name'}: {reason}", param=name or None)
        super().on_part_data(data, start, end)

    def _count_header(self, num_bytes: int) -> None:
        self._part_header_bytes += num_bytes
        if self._part_header_bytes > MAX_PART_HEADER_BYTES:
            raise InputTooLarge(
                f"the form has a part with more than {MAX_PART_HEADER_BYTES} bytes of headers; "
                "shorten its names"
            )


async def _pieces(raw: bytes) -> AsyncGenerator[bytes]:
    for start in range(0, len(raw), _PIECE_BYTES):
        yield raw[start : start + _PIECE_BYTES]
        await asyncio.sleep(0)
