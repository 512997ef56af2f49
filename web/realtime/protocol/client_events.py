"""Events that the client of a voice session sends, and their validation; every error is one
sentence that names the field.

Source: openai 3.54 types, GA names. Knows no session.
"""

import base64
import binascii
from typing import Annotated, Literal, get_args

import msgspec
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from fleet.core.errors import BadInput, InputTooLarge, UnsupportedValue
from web.http.json_bounds import check_json, max_keys
from web.realtime.protocol.settings import (
    FormatPatch,
    Modalities,
    OutputTokens,
    Patch,
    VoiceId,
)
from web.schema.fields.realtime import EVENTS as FIELDS
from web.schema.unserved import UnservedValue, check_part

MAX_EVENT_BYTES = 15 * 1024 * 1024
"""Size limit of an event, as in OpenAI's service. Half a minute of audio is 1.5 MB, and a client
may send a whole recording in one event.
"""
MAX_PLAIN_BYTES = 256 * 1024
"""Size limit of an event that carries no audio; the longest is a `session.update` with many tools.
"""
MAX_EVENT_VALUES = 8192
"""Limit of the JSON values in one event, which are parsed within ten milliseconds."""
MAX_TEXT = 65_536
MAX_PARTS = 16
MAX_METADATA = 16
MAX_ID = 512
BASE64_PIECE = 1024 * 1024
"""Number of base64 characters that are decoded at once; a multiple of four, so that each piece can
be decoded alone.
"""
SHOWN_CHARS = 64
"""Number of characters of a wrong value that an error shows."""
Id = Annotated[str, Field(min_length=1, max_length=MAX_ID)]


class ClientEvent(Patch):
    event_id: Annotated[str, Field(max_length=MAX_ID)] | None = None


class SessionUpdate(ClientEvent):
    """Event `session.update`. `session` is not validated here, since `session_update` validates it
    field by field.
    """

    type: Literal["session.update"]
    session: dict[str, object]


class BufferAppend(ClientEvent):
    type: Literal["input_audio_buffer.append"]
    audio: str


class BufferCommit(ClientEvent):
    type: Literal["input_audio_buffer.commit"]


class BufferClear(ClientEvent):
    type: Literal["input_audio_buffer.clear"]


class OutputClear(ClientEvent):
    """Event `output_audio_buffer.clear`, which is for WebRTC and is refused elsewhere."""

    type: Literal["output_audio_buffer.clear"]


PartKind = Literal["input_text", "input_audio", "output_text", "output_audio", "text", "audio"]


def _part_kind(kind: object) -> object:
    if kind not in get_args(PartKind):
        check_part({"type": kind})
    return kind


class PartPatch(Patch):
    type: Annotated[PartKind, BeforeValidator(_part_kind)]
    text: Annotated[str, Field(max_length=MAX_TEXT)] | None = None
    audio: str | None = None
    transcript: Annotated[str, Field(max_length=MAX_TEXT)] | None = None


def _no_mcp(kind: object) -> object:
    if isinstance(kind, str) and kind.startswith("mcp_"):
        raise UnservedValue(
            f"{kind[:SHOWN_CHARS]!r} is not served, as servers of tools (MCP) are not; call them "
            "in the client, as functions"
        )
    return kind


class ItemPatch(Patch):
    """An item that the client sends, or a reference to an item of the conversation; an
    `item_reference` is valid in `response.input` only. A `function_call` has `name` and
    `arguments`, its result (`function_call_output`) has `output`.
    """

    type: Annotated[
        Literal["message", "item_reference", "function_call", "function_call_output"],
        BeforeValidator(_no_mcp),
    ] = "message"
    id: Id | None = None
    role: Literal["user", "assistant", "system"] | None = None
    content: Annotated[list[PartPatch], Field(max_length=MAX_PARTS, fail_fast=True)] = []
    call_id: Id | None = None
    name: Annotated[str, Field(max_length=MAX_ID)] | None = None
    arguments: Annotated[str, Field(max_length=MAX_TEXT)] | None = None
    output: Annotated[str, Field(max_length=MAX_TEXT)] | None = None


class ItemCreate(ClientEvent):
    type: Literal["conversation.item.create"]
    previous_item_id: Id | None = None
    item: ItemPatch


