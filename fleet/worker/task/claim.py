"""The reply to a successful claim: a task's request, its hash, and the logs of its edges. Knows no
Redis.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from fleet.control.connect import Reply, pairs, stream_entries, text
from fleet.core.chunk import Chunk, Location, decode_chunk, decode_location
from fleet.core.ids import EdgeName, WorkerId
from fleet.core.pages import decode_pages
from fleet.core.request import RequestSpec, decode_request
from fleet.worker.task.hand_off import Offer


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLogs:
    """What Redis held when a task was claimed: the chunks of its inputs from index 0, and the
    chunks that earlier owners wrote to its output edges.

    `consumed`: per output edge, the number of chunks that its consumer has acknowledged (unbounded
    once the consumer has ended). `blob`: binary part of the request, None without one. `offer`: KV
    blocks that an earlier owner offers, None without an offer.
    """

    inputs: dict[EdgeName, list[tuple[Chunk, Location]]]
    outputs: dict[EdgeName, list[Chunk]]
    consumed: dict[EdgeName, int]
    blob: bytes | None
    offer: Offer | None


def parse_claim(
    reply: Sequence[Reply], inputs: Sequence[EdgeName], outputs: Sequence[EdgeName]
) -> tuple[RequestSpec, dict[str, bytes], TaskLogs]:
    """Parse the reply to a claim into the request, the task's hash and its logs. `inputs`,
    `outputs`: the task's edges in the order in which the claim named them.
    """
    _, spec, fields, blob, offered, of_inputs, of_outputs = reply
    read = dict(zip(inputs, cast("list[list[Reply]]", of_inputs), strict=True))
    written = dict(zip(outputs, cast("list[list[Reply]]", of_outputs), strict=True))
    logs = TaskLogs(
        inputs={
            edge: _located(_chunks(entries), pairs(where))
            for edge, (entries, where) in read.items()
        },
        outputs={edge: _chunks(entries) for edge, (entries, *_) in written.items()},
        consumed={edge: _consumed(state, acked) for edge, (_, state, acked) in written.items()},
        blob=cast("bytes | None", blob),
        offer=_offer(pairs(offered)),
    )
    return decode_request(cast(bytes, spec)), pairs(fields), logs


def _consumed(state: Reply, acked: Reply) -> int:
    return sys.maxsize if text(state) == "finished" else int(cast("bytes | None", acked) or 0)


def _offer(fields: Mapping[str, bytes]) -> Offer | None:
    if fields.get("state") != b"offered":
        return None
    location = decode_location(fields["loc"]) if fields["loc"] else {}
    return Offer(
        num_rows=int(fields["rows"]),
        source=WorkerId(text(fields["source"])),
        pages=decode_pages(fields["pages"]) if fields["pages"] else None,
        location=location,
        data=fields["data"],
    )


def _chunks(entries: Reply) -> list[Chunk]:
    return [decode_chunk(fields["h"]) for _, fields in stream_entries(entries)]


def _located(chunks: Sequence[Chunk], where: Mapping[str, bytes]) -> list[tuple[Chunk, Location]]:
    return [
        (c, decode_location(where[str(c.index)]) if str(c.index) in where else {}) for c in chunks
    ]
