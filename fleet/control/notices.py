"""Typed notices: the entries of a worker's or gateway's inbox, a Redis stream. The only module that
reads their fields.
"""

from collections.abc import Iterator

import msgspec

from fleet.control.connect import text
from fleet.core.chunk import Chunk, Location, decode_chunk, decode_location
from fleet.core.errors import UnknownWireVersion
from fleet.core.ids import EdgeName, Epoch, RequestId, StageName, Walk
from fleet.telemetry.views import WorkerOrder


class ChunkNotice(msgspec.Struct, frozen=True, kw_only=True):
    chunk: Chunk
    location: Location


class LoggedNotice(msgspec.Struct, frozen=True, kw_only=True):
    """Notice of a chunk whose header is too large for the inbox; the header is read from the edge's
    log.
    """

    request: RequestId
    edge: EdgeName
    index: int
    location: Location


class UnreadableNotice(msgspec.Struct, frozen=True, kw_only=True):
    """Notice of a damaged chunk. Concerns the request of that chunk only."""

    error: UnknownWireVersion


class CreditNotice(msgspec.Struct, frozen=True, kw_only=True):
    request: RequestId
    edge: EdgeName
    consumed: int


class RelocationNotice(msgspec.Struct, frozen=True, kw_only=True):
    """Notice that the tensors of a chunk were recomputed and are at a new location."""

    request: RequestId
    edge: EdgeName
    index: int
    location: Location


class _Entry(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag_field="k",
    rename={
        "request": "r",
        "stage": "s",
        "state": "s",
        "epoch": "e",
        "edge": "e",
        "code": "c",
        "message": "m",
        "param": "p",
        "from_index": "i",
        "walk": "w",
        "order": "o",
        "group": "a",
    },
):
    """Base of the notices that fill a whole inbox entry. `rename` maps fields to their short names
    in Redis.
    """


class EndNotice(_Entry, frozen=True, kw_only=True, tag="x"):
    """Notice that a request has ended, in any state; memory held for the request can be freed."""

    request: RequestId
    state: str
    code: str
    message: str
    param: str


class TakenNotice(_Entry, frozen=True, kw_only=True, tag="y"):
    """Notice that an operator revoked a task. An owner at an epoch below `epoch` must drop the
    task.
    """

    request: RequestId
    stage: StageName
    epoch: Epoch


class MovedNotice(_Entry, frozen=True, kw_only=True, tag="m"):
    """Notice that another gateway holds the client edges of a request, from `epoch` on."""

    request: RequestId
    epoch: Epoch


class WalkNotice(_Entry, frozen=True, kw_only=True, tag="w"):
    """Notice that the conductor has decided the consumer's next walk: `walk` applies from chunk
    `from_index` of `edge` on.
    """

    request: RequestId
    edge: EdgeName
    from_index: int
    walk: Walk


class FreeNotice(_Entry, frozen=True, kw_only=True, tag="f"):
    """Notice that the KV blocks that this worker offered were imported, so that their memory can be
    freed.
    """

    request: RequestId


class Grant(_Entry, frozen=True, kw_only=True, tag="g"):
    """Notice that a task is offered: in the inbox, to the worker that caches the prefix of the
    task's session; or in a role's stream, to any worker of the role. `entry`: id of the entry in
    the role's stream; "" in an inbox.

    `group`: group of suspect tasks, beside which alone this task may run; "1" if this task must run
    without any other; "" if this task may run beside any other.
    """

    request: RequestId
    stage: StageName
    epoch: Epoch
    entry: str = ""
    group: str = ""


class PromotionNotice(_Entry, frozen=True, kw_only=True, tag="p"):
    """Notice that this standby worker accepts tasks from now on, because a worker of its role is
    gone.
    """


class OrderNotice(_Entry, frozen=True, kw_only=True, tag="o"):
    """Notice of an operator's order to this worker."""

    order: WorkerOrder


Entry = (
    OrderNotice | PromotionNotice | FreeNotice | EndNotice | TakenNotice | MovedNotice | WalkNotice
)
AnyEntry = Entry | Grant
Notice = RelocationNotice | ChunkNotice | LoggedNotice | UnreadableNotice | CreditNotice | Entry
AnyNotice = Grant | Notice


def parse_notices(fields: dict[str, bytes]) -> list[AnyNotice]:
    """Parse one inbox entry, which may hold several notices."""
    if fields["k"] == b"n":
        return list(_news(fields))
    return [_notice(fields)]


def _news(fields: dict[str, bytes]) -> Iterator[AnyNotice]:
    """Parse the notices of chunks and credit that one script call added, in the order of their
    fields (`add_news` in `lua/common`).
    """
    items = iter([*fields.items(), ("", b"")])
    name, value = next(items)
    for following, next_value in items:
        if name[0] in "hp":
            yield _chunk(name, value, decode_location(next_value) if following[:1] == "l" else {})
        elif name[0] == "a":
            request, edge, consumed = text(value).split("|")
            yield CreditNotice(
                request=RequestId(request), edge=EdgeName(edge), consumed=int(consumed)
            )
        name, value = following, next_value


def _chunk(name: str, value: bytes, location: Location) -> AnyNotice:
    if name[0] == "p":
        request, edge, index = text(value).split("|")
        return LoggedNotice(
            request=RequestId(request), edge=EdgeName(edge), index=int(index), location=location
        )
    return chunk_notice(value, location)


def chunk_notice(header: bytes, location: Location) -> ChunkNotice | UnreadableNotice:
    try:
        return ChunkNotice(chunk=decode_chunk(header), location=location)
    except UnknownWireVersion as error:
        return UnreadableNotice(error=error)


def _notice(fields: dict[str, bytes]) -> AnyNotice:
    if fields["k"] == b"l":
        return RelocationNotice(
            request=RequestId(text(fields["r"])),
            edge=EdgeName(text(fields["e"])),
            index=int(fields["i"]),
            location=decode_location(fields["l"]),
        )
    return msgspec.convert(_texts(fields), AnyEntry, strict=False)


def parse_grant(fields: dict[str, bytes], entry: str = "") -> Grant:
    """Parse a grant. `fields`: fields of the stream entry. `entry`: id of the entry in a role's
    stream; "" for an inbox.
    """
    return msgspec.convert({**_texts(fields), "entry": entry}, Grant, strict=False)


def _texts(fields: dict[str, bytes]) -> dict[str, str]:
    return {name: text(value) for name, value in fields.items()}
