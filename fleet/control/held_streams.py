"""The streams that a gateway holds, and the submissions and resumptions that have none yet. Sends
nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fleet.control.stream import ClientStream
from fleet.core.ids import RequestId


class HeldStreams:
    """Streams of one gateway by request, in the order in which they were opened. `submitting`:
    requests whose submission Redis has not confirmed. Their streams exist already, since notices
    may arrive before the reply. `on_end`: called when a stream is no longer held.
    """

    def __init__(self) -> None:
        self.streams: dict[RequestId, ClientStream] = {}
        self.submitting: set[RequestId] = set()
        self._resuming = Counter[RequestId]()
        self.on_end: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return len(self.streams)

    @property
    def requests(self) -> set[RequestId]:
        """Requests that a stream reads, or that a resumption is about to read: Redis may list them
        as this gateway's.
        """
        return {*self.streams, *self._resuming}

    def reads(self, request: RequestId) -> bool:
        return request in self.streams or request in self._resuming

    def holds(self, stream: ClientStream) -> bool:
        """Return True if `stream` is the one that reads its request's answer."""
        return self.streams.get(stream.request_id) is stream

    def add(self, stream: ClientStream) -> None:
        """Hold `stream`, in place of an earlier stream of its request, until it is closed."""
        self.streams[stream.request_id] = stream
        stream.on_close = lambda: self.remove(stream)

    def remove(self, stream: ClientStream) -> None:
        if self.holds(stream):
            del self.streams[stream.request_id]
            self.on_end()

    @contextmanager
    def submission(self, stream: ClientStream) -> Iterator[Callable[[], None]]:
        """Hold a stream while its request is submitted, and from then on. Yields a function to call
        if the submission is refused: the stream is no longer held, and an earlier stream of the
        same request is held again. An error or cancellation in the block does the same.
        """
        earlier = self.streams.get(stream.request_id)

        def end() -> None:
            self.remove(stream)
            if earlier is not None:
                self.add(earlier)

        self.add(stream)
        self.submitting.add(stream.request_id)
        try:
            yield end
        except BaseException:
            end()
            raise
        finally:
            self.submitting.discard(stream.request_id)

    @contextmanager
    def resumption(self, request: RequestId) -> Iterator[None]:
        self._resuming[request] += 1
        try:
            yield
        finally:
            self._resuming[request] -= 1
            if not self._resuming[request]:
                del self._resuming[request]
