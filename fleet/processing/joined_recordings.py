"""Splitting of files that contain several recordings one after another, as `cat` and many tools
join them.

Decoders and demuxers read the first recording and ignore the rest, or read later headers as
samples. Here a file is split before it is decoded, so that each recording has a decoder, a sample
rate and channels of its own. MPEG and AAC audio is split only at tags, since it is a stream of
frames without a file header. Decodes nothing.
"""

import re
import struct
from collections.abc import Iterator, Mapping

from fleet.core.errors import BadInput
from fleet.processing.audio_limits import NotReadable

MAX_RECORDINGS = 1_000
"""Most recordings in one file. Opening a decoder takes about as long as decoding 0.1 s of audio."""
MAX_TAGS = 16
"""Most ID3v2 tags that are skipped before a recording; decoders skip at most one."""
MAX_MP4_BOXES = 100_000
_ID3_HEADER_LEN = 10
_ID3 = re.compile(rb"ID3[\x02-\x04]\x00.[\x00-\x7f]{4}", re.DOTALL)
_BOX_HEADER, _LONG_SIZE = struct.Struct(">I4s"), struct.Struct(">Q")
_BEGINNINGS: Mapping[bytes, re.Pattern[bytes]] = {
    b"RI": re.compile(rb"RI(?:FF|FX).{4}WAVE", re.DOTALL),
    b"RF": re.compile(rb"RF64.{4}WAVE", re.DOTALL),
    b"#!": re.compile(rb"#!AMR(?:-WB)?\n"),
    # EBML header with its document type
    b"\x1aE": re.compile(rb"\x1aE\xdf\xa3.{1,60}?\x42\x82.(?:webm|matroska)", re.DOTALL),
    # mark and header of STREAMINFO, which is always first
    b"fL": re.compile(rb"fLaC[\x00\x80]\x00\x00\x22"),
    # first page of a logical stream
    b"Og": re.compile(rb"OggS\x00[\x02\x06].{20}(?P<laces>.)", re.DOTALL),
}
"""Patterns of the beginning of a recording, by its first two bytes. A pattern fixes at least 48
bits, so that it does not occur by chance within a recording.
"""


def recordings_of(raw: bytes, where: str) -> Iterator[bytes]:
    """Yield each recording of a file, without ID3v2 tags. A file of one recording is not copied.

    Raises: NotReadable; BadInput naming `where` if the file has too many.
    """
    number = 0
    for piece in _without_tags(raw):
        starts = [0, *(start for start in _starts(piece) if start)]
        for start, end in zip(starts, [*starts[1:], len(piece)], strict=True):
            number += 1
            if number > MAX_RECORDINGS:
                reason = f"the file joins more than {MAX_RECORDINGS} recordings; send one recording"
                raise BadInput(f"{where}: {reason}", param=where)
            yield piece[start:end]


def is_mpeg_frame(start: bytes) -> bool:
    """Return True for the first bytes of MPEG audio, or of AAC in ADTS."""
    return len(start) > 1 and start[0] == 0xFF and start[1] & 0xE0 == 0xE0


def mp4_boxes(raw: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield (kind, start, end) of each top-level box of an MP4 file. Raises: NotReadable for too
    many boxes.
    """
    start = 0
    for _ in range(MAX_MP4_BOXES):
        if start + _LONG_SIZE.size + _BOX_HEADER.size > len(raw):
            return
        size, kind = _BOX_HEADER.unpack_from(raw, start)
        if size == 1:
            (size,) = _LONG_SIZE.unpack_from(raw, start + _BOX_HEADER.size)
        end = start + max(size, _BOX_HEADER.size) if size else len(raw)
        yield kind, start, min(end, len(raw))
        start = end
    raise NotReadable("has too many boxes")


def num_ogg_streams(raw: bytes) -> int:
    """Return 2 if several logical streams begin in the first pages of an Ogg recording, else 1."""
    first = _BEGINNINGS[b"Og"].match(raw)
    return 1 if first is None or _BEGINNINGS[b"Og"].match(raw, _page_end(raw, first)) is None else 2


def _starts(raw: bytes) -> Iterator[int]:
    """Yield the offsets in bytes at which recordings begin that have the format of the file's first
    recording.
    """
    if raw[4:8] == b"ftyp":
        yield from (start for kind, start, _ in mp4_boxes(raw) if kind == b"ftyp")
    elif (beginning := _BEGINNINGS.get(raw[:2])) is not None:
        page_end = None
        for found in beginning.finditer(raw):
            # the first pages of tracks that are played together follow each other
            if found.start() != page_end:
                yield found.start()
            page_end = _page_end(raw, found) if raw.startswith(b"OggS") else None


def _page_end(raw: bytes, found: re.Match[bytes]) -> int:
    num_laces = found["laces"][0]
    return found.end() + num_laces + sum(raw[found.end() : found.end() + num_laces])


def _without_tags(raw: bytes) -> Iterator[bytes]:
    """Yield the parts of a FLAC, MPEG or AAC file between its ID3v2 tags; any other file as a
    whole.
    """
    start = _tags_end(raw, 0)
    if not _is_taggable(raw, start):
        yield raw
        return
    for found in _ID3.finditer(raw, start):
        end = _tags_end(raw, found.start())
        if found.start() >= start and (end >= len(raw) or _is_taggable(raw, end)):
            yield raw[start : found.start()]
            start = end
    if start < len(raw):
        yield raw[start:]


def _is_taggable(raw: bytes, at: int) -> bool:
    return is_mpeg_frame(raw[at : at + 2]) or raw.startswith(b"fLaC", at)


def _tags_end(raw: bytes, at: int) -> int:
    """Return the offset at which the ID3v2 tags that begin at byte `at` end; `at` itself if there
    is no tag.
    """
    for _ in range(MAX_TAGS):
        if not raw.startswith(b"ID3", at):
            break
        at += _id3_len(raw[at : at + _ID3_HEADER_LEN])
    return at


def _id3_len(header: bytes) -> int:
    """Return the length in bytes of the ID3v2 tag with this header, header and footer included. The
    size in the header excludes both, and has 7 bits per byte.
    """
    size = 0
    for byte in header[6:]:
        size = size << 7 | byte & 0x7F
    has_footer = len(header) > 5 and header[5] & 0x10
    return _ID3_HEADER_LEN * (2 if has_footer else 1) + size
