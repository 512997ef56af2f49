"""Conversations of stored responses: what a new response continues from, and its record.

Knows no HTTP and no stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from fleet.core.errors import InputTooLarge, NotFound, UnsupportedValue, quoted
from fleet.processing import Message, TextPart
from web.gateway.gateway import Gateway
from web.schema.response_body import TextResponseBody
from web.schema.response_items import MessageItem, message_of, num_chars
from web.schema.response_object import ResponseObject

MAX_STORED_CHARS = 2 * 1024 * 1024
"""Longest conversation that is stored, in characters of text and of audio in base64."""


class ResponseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of a response: its input, all earlier items of its conversation, and the id of that
    conversation's first response. Deleting an earlier response takes nothing from it.
    """

    response: ResponseObject
    items: list[MessageItem]
    earlier: list[MessageItem]
    first_id: str

    @property
    def conversation(self) -> list[MessageItem]:
        """The items that a response which continues from this one sees first."""
        return [*self.earlier, *self.items, *self.response.output]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ResponseRecord).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseTurn:
    """Input of a new response within its conversation. `owner`: digest of the client's key.
    `first_id`: first response of the conversation; "" if this is the first one. `is_stored`: True
    if the response is to be stored.
    """

    owner: str
    items: list[MessageItem]
    earlier: list[MessageItem]
    first_id: str
    is_stored: bool
    warnings: tuple[str, ...] = ()

    def messages(self, body: TextResponseBody) -> tuple[Message, ...]:
        """Return the whole conversation as messages of a chat, the instructions first."""
        places = [f"input[{index}].content" for index in range(len(self.items))]
        if isinstance(body.input, str):
            places = ["input"]
        given = body.instructions
        return (
            *(
                [Message(role="system", content=TextPart(text=given, where="instructions"))]
                if given
                else []
            ),
            *(message_of(item, "previous_response_id") for item in self.earlier),
            *(message_of(item, place) for item, place in zip(self.items, places, strict=True)),
        )


async def begin_turn(
    gateway: Gateway, body: TextResponseBody, owner: str, shown: str
) -> ResponseTurn:
    """Read the conversation that a request continues, and decide if its response is stored.
    `shown`: suffix of the ids of the request's items.

    Raises: NotFound, InputTooLarge, UnsupportedValue naming the field; RedisUnreachable.
    """
    gateway.check_num_messages(len(body.messages), "input")
    before = None
    if body.previous_response_id is not None:
        where = "previous_response_id"
        before = await load_response(gateway, body.previous_response_id, owner, where)
    items = [one.item(f"msg_{shown}_{index}") for index, one in enumerate(body.messages)]
    earlier = before.conversation if before is not None else []
    gateway.check_num_messages(len(earlier) + len(items), "input")
    is_stored, warnings = _may_store(gateway, body, [*earlier, *items])
    return ResponseTurn(
        owner=owner,
        items=items,
        earlier=earlier,
        first_id=before.first_id if before is not None else "",
        is_stored=is_stored,
        warnings=warnings,
    )


def _may_store(
    gateway: Gateway, body: TextResponseBody, items: Sequence[MessageItem]
) -> tuple[bool, tuple[str, ...]]:
    """Return whether a response is stored, and the warnings if it is not although it would be by
    default. Raises: InputTooLarge, UnsupportedValue if the request asks for what is impossible.
    """
    if body.store is False:
        return False, ()
    if not gateway.config.web.response_retention_s:
        reason = "this server stores no responses (web.response_retention_s is 0)"
        if body.store:
            raise UnsupportedValue(f"store: {reason}; send false", param="store")
        return False, ()
    if num_chars(items) > MAX_STORED_CHARS:
        reason = f"a conversation of more than {MAX_STORED_CHARS} characters is not stored"
        if body.store:
            raise InputTooLarge(f"store: {reason}; send false", param="store")
        return False, (f"store: false: {reason}",)
    return True, ()


async def load_response(
    gateway: Gateway, response_id: str, owner: str, where: str = "response_id"
) -> ResponseRecord:
    """Return a stored response of `owner`. Raises: NotFound naming the field `where`;
    RedisUnreachable.
    """
    record = await gateway.client.responses.load(response_id, owner)
    if record is None:
        raise response_not_found(response_id, where)
    return _decode(record)


def response_not_found(response_id: str, where: str = "response_id") -> NotFound:
    reason = "it is unknown, was not stored, has expired, or belongs to another key"
    return NotFound(f"{where}: no response {quoted(response_id)}: {reason}", param=where)


async def save_response(gateway: Gateway, turn: ResponseTurn, response: ResponseObject) -> None:
    """Store an ended response, if its request allows it. Raises: RedisUnreachable."""
    if turn.is_stored:
        record = ResponseRecord(
            response=response,
            items=turn.items,
            earlier=turn.earlier,
            first_id=turn.first_id or response.id,
        )
        await gateway.client.responses.save(response.id, turn.owner, _encode(record))
