"""Function calls of an answer as pieces for the client. Knows no route."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from fleet.core.ids import call_id
from fleet.core.request import RequestSpec
from fleet.processing.tool_calls.parser import (
    CallArguments,
    CallBegun,
    CallEnded,
    CallEvent,
    CallParser,
    Said,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPiece:
    """Piece of a function call. `index`: number of the call in the answer, from 0. The first piece
    of a call has its `id` and `name`; further pieces have parts of its `arguments`, a JSON text;
    the last piece is empty and has `is_last` set. A call that was cut has no last piece.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
    is_last: bool = False

    @property
    def num_chars(self) -> int:
        """Number of characters by which the piece advances a `Position`; the first piece of a call
        counts as one character.
        """
        return 1 if self.name else len(self.arguments)

    def without(self, num_chars: int) -> "CallPiece | None":
        """Return the piece without its first `num_chars` characters; None if nothing is left."""
        if num_chars >= self.num_chars and not self.is_last:
            return None
        return replace(self, arguments=self.arguments[num_chars:])


class AnswerCalls:
    """Parser of the function calls in one answer. `num_calls`: number of calls that have begun."""

    def __init__(self, spec: RequestSpec) -> None:
        self._request = spec.id
        self._parser = CallParser(spec.tools) if spec.tools is not None else None

    @property
    def num_calls(self) -> int:
        return self._parser.num_calls if self._parser is not None else 0

    def add(self, text: str, *, is_whole: bool = False) -> Iterable[str | CallPiece]:
        """Add the next text of the answer; return the text and the calls that no later text can
        change. `is_whole`: True if `text` is the end of the answer, after which nothing is held
        back.
        """
        if self._parser is None:
            return [text] if text else []
        events = self._parser.add(text) if text else []
        if is_whole:
            events += self._parser.finish()
        return [self._piece(event) for event in events]

    def _piece(self, event: CallEvent) -> str | CallPiece:
        match event:
            case Said(text):
                return text
            case CallBegun(index, name):
                return CallPiece(index=index, id=call_id(self._request, index), name=name)
            case CallArguments(index, text):
                return CallPiece(index=index, arguments=text)
            case CallEnded(index):
                return CallPiece(index=index, is_last=True)


@dataclass(slots=True, kw_only=True)
class CollectedCall:
    """A call of an answer, as far as it has arrived. `is_whole`: True once the arguments are
    complete.
    """

    id: str
    name: str
    arguments: str = ""
    is_whole: bool = False


def collect(calls: list[CollectedCall], piece: CallPiece) -> None:
    """Add the next piece of an answer's calls to `calls`."""
    if piece.name:
        calls.append(CollectedCall(id=piece.id, name=piece.name))
    call = calls[piece.index]
    call.arguments += piece.arguments
    call.is_whole = call.is_whole or piece.is_last
