"""Messages between `fleet session` and a worker, to save or load the KV cache of a conversation.
Keys and values follow the messages as raw bytes.
"""

import msgspec

from fleet.core.wire_codec import WireCodec

PURPOSE = "session"
"""Purpose that `fleet session` states when it connects to a worker."""


class SessionMessage(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """Base of the messages about one conversation. `session`: internal name of the conversation."""

    session: str


class SessionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a conversation's KV cache, by which a worker decides whether it can use the
    cache.

    `num_rows`: number of positions. `layout`: dtype and sizes of a position's keys and values in
    one layer.
    """

    num_rows: int
    num_layers: int
    layout: str
    checkpoint: str
    stage: str


class SaveSession(SessionMessage, frozen=True, kw_only=True):
    """Request to a worker to send the KV cache of a conversation."""


class LoadSession(SessionMessage, frozen=True, kw_only=True):
    """Announcement of a KV cache that the worker is to load. `SessionPart`s follow, then
    `SessionEnd`.
    """

    info: SessionInfo


class SessionHead(SessionMessage, frozen=True, kw_only=True):
    """A worker's reply to `SaveSession`. `SessionPart`s follow, then `SessionEnd`."""

    info: SessionInfo


class SessionPart(SessionMessage, frozen=True, kw_only=True):
    """Announcement of one part of a KV cache, whose bytes follow. `name`: `keys` (int64, one per
    position, by which the cached prefix is compared with a prompt), `positions` (positions of
    tapped hidden states, int32), `tapped` (hidden states of the tapped layers, float32), or a
    layer's number (its keys and values).
    """

    name: str


class SessionEnd(SessionMessage, frozen=True, kw_only=True):
    """End of the transfer or of the operation. `error`, `code`: message and code of the failure; ""
    after success.
    """

    error: str = ""
    code: str = ""


AnySessionMessage = SaveSession | LoadSession | SessionHead | SessionPart | SessionEnd
_CODEC: WireCodec[AnySessionMessage] = WireCodec(AnySessionMessage, "a message about a session")
encode_session_message, decode_session_message = _CODEC.encode, _CODEC.decode
