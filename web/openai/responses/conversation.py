"""Conversations of stored responses: what a new response continues from, and its record.

Knows no HTTP and no stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from fleet.core.errors import BadInput, InputTooLarge, NotFound, UnsupportedValue, quoted
from fleet.processing import Message, TextPart
from web.gateway.gateway import Gateway
from web.gateway.tool_requests import unread_call
from web.schema.response_body import TextResponseBody
from web.schema.response_items import (
    CallItem,
    CallOutputItem,
    MessageItem,
    PlacedItem,
    ResponseItem,
    messages_of,
    num_chars,
)
from web.schema.response_object import ResponseObject

MAX_STORED_CHARS = 2 * 1024 * 1024
"""Longest conversation that is stored, in characters of text and of audio in base64."""


class ResponseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of a response: its input, all earlier items of its conversation, and the id of that
    conversation's first response. The record stays complete when earlier responses are deleted.
    """

    response: ResponseObject
    items: list[ResponseItem]
    earlier: list[ResponseItem]
    first_id: str

    @property
    def conversation(self) -> list[ResponseItem]:
        """Conversation up to and including this response, as a continuing response sees it."""
        return [*self.earlier, *self.items, *self.response.output]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ResponseRecord).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseTurn:
    """Input of a new response within its conversation. `owner`: digest of the client's key
    (`owner_of`). `placed`: items of the input that are new to the conversation, each with its field
    for errors. `first_id`: id of the conversation's first response; "" if the new response is the
    first. `is_stored`: True if the response is to be stored.
    """

    owner: str
    placed: list[PlacedItem]
    earlier: list[ResponseItem]
    first_id: str
    is_stored: bool
    warnings: tuple[str, ...] = ()

    def messages(self, body: TextResponseBody) -> tuple[Message, ...]:
        """Return the whole conversation as messages of a chat, the instructions first."""
        given = body.instructions
        first = TextPart(text=given or "", where="instructions")
        earlier = [PlacedItem(item, "previous_response_id") for item in self.earlier]
        return (
            *([Message(role="system", content=first)] if given else []),
            *messages_of([*earlier, *self.placed]),
        )

    @property
    def items(self) -> list[ResponseItem]:
        return [placed.item for placed in self.placed]


async def begin_turn(
    gateway: Gateway, body: TextResponseBody, owner: str, shown: str
) -> ResponseTurn:
    """Read the conversation that a request continues, and decide if its response is stored.
    `shown`: suffix of the ids of the request's items.

    Raises: NotFound, BadInput, InputTooLarge, UnsupportedValue naming the field; RedisUnreachable.
    """
    gateway.check_num_messages(len(body.items), "input")
    before = None
    if body.previous_response_id is not None:
        where = "previous_response_id"
        before = await load_response(gateway, body.previous_response_id, owner, where)
    items = [one.item(f"{shown}_{index}") for index, one in enumerate(body.items)]
    earlier = before.conversation if before is not None else []
    gateway.check_num_messages(len(earlier) + len(items), "input")
    placed = placed_items(gateway, earlier, items, is_text=isinstance(body.input, str))
    is_stored, warnings = _may_store(gateway, body, [*earlier, *items])
    return ResponseTurn(
        owner=owner,
        placed=placed,
        earlier=earlier,
        first_id=before.first_id if before is not None else "",
        is_stored=is_stored,
        warnings=warnings,
    )


def placed_items(
    gateway: Gateway,
    earlier: Sequence[ResponseItem],
    items: Sequence[ResponseItem],
    *,
    is_text: bool,
) -> list[PlacedItem]:
    """Return the items of an input that are new to the conversation. A call or an output that is
    sent again counts once. `is_text`: the input is a text instead of a list.

    Raises: BadInput for an output without a call before it, for another call or output under a
    known id, or for a control token in a call; UnsupportedValue if the model calls no functions.
    """
    if not gateway.call_format:
        _refuse_calls(earlier, items)
    for index, item in enumerate(items):
        _check_texts(gateway, item, f"input[{index}]")
    known: dict[tuple[type[ResponseItem], str], tuple[str, str]] = {}
    new: list[PlacedItem] = []
    for index, item in enumerate([*earlier, *items], -len(earlier)):
        where = f"input[{index}]"
        if isinstance(item, MessageItem):
            field = "content"
        else:
            field = "arguments" if isinstance(item, CallItem) else "output"
            if not _adds_call(item, known, f"{where}.call_id"):
                continue
        if index >= 0:
            new.append(PlacedItem(item, "input" if is_text else f"{where}.{field}"))
    return new


def _adds_call(
    item: CallItem | CallOutputItem,
    known: dict[tuple[type[ResponseItem], str], tuple[str, str]],
    where: str,
) -> bool:
    """Return True if a call, or the output of a call, is new. A new item is added to `known`,
    unless the item is a call that was cut. `where`: name of the item's `call_id` field, for errors.
    Raises: BadInput.
    """
    shown = quoted(item.call_id)
    is_call = isinstance(item, CallItem)
    if not is_call and (CallItem, item.call_id) not in known:
        reason = f"no complete call {shown} before this output; send the call before it"
        other = "continue the response that has it by previous_response_id"
        raise BadInput(f"{where}: {reason}, or {other}", param=where)
    content = (item.name, item.arguments) if is_call else ("", item.text)
    before = known.get((type(item), item.call_id))
    if before is None:
        if not is_call or not item.is_cut:
            known[type(item), item.call_id] = content
        return True
    if before != content:
        what = "a call" if is_call else "an output of the call"
        reason = f"there is {what} {shown} already, with other contents; remove one of them"
        raise BadInput(f"{where}: {reason}", param=where)
    return False


def _refuse_calls(earlier: Sequence[ResponseItem], items: Sequence[ResponseItem]) -> None:
    """Check that there are no calls or outputs, for a model that calls no functions. Raises:
    UnsupportedValue naming the field.
    """
    places = ["previous_response_id"] * len(earlier)
    places += [f"input[{index}].type" for index in range(len(items))]
    for item, where in zip([*earlier, *items], places, strict=True):
        if not isinstance(item, MessageItem):
            raise unread_call(where, is_result=isinstance(item, CallOutputItem))


def _check_texts(gateway: Gateway, item: ResponseItem, where: str) -> None:
    """Check that the texts of a call hold no control token. Raises: BadInput."""
    if isinstance(item, CallItem):
        texts = {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
        for name, text in texts.items():
            gateway.frontend.check_text(TextPart(text=text, where=f"{where}.{name}"))


def _may_store(
    gateway: Gateway, body: TextResponseBody, items: Sequence[ResponseItem]
) -> tuple[bool, tuple[str, ...]]:
    """Return whether a response is stored, and a warning if the conversation is too long for that.
    Raises: InputTooLarge, UnsupportedValue if the request asks for storage that is impossible.
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
    """Store an ended response if `turn.is_stored`. Raises: RedisUnreachable."""
    if turn.is_stored:
        record = ResponseRecord(
            response=response,
            items=turn.items,
            earlier=turn.earlier,
            first_id=turn.first_id or response.id,
        )
        await gateway.client.responses.save(response.id, turn.owner, _encode(record))
