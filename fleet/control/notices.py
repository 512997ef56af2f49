"""Typed notices: the entries of a worker's or gateway's inbox. The only module that reads their
fields.
"""

from collections.abc import Iterator

import msgspec

from fleet.control.connect import text
from fleet.core.chunk import Chunk, Location, decode_chunk, decode_location
from fleet.core.errors import UnknownWireVersion
from fleet.core.ids import EdgeName, Epoch, RequestId, StageName, Walk
from fleet.telemetry.views import WORKER_ORDERS, WorkerOrder


class ChunkNotice(msgspec.Struct, frozen=True, kw_only=True):
    chunk: Chunk
    location: Location


class LoggedNotice(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk whose header is too large for the inbox: it is read from the log of its edge."""

    request: RequestId
    edge: EdgeName
    index: int
    location: Location


class UnreadableNotice(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk of another version: it concerns one request only."""

    error: UnknownWireVersion


class CreditNotice(msgspec.Struct, frozen=True, kw_only=True):
    request: RequestId
    edge: EdgeName
    consumed: int


class EndNotice(msgspec.Struct, frozen=True, kw_only=True):
    """The request has ended, in any state; memory held for it can be freed."""

    request: RequestId
    state: str
    code: str
    message: str
    param: str


class TakenNotice(msgspec.Struct, frozen=True, kw_only=True):
    """An operator revoked a task: an owner at an epoch below this one must drop it."""

    request: RequestId
    stage: StageName
    epoch: Epoch


class MovedNotice(msgspec.Struct, frozen=True, kw_only=True):
    """Another gateway holds the client edges of a request, from this epoch on."""

    request: RequestId
    epoch: Epoch


class WalkNotice(msgspec.Struct, frozen=True, kw_only=True):
    """A transition that the conductor decided."""

    request: RequestId
    edge: EdgeName
    from_index: int
    walk: Walk


class RelocationNotice(msgspec.Struct, frozen=True, kw_only=True):
    """The tensors of a chunk were recomputed, and are at a new location."""

    request: RequestId
    edge: EdgeName
    index: int
    location: Location


class FreeNotice(msgspec.Struct, frozen=True, kw_only=True):
    """The blocks that this worker offered were imported; their memory can be freed."""

    request: RequestId


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """A task is offered to this worker, which caches the prefix of the task's session, or by
    `entry` of its role's stream.

    `alone`: no other task may run beside this one.
    """

    request: RequestId
    stage: StageName
    epoch: Epoch
    entry: str = ""
    alone: bool = False


class PromotionNotice(msgspec.Struct, frozen=True, kw_only=True):
    """A standby worker accepts tasks from now on, because a worker of its role is gone."""


class OrderNotice(msgspec.Struct, frozen=True, kw_only=True):
    """An operator's order to this worker."""

    order: WorkerOrder


Notice = (
    OrderNotice
    | PromotionNotice
    | FreeNotice
    | RelocationNotice
    | ChunkNotice
    | LoggedNotice
    | UnreadableNotice
    | CreditNotice
    | EndNotice
    | TakenNotice
    | MovedNotice
    | WalkNotice
)
AnyNotice = Grant | Notice


def parse_notices(fields: dict[str, bytes]) -> list[AnyNotice]:
    """Parse one inbox entry; none for a kind that this version does not have (a newer peer's)."""
    if fields["k"] == b"n":
        return list(_news(fields))
    notice = _notice(fields)
    return [notice] if notice is not None else []


def _news(fields: dict[str, bytes]) -> Iterator[AnyNotice]:
    """Parse the chunks and the credit of one call of a script, in the order of its fields
    (`add_news` in `common.lua`).
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


def _notice(fields: dict[str, bytes]) -> AnyNotice | None:
    kind = text(fields["k"])
    if kind == "p":
        return PromotionNotice()
    if kind == "o":
        return next(
            (OrderNotice(order=order) for order in WORKER_ORDERS if order == text(fields["o"])),
            None,
        )
    request = RequestId(text(fields.get("r")))
    if kind == "g":
        return parse_grant(fields)
    if kind == "y":
        return TakenNotice(
            request=request, stage=StageName(text(fields["s"])), epoch=Epoch(int(fields["e"]))
        )
    if kind == "m":
        return MovedNotice(request=request, epoch=Epoch(int(fields["e"])))
    if kind == "x":
        state, code, message, param = (text(fields[name]) for name in ("s", "c", "m", "p"))
        return EndNotice(request=request, state=state, code=code, message=message, param=param)
    if kind == "f":
        return FreeNotice(request=request)
    if kind == "l":
        edge, location = EdgeName(text(fields["e"])), decode_location(fields["l"])
        return RelocationNotice(
            request=request, edge=edge, index=int(fields["i"]), location=location
        )
    if kind == "w":
        edge, index, walk = EdgeName(text(fields["e"])), int(fields["i"]), Walk(text(fields["w"]))
        return WalkNotice(request=request, edge=edge, from_index=index, walk=walk)
    return None


def parse_grant(fields: dict[str, bytes], entry: str = "") -> Grant:
    """Parse a grant of an inbox, or `entry` of a role's stream."""
    request, stage, epoch = (
        RequestId(text(fields["r"])),
        StageName(text(fields["s"])),
        Epoch(int(fields["e"])),
    )
    return Grant(
        request=request, stage=stage, epoch=epoch, entry=entry, alone=fields.get("a") == b"1"
    )