class ItemDelete(ClientEvent):
    type: Literal["conversation.item.delete"]
    item_id: Id


class ItemRetrieve(ClientEvent):
    type: Literal["conversation.item.retrieve"]
    item_id: Id


class ItemTruncate(ClientEvent):
    type: Literal["conversation.item.truncate"]
    item_id: Id
    content_index: Annotated[int, Field(ge=0)]
    audio_end_ms: Annotated[int, Field(ge=0)]


class ResponseOutputPatch(Patch):
    format: FormatPatch | None = None
    voice: Annotated[str, Field(max_length=128)] | VoiceId | None = None


class ResponseAudioPatch(Patch):
    output: ResponseOutputPatch | None = None


class ResponsePatch(Patch):
    conversation: Literal["auto", "none"] | None = None
    input: Annotated[list[ItemPatch], Field(max_length=256, fail_fast=True)] | None = None
    instructions: Annotated[str, Field(max_length=MAX_TEXT)] | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            max_keys(MAX_METADATA),
        ]
        | None
    ) = None
    output_modalities: Modalities | None = None
    max_output_tokens: OutputTokens | None = None
    audio: ResponseAudioPatch | None = None
    tools: list[object] | None = None
    tool_choice: object = None
    parallel_tool_calls: bool | None = None
    modalities: object = None
    output_audio_format: object = None
    voice: object = None
    max_response_output_tokens: object = None


class ResponseCreate(ClientEvent):
    type: Literal["response.create"]
    response: ResponsePatch | None = None


class ResponseCancel(ClientEvent):
    type: Literal["response.cancel"]
    response_id: Id | None = None


class Played(ClientEvent):
    """Event `fleet.played`, an extension: the client reports that it has played the first `samples`
    of a response's audio. `underruns` counts the interruptions since its last report.
    """

    type: Literal["fleet.played"]
    response_id: Id
    samples: Annotated[int, Field(ge=0)]
    underruns: Annotated[int, Field(ge=0)] = 0
    buffer_ms: Annotated[float, Field(ge=0)] | None = None


AnyClientEvent = (
    SessionUpdate
    | BufferAppend
    | BufferCommit
    | BufferClear
    | OutputClear
    | ItemCreate
    | ItemDelete
    | ItemRetrieve
    | ItemTruncate
    | ResponseCreate
    | ResponseCancel
    | Played
)
_adapter: TypeAdapter[AnyClientEvent] = TypeAdapter(
    Annotated[AnyClientEvent, Field(discriminator="type")]
)


EVENTS = tuple(
    get_args(kind.model_fields["type"].annotation)[0]
    for kind in get_args(AnyClientEvent)
    if kind is not Played
)
DETECTION_KINDS = ("server_vad", "semantic_vad")
KNOWN_KINDS = " or ".join(DETECTION_KINDS)
"""Values of `turn_detection.type`, for errors; the only nested object whose `type` selects a class.
"""
PLAIN = {
    **dict.fromkeys(
        ("model_type", "model_attributes_type", "dict_type"), "this field must be an object"
    ),
    "list_type": "this field must be an array",
    "missing": "this field is required",
}
"""Error messages in terms of JSON, by pydantic's error types; pydantic's own messages name Python
classes.
"""


CARRY_AUDIO = ("input_audio_buffer.append", "conversation.item.create", "response.create")
"""Types of the events that may carry audio and be longer than `MAX_PLAIN_BYTES`."""


class _Named(msgspec.Struct):
    event_id: str | None = None


class _Typed(msgspec.Struct):
    type: str = ""


_named, _typed = msgspec.json.Decoder(_Named), msgspec.json.Decoder(_Typed)
"""Decoders of one field of an event, which skip all other fields without creating objects."""
_UNREADABLE = (msgspec.DecodeError, UnicodeEncodeError, RecursionError)


def parse_event(raw: str) -> AnyClientEvent:
    """Parse and validate an event of the client.

    Raises: BadInput, InputTooLarge, UnsupportedValue naming the field.
    """
    if len(raw) > MAX_EVENT_BYTES:
        raise InputTooLarge(
            f"an event of {len(raw)} characters; at most {MAX_EVENT_BYTES} are read, so append "
            "less at a time"
        )
    _check_values(raw)
    if len(raw) > MAX_PLAIN_BYTES:
        _check_carries_audio(raw)
    try:
        event = _adapter.validate_json(raw)
    except ValidationError as error:
        raise _bad_input(error) from error
    FIELDS[event.type].check(event)
    return event


