"""Function calls in the shapes of chat completions."""

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from web.gateway.answer_calls import CallPiece, CollectedCall
from web.schema.responses import AnswerCall, CallDelta, CalledFunction, Delta


def call_delta(piece: CallPiece) -> Delta:
    """Return the streamed delta with one piece of a function call."""
    function = CalledFunction(name=piece.name or UNSET, arguments=piece.arguments)
    kind = "function" if piece.name else UNSET
    call = CallDelta(index=piece.index, id=piece.id or UNSET, type=kind, function=function)
    return Delta(tool_calls=[call])


def answer_calls(calls: Sequence[CollectedCall]) -> list[AnswerCall] | UnsetType:
    """Return the calls of a whole answer; UNSET if there are none."""
    return [
        AnswerCall(id=each.id, function=CalledFunction(name=each.name, arguments=each.arguments))
        for each in calls
    ] or UNSET
