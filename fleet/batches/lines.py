"""Lines of a batch's input file: reading, and the check of the whole file before anything is sent.
Source: https://developers.openai.com/api/docs/guides/batch. Checks no field that the gateway
checks.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from fleet.batches.records import LineFault

MAX_FAULTS = 50
"""Most faults of an input file that are listed."""
MAX_ID_CHARS = 512
EXAMPLE = (
    '{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "M", '
    '"messages": [{"role": "user", "content": "Hello"}]}}'
)


class BatchLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request in an input file. `body` is the JSON that is sent to `url`, unread."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)]
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Streaming(msgspec.Struct, frozen=True):
    """Fields of a request body that ask for a streamed answer."""

    stream: bool | None = None
    stream_format: str | None = None


_decode_line = msgspec.json.Decoder(BatchLine).decode
_decode_streaming = msgspec.json.Decoder(_Streaming).decode


def read_lines(path: Path) -> Iterator[BatchLine]:
    """Yield the requests in a file that `find_faults` has accepted. Raises: OSError; msgspec's
    errors if the file has been changed since.
    """
    with path.open("rb") as file:
        for raw in file:
            if raw.strip():
                yield _decode_line(raw)


def find_faults(
    path: Path, endpoints: Sequence[str], max_lines: int | None = None
) -> tuple[int, list[LineFault]]:
    """Return the number of lines read and the faults, at most `MAX_FAULTS`: reading stops there,
    and at line `max_lines` + 1. `endpoints`: routes that lines may name. Raises: OSError.
    """
    faults: list[LineFault] = []
    ids: set[str] = set()
    num_lines = 0
    with path.open("rb") as file:
        written = ((number, raw) for number, raw in enumerate(file, 1) if raw.strip())
        for number, raw in written:
            num_lines += 1
            if max_lines is not None and num_lines > max_lines:
                message = f"more than {max_lines} lines (batches.max_lines); divide the file"
                return num_lines, [LineFault(code="too_many_lines", message=message, line=number)]
            fault = _find_fault(raw, number, endpoints, ids)
            faults += [fault] if fault is not None else []
            if len(faults) == MAX_FAULTS:
                break
    if not num_lines:
        faults = [LineFault(code="empty_file", message=f"the file has no line; write {EXAMPLE}")]
    return num_lines, faults


def _find_fault(
    raw: bytes, number: int, endpoints: Sequence[str], ids: set[str]
) -> LineFault | None:
    """Return what is wrong with a line; None if the line can be sent. Adds the line's id to `ids`,
    the ids of the lines before.
    """

    def fault(code: str, message: str, param: str | None = None) -> LineFault:
        return LineFault(code=code, message=message, param=param, line=number)

    try:
        line = _decode_line(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return fault("invalid_json_line", f"not a request ({error}); write {EXAMPLE}")
    if line.method != "POST":
        return fault("invalid_method", "method: it must be POST", "method")
    if line.url not in endpoints:
        return fault("invalid_url", f"url: use {' or '.join(endpoints)} in this batch", "url")
    if line.custom_id in ids:
        return fault(
            "duplicate_custom_id",
            f"custom_id: an earlier line has {line.custom_id[:64]!r}; give every line its own",
            "custom_id",
        )
    ids.add(line.custom_id)
    try:
        streaming = _decode_streaming(line.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return fault("invalid_body", f"body: {error}", "body")
    if streaming.stream:
        return fault("unsupported_value", "body.stream: answers are whole here", "body.stream")
    if streaming.stream_format == "sse":
        reason = "body.stream_format: answers are whole here; leave it out"
        return fault("unsupported_value", reason, "body.stream_format")
    return None
