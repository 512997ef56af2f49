"""Reads of chunks from the logs of their edges, for notices that do not contain the chunk: the new
part of each log, in one round trip. Knows no client.
"""

from collections.abc import Iterator, Sequence

from fleet.control import keys
from fleet.control.connect import Reply, entry_order, stream_entries
from fleet.control.notices import AnyNotice, LoggedNotice, chunk_notice
from fleet.core.chunk import Chunk, Location, decode_chunk
from fleet.core.ids import EdgeName, RequestId

_Log = tuple[RequestId, EdgeName]


def chunks_of(reply: Reply) -> list[Chunk]:
    """Decode the chunks in a reply of XRANGE."""
    return [decode_chunk(fields["h"]) for _, fields in stream_entries(reply)]


class LogReads:
    """Log reads for the `LoggedNotice`s among `notices`: one read per edge, from its first new
    chunk to its last.

    A chunk that Redis lost between its notice and the read is left out: its producer appends it
    again.
    """

    def __init__(self, notices: Sequence[AnyNotice]) -> None:
        self._notices = notices
        self._locations: dict[_Log, dict[int, Location]] = {}
        for notice in notices:
            if isinstance(notice, LoggedNotice):
                self._locations.setdefault((notice.request, notice.edge), {})[notice.index] = (
                    notice.location
                )

    @property
    def commands(self) -> list[tuple[str, str, str, str]]:
        return [
            ("XRANGE", keys.edge(request, edge), f"{min(indices) + 1}-0", f"{max(indices) + 1}-0")
            for (request, edge), indices in self._locations.items()
        ]

    def resolve(self, replies: Sequence[Reply]) -> list[AnyNotice]:
        """Return the notices in order, with all chunks of an edge in place of the edge's first
        `LoggedNotice`. `replies`: the replies to `commands`.
        """
        read = dict(zip(self._locations, replies, strict=True))
        resolved: list[AnyNotice] = []
        for notice in self._notices:
            if isinstance(notice, LoggedNotice):
                resolved += self._chunks(notice, read.pop((notice.request, notice.edge), None))
            else:
                resolved.append(notice)
        return resolved

    def _chunks(self, notice: LoggedNotice, reply: Reply) -> Iterator[AnyNotice]:
        locations = self._locations[notice.request, notice.edge]
        for entry, fields in stream_entries(reply):
            index = entry_order(entry)[0] - 1
            if index in locations:
                yield chunk_notice(fields["h"], locations[index])
