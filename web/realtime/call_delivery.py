"""Delivery of the function calls of one response: their events, as the calls arrive. Knows no text
and no audio.
"""

from web.gateway.answer_calls import CollectedCall
from web.realtime.context import SessionContext
from web.realtime.conversation import Item
from web.realtime.protocol import server_events as server


class CallDelivery:
    """Sender of the events of one response's function calls. The ids of the items are made from the
    ids of the calls, so that a client that receives a call again, from another gateway, recognises
    the call.

    `in_conversation`: True if the calls become items of the conversation.
    """

    def __init__(self, context: SessionContext, response_id: str, *, in_conversation: bool) -> None:
        self.items: list[Item] = []
        self._earlier: list[Item] = []
        """Calls whose events the client received before this gateway continued the response."""
        self._context, self._conversation = context, context.conversation
        self._response_id, self._in_conversation = response_id, in_conversation
        self._first_index = 0
        self._resends = False

    def resend(self) -> None:
        """Make later calls of `send` repeat the events of function calls that have no result yet,
        since the client may have lost those events.
        """
        self._resends = True

    def is_behind(self, calls: list[CollectedCall]) -> bool:
        """Return True if a part of `calls` has not been sent."""
        return len(self.items) < len(calls) or any(
            item.status == "in_progress" and (call.is_whole or len(item.text) < len(call.arguments))
            for item, call in zip(self.items, calls, strict=False)
        )

    def send(self, calls: list[CollectedCall], first_index: int) -> bool:
        """Send the events of what is new in the response's calls; return False if nothing is new.
        `first_index`: number of the first call among the outputs of the response, used when the
        first call is sent.
        """
        if not self.is_behind(calls):
            return False
        self._first_index = first_index if not self.items else self._first_index
        for number, call in enumerate(calls):
            if number == len(self.items):
                self.items.append(self._open(call, number))
            item = self.items[number]
            if item.status != "in_progress":
                continue
            if delta := call.arguments[len(item.text) :]:
                item.text = call.arguments
                self._context.send(
                    server.ArgumentsDelta(
                        response_id=self._response_id,
                        item_id=item.id,
                        output_index=self._first_index + number,
                        call_id=item.call_id,
                        delta=delta,
                    )
                )
            if call.is_whole:
                self._close(item, number, is_whole=True)
        return True

    def cut(self) -> None:
        """Send the last events of the calls in progress, which become `incomplete`, since the
        response has ended.
        """
        for number, item in enumerate(self.items):
            if item.status == "in_progress":
                self._close(item, number, is_whole=False)

    def bodies(self) -> list[server.AnyItemBody]:
        """Return the calls of the response in the form that clients receive, without calls that
        were complete before this gateway continued the response.
        """
        own = [item for item in self.items if not any(item is one for one in self._earlier)]
        return [self._conversation.body(item) for item in own]

    def _open(self, call: CollectedCall, number: int) -> Item:
        known = self._conversation.find_call(call.id) if self._in_conversation else None
        if known is not None and known.status == "completed" and not self._is_due_again(known):
            self._earlier.append(known)
            return known
        item = known or Item(
            id=f"item_{call.id.removeprefix('call_')}",
            role="assistant",
            kind="function_call",
            call_id=call.id,
            name=call.name,
        )
        item.status, item.text = "in_progress", ""
        body = self._conversation.body(item)
        self._context.send(
            server.OutputItemAdded(
                response_id=self._response_id,
                output_index=self._first_index + number,
                item=body,
            )
        )
        if self._in_conversation and known is None:
            previous = self._conversation.last_id
            removed = self._conversation.add(item)
            self._context.send(server.ItemAdded(previous_item_id=previous, item=body))
            for item_id in removed:
                self._context.send(server.ItemDeleted(item_id=item_id))
        return item

    def _is_due_again(self, item: Item) -> bool:
        result = self._conversation.find_call(item.call_id, "function_call_output")
        return self._resends and result is None

    def _close(self, item: Item, number: int, *, is_whole: bool) -> None:
        """Send the last events of a call. A call that was cut has no part in later prompts."""
        item.status = "completed" if is_whole else "incomplete"
        index = self._first_index + number
        self._context.send(
            server.ArgumentsDone(
                response_id=self._response_id,
                item_id=item.id,
                output_index=index,
                call_id=item.call_id,
                name=item.name,
                arguments=item.text,
            )
        )
        body = self._conversation.body(item)
        self._context.send(
            server.OutputItemDone(response_id=self._response_id, output_index=index, item=body)
        )
        if self._in_conversation and self._conversation.holds(item):
            previous = self._conversation.previous(item.id)
            self._context.send(server.ItemDone(previous_item_id=previous, item=body))
            self._conversation.version += 1