def _check_values(raw: str) -> None:
    """Check the number of JSON values in an event. Raises: InputTooLarge."""
    check_json(raw.encode(errors="surrogatepass"), max_values=MAX_EVENT_VALUES, whole="the event")


def _check_carries_audio(raw: str) -> None:
    """Check that a long event is of a type that carries audio. Invalid JSON is accepted, since the
    parser has a better error for it.

    Raises: InputTooLarge.
    """
    try:
        kind = _typed.decode(raw).type
    except _UNREADABLE:
        return
    if kind not in CARRY_AUDIO:
        reason = (
            f"{len(raw)} characters; at most {MAX_PLAIN_BYTES} are read of an event that "
            "carries no audio"
        )
        raise InputTooLarge(f"{kind[:SHOWN_CHARS] or 'an event without a type'}: {reason}")


def event_id_of(raw: str) -> str | None:
    """Return the `event_id` of an event that may be invalid, for its error; None if the id is
    missing, too long or unreadable, or if the event has too many values to be read quickly.
    """
    try:
        if len(raw) > MAX_PLAIN_BYTES:
            _check_values(raw)
        event_id = _named.decode(raw).event_id
        return event_id if event_id is None or len(event_id) <= MAX_ID else None
    except (*_UNREADABLE, InputTooLarge):
        return None


def decode_audio(data: str, where: str) -> bytes:
    """Return the bytes of base64 audio. Decodes in pieces, so that other threads run in between.
    Raises: BadInput naming the field `where`.
    """
    last = max(0, len(data) - 1) // BASE64_PIECE * BASE64_PIECE
    if "=" in data[:last]:
        raise BadInput(f"{where}: not base64: padding before its end", param=where)
    try:
        pieces = [
            base64.b64decode(data[at : at + BASE64_PIECE], validate=True)
            for at in range(0, len(data), BASE64_PIECE)
        ]
        return b"".join(pieces)
    except (binascii.Error, ValueError) as error:
        raise BadInput(f"{where}: not base64: {error}", param=where) from error


def _bad_input(error: ValidationError) -> BadInput:
    first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return BadInput(
            f"the event is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}"
        )
    if first["loc"]:
        # The first piece is the event's type, which selected its class.
        return bad_field(error, "the event", skip=1)
    if first["type"] == "union_tag_not_found":
        return BadInput("type: this field is required", param="type")
    if first["type"] != "union_tag_invalid":
        return BadInput("the event is no JSON object")
    wrong = str(first.get("ctx", {}).get("tag"))[:SHOWN_CHARS]
    return BadInput(f"type: no event {wrong!r}; use one of {', '.join(EVENTS)}", param="type")


def bad_field(error: ValidationError, whole: str, *, skip: int = 0, within: str = "") -> BadInput:
    """Return the first validation error as a BadInput that names the field.

    `whole` names the object that was validated, and `within` the field that holds it, if any. The
    first `skip` pieces of the field's location are left out.
    """
    first = error.errors(include_url=False, include_input=False)[0]
    path = ".".join(piece for piece in (within, _path(first["loc"][skip:])) if piece)
    message = PLAIN.get(first["type"], first["msg"].removeprefix("Value error, "))
    if first["type"] == "union_tag_not_found":
        path, message = f"{path}.type", f"this field is required: {KNOWN_KINDS}"
    elif first["type"] == "union_tag_invalid":
        message = f"no such type; use {KNOWN_KINDS}"
    kind = (
        UnsupportedValue
        if isinstance(first.get("ctx", {}).get("error"), UnservedValue)
        else BadInput
    )
    return kind(f"{path or whole}: {message}", param=path or None)


def _path(loc: tuple[int | str, ...]) -> str:
    """Format a field's location, such as `item.content[0].text`, without the pieces that pydantic
    adds for unions: names of types, and `server_vad` or the like.
    """
    path = ""
    for piece in loc:
        if isinstance(piece, int):
            path += f"[{piece}]"
        elif piece.isidentifier() and piece not in ("str", "int", "VoiceId", *DETECTION_KINDS):
            path += f".{piece}" if path else piece
    return path
