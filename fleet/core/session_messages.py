"""Messages between `fleet session` and the worker that caches a conversation; keys and values
follow as raw bytes.
"""

import msgspec

from fleet.core.wire_codec import WireCodec

PURPOSE = "session"
"""Purpose of the connection to a worker."""


class SessionMessage(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """Base of the messages. `session`: internal name of the conversation."""

    session: str


class SessionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Description of the cached keys and values of a conversation, by which a worker decides if it
    can use them.

    `num_rows`: number of positions. `layout`: dtype and sizes of a position's keys and values in
    one layer.
    """

    num_rows: int
    num_layers: int
    layout: str
    checkpoint: str
    stage: str


class SaveSession(SessionMessage, frozen=True, kw_only=True):
    """Order to send the cached keys and values."""


class LoadSession(SessionMessage, frozen=True, kw_only=True):
    """Announcement of keys and values: `SessionPart`s follow, then `SessionEnd`."""

    info: SessionInfo


class SessionHead(SessionMessage, frozen=True, kw_only=True):
    """Answer to `SaveSession`: parts follow, then `SessionEnd`."""

    info: SessionInfo


class SessionPart(SessionMessage, frozen=True, kw_only=True):
    """Announcement of one part: `keys` (int64), `positions` (int32), hidden states of the tapped
    layers (`tapped`, float32), or a layer by its number.
    """

    name: str


class SessionEnd(SessionMessage, frozen=True, kw_only=True):
    """End of the parts, or of the operation. `error`, `code`: cause of a failure, "" if it
    succeeded.
    """

    error: str = ""
    code: str = ""


AnySessionMessage = SaveSession | LoadSession | SessionHead | SessionPart | SessionEnd
_CODEC: WireCodec[AnySessionMessage] = WireCodec(AnySessionMessage, "a message about a session")
encode_session_message, decode_session_message = _CODEC.encode, _CODEC.decode
