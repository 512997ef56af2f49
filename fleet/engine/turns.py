"""What the engines whose requests take turns (codec, voice, recogniser) have in common, and two
checks that all engines make. Knows no arrays: a subclass reads the inputs and computes.
"""

from abc import abstractmethod
from collections.abc import Container
from dataclasses import dataclass
from typing import Generic, TypeVar

from fleet.core.errors import BadInput, EngineError, FleetError, OutOfPages
from fleet.core.ids import NO_WALK, RequestId, Walk
from fleet.engine.base import Arrays, Engine, EngineInput, EngineOutput, EngineRequest, EngineStats


def check_is_new(request_id: RequestId, known: Container[RequestId]) -> None:
    """Raise BadInput if a request with this id is in the loop already."""
    if request_id in known:
        raise BadInput(f"request {request_id} was submitted twice")


def check_context(num_positions: int, capacity: int, what: str) -> None:
    """Raise OutOfPages if a request takes more than `capacity` positions. `what`: text that the
    error adds after the capacity, such as ", what its KV pool holds"; may be empty.
    """
    if num_positions > capacity:
        raise OutOfPages(
            f"max_tokens: This model's maximum context length is {capacity} tokens{what}. However, "
            f"you requested {num_positions} tokens, prompt and answer. Please reduce the length of "
            "the messages or max_tokens.",
            param="max_tokens",
        )


@dataclass(slots=True, kw_only=True, eq=False)
class RequestStream:
    """State of a request. `ended`: True once its last input is fed."""

    request_id: RequestId
    walk: Walk = NO_WALK
    ended: bool = False
    paused: bool = False
    error: FleetError | None = None


StreamT = TypeVar("StreamT", bound=RequestStream)


class TurnsEngine(Engine, Generic[StreamT]):
    """Engine whose requests take turns and hold no memory beside their state."""

    def __init__(self) -> None:
        # Least recently served first.
        self._requests: dict[RequestId, StreamT] = {}

    @abstractmethod
    def _open(self, request: EngineRequest) -> StreamT:
        """Return the stream of a new request. Raises: BadInput for invalid parameters."""

    @abstractmethod
    def _read(self, stream: StreamT, arrays: Arrays) -> None:
        """Add a piece of input to a request. Raises: EngineError if it is invalid, which ends the
        request.
        """

    @abstractmethod
    def _has_work(self, stream: StreamT) -> bool:
        """Return True if a step would compute or end the request."""

    def submit(self, request: EngineRequest) -> None:
        """Add a request. Raises: BadInput if a request with this id is in the loop already, or its
        parameters are invalid.
        """
        check_is_new(request.request_id, self._requests)
        self._requests[request.request_id] = self._open(request)

    def feed(self, request_id: RequestId, piece: EngineInput) -> int:
        stream = self._requests.get(request_id)
        if stream is None:
            return 0
        assert not stream.ended, "input after the final one"
        stream.walk = piece.walk
        stream.ended = piece.final
        try:
            self._read(stream, piece.arrays)
        except EngineError as error:
            stream.error = error
        return 0

    def pause(self, request_id: RequestId, *, paused: bool) -> None:
        stream = self._requests.get(request_id)
        if stream is not None:
            stream.paused = paused

    def is_ready(self) -> bool:
        return bool(self._able())

    def finish(self, request_id: RequestId) -> None:
        self._requests.pop(request_id, None)

    def abort(self, request_id: RequestId) -> None:
        self._requests.pop(request_id, None)

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self._requests), ready=len(self._able()))

    def _able(self) -> list[StreamT]:
        """Return the requests that a step could serve, least recently served first."""
        requests = self._requests.values()
        return [stream for stream in requests if not stream.paused and self._has_work(stream)]

    def _serve(self, stream: StreamT, arrays: Arrays, *, final: bool) -> EngineOutput:
        """Return an output of a request. With `final` the request is removed, else it is served
        after all others.
        """
        del self._requests[stream.request_id]
        if not final:
            self._requests[stream.request_id] = stream
        return EngineOutput(
            request_id=stream.request_id, walk=stream.walk, arrays=arrays, final=final
        )

    def _end(self, stream: StreamT) -> EngineOutput:
        """Remove a request that has nothing left to compute; return its last output: its error, or
        an empty final output.
        """
        del self._requests[stream.request_id]
        return EngineOutput(
            request_id=stream.request_id,
            walk=stream.walk,
            final=stream.error is None,
            error=stream.error,
        )
