"""The output of a response as its answer arrives: a message, then function calls. Knows no
stream.
"""

from web.gateway.answer import Piece, TextPiece
from web.gateway.answer_calls import CallPiece, CollectedCall, collect
from web.schema.response_items import CallItem, ItemStatus, MessageItem, OutputText

OutputItem = MessageItem | CallItem


class OutputItems:
    """The output items of one response. `suffix`: end of the message's id. The id of a call's item
    is made from the id of the call.
    """

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._texts: list[str] = []
        self._calls: list[CollectedCall] = []

    def add(self, piece: Piece) -> None:
        """Add the next piece of the answer."""
        if isinstance(piece, TextPiece):
            self._texts.append(piece.text)
        elif isinstance(piece, CallPiece):
            collect(self._calls, piece)

    def items(self, *, is_cut: bool) -> list[OutputItem]:
        """Return the items of the whole answer. There is a message unless the answer only calls
        functions. `is_cut`: the answer reached its limit.
        """
        calls = [_call_item(call) for call in self._calls]
        has_message = bool(self._texts) or not calls
        return [*([self.message(is_cut=is_cut)] if has_message else []), *calls]

    def last(self, *, is_cut: bool) -> OutputItem:
        """Return the item to which the last piece belongs."""
        return _call_item(self._calls[-1]) if self._calls else self.message(is_cut=is_cut)

    def message(self, *, is_cut: bool) -> MessageItem:
        """Return the message. If calls follow, it is complete even in an answer that was cut."""
        status: ItemStatus = "incomplete" if is_cut and not self._calls else "completed"
        part = OutputText(text="".join(self._texts))
        return MessageItem(
            id=f"msg_{self._suffix}", status=status, role="assistant", content=[part]
        )


def _call_item(call: CollectedCall) -> CallItem:
    return CallItem(
        id=f"fc_{call.id.removeprefix('call_')}",
        call_id=call.id,
        name=call.name,
        arguments=call.arguments,
        status="completed" if call.is_whole else "incomplete",
    )
