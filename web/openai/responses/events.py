"""Events of a streamed response, numbered, in the order of OpenAI's API. Knows no storage."""

from itertools import count

from msgspec import UNSET

from web.http.sse import named_event
from web.schema.response_items import MessageItem, OutputText
from web.schema.response_object import ContentEvent, ItemEvent, LifecycleEvent, ResponseObject


class ResponseEvents:
    """Writer of the events of one response, whose only output is a message of one text."""

    def __init__(self, item_id: str) -> None:
        self._item_id = item_id
        self._numbers = count()

    def lifecycle(self, response: ResponseObject, name: str = "") -> bytes:
        """Return the event that the response has reached its status; `name` is another name of
        it.
        """
        kind = f"response.{name or response.status}"
        number = next(self._numbers)
        return named_event(
            kind, LifecycleEvent(type=kind, sequence_number=number, response=response)
        )

    def begin_text(self) -> bytes:
        """Return the events before the first text."""
        item = MessageItem(id=self._item_id, status="in_progress", role="assistant", content=[])
        return self._item("added", item) + self._content(
            "content_part.added", part=OutputText(text="")
        )

    def delta(self, text: str) -> bytes:
        return self._content("output_text.delta", delta=text)

    def end_text(self, item: MessageItem, text: str) -> bytes:
        """Return the events after the last text. `item`: the message with the whole `text`."""
        return (
            self._content("output_text.done", text=text)
            + self._content("content_part.done", part=OutputText(text=text))
            + self._item("done", item)
        )

    def _item(self, name: str, item: MessageItem) -> bytes:
        kind = f"response.output_item.{name}"
        return named_event(
            kind, ItemEvent(type=kind, sequence_number=next(self._numbers), item=item)
        )

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
            part=UNSET if part is None else part,
            delta=UNSET if delta is None else delta,
            text=UNSET if text is None else text,
            logprobs=UNSET if part is not None else [],
        )
        return named_event(kind, event)
