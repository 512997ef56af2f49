"""Events of a streamed response, numbered, in the order of OpenAI's API. Knows no storage."""

from itertools import count

from msgspec import UNSET
from msgspec.structs import replace

from web.gateway.answer import Piece, TextPiece
from web.gateway.answer_calls import CallPiece
from web.http.sse import named_event
from web.openai.responses.output import OutputItem, OutputItems
from web.schema.response_items import CallItem, MessageItem, OutputText
from web.schema.response_object import (
    ArgumentsEvent,
    ContentEvent,
    ItemEvent,
    LifecycleEvent,
    ResponseObject,
)


class ResponseEvents:
    """Writer of the events of one response, which adds the pieces of the answer to `output`. An
    item begins with its first piece, and ends before the next item begins.
    """

    def __init__(self, output: OutputItems) -> None:
        self._output = output
        self._numbers = count()
        self._index = 0
        """Index of the current item among the output items; between two items, the number of items
        so far.
        """
        self._item_id = ""
        """Id of the current item; "" between two items."""

    def lifecycle(self, response: ResponseObject, name: str = "") -> bytes:
        """Return the event that the response has reached its status. `name`: name of the event; ""
        for the name of the status.
        """
        kind = f"response.{name or response.status}"
        number = next(self._numbers)
        return named_event(
            kind, LifecycleEvent(type=kind, sequence_number=number, response=response)
        )

    def add(self, piece: Piece) -> bytes:
        """Add the next piece of the answer; return its events."""
        if isinstance(piece, TextPiece):
            lines = self._begin_message() if not self._item_id else b""
            self._output.add(piece)
            return lines + self._content("output_text.delta", delta=piece.text)
        if not isinstance(piece, CallPiece):
            return b""
        lines = self._end_item() if piece.name else b""
        self._output.add(piece)
        if piece.name:
            lines += self._begin_call()
        if piece.arguments:
            lines += self._arguments("delta", delta=piece.arguments)
        return lines + (self._end_item() if piece.is_last else b"")

    def finish(self, *, is_cut: bool) -> bytes:
        """Return the events after the last piece. `is_cut`: the answer reached its limit."""
        is_empty = not self._index and not self._item_id
        return (self._begin_message() if is_empty else b"") + self._end_item(is_cut=is_cut)

    def _begin_message(self) -> bytes:
        item = self._output.message(is_cut=False)
        self._item_id = item.id
        begun = replace(item, status="in_progress", content=[])
        return self._item("added", begun) + self._content(
            "content_part.added", part=OutputText(text="")
        )

    def _begin_call(self) -> bytes:
        item = self._output.last(is_cut=False)
        assert isinstance(item, CallItem)
        self._item_id = item.id
        return self._item("added", replace(item, status="in_progress", arguments=""))

    def _end_item(self, *, is_cut: bool = False) -> bytes:
        """Return the events at the end of the current item; none between two items."""
        if not self._item_id:
            return b""
        item = self._output.last(is_cut=is_cut)
        lines = self._end_message(item) if isinstance(item, MessageItem) else self._end_call(item)
        lines += self._item("done", item)
        self._index, self._item_id = self._index + 1, ""
        return lines

    def _end_message(self, item: MessageItem) -> bytes:
        (part,) = item.content
        assert isinstance(part, OutputText)
        return self._content("output_text.done", text=part.text) + self._content(
            "content_part.done", part=part
        )

    def _end_call(self, item: CallItem) -> bytes:
        return self._arguments("done", arguments=item.arguments)

    def _item(self, name: str, item: OutputItem) -> bytes:
        kind = f"response.output_item.{name}"
        number = next(self._numbers)
        event = ItemEvent(type=kind, sequence_number=number, output_index=self._index, item=item)
        return named_event(kind, event)

    def _arguments(
        self, name: str, *, delta: str | None = None, arguments: str | None = None
    ) -> bytes:
        kind = f"response.function_call_arguments.{name}"
        event = ArgumentsEvent(
            type=kind,
            sequence_number=next(self._numbers),
            item_id=self._item_id,
            output_index=self._index,
            delta=UNSET if delta is None else delta,
            arguments=UNSET if arguments is None else arguments,
        )
        return named_event(kind, event)

    def _content(
        self,
        name: str,
        *,
        part: OutputText | None = None,
        delta: str | None = None,
        text: str | None = None,
    ) -> bytes:
        kind = f"response.{name}"
        event = ContentEvent(
            type=kind,
            sequence_number=next(self._numbers),
            item_id=self._item_id,
            output_index=self._index,
            part=UNSET if part is None else part,
            delta=UNSET if delta is None else delta,
            text=UNSET if text is None else text,
            logprobs=UNSET if part is not None else [],
        )
        return named_event(kind, event)
