"""A client that survives the loss of its gateway: it resumes its answer at the next gateway with
`Last-Event-ID`.

The client uses only what any API client has: gateway addresses, response headers and event ids.
"""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fleet.lab.client.chat import Piece
from fleet.lab.client.client import ApiClient
from fleet.lab.client.errors import ApiRefused, ApiSilent, ApiUnreachable
from fleet.lab.client.transport import TIMEOUT_S, OpenResponse

UNREACHABLE_S = 30.0
"""Time for which a client keeps trying while no gateway serves."""
NOT_FOUND, FULL, UNAVAILABLE = 404, 429, 503
"""HTTP statuses: unknown request; no place for another request in the fleet, for example beside
many slow readers; gateway that cannot serve yet, for example while Redis is away. The Retry-After
header of the last two says when to retry.
"""
RETRY_S, MAX_RETRY_S = 0.1, 2.0
"""Default pause before the next try, and upper limit of the pause that a gateway asks for."""
BLANK, ID, STOPPING = b"\n\n", b"id: ", b'"code":"gateway_stopping"'


@dataclass(slots=True)
class ResumableStream:
    """The recorded stream of one answer, received over one or more connections.

    `gateway_changes`: number of gateways lost during the answer. `refusals`: number of refused
    tries, each followed by another try. `silent`: connections that timed out; closing such a
    connection would cancel the request, so they are closed once another gateway has the answer.
    Units: `sent_s`, and `reached_s` (when a gateway last sent something), on `time.perf_counter`;
    times in the pieces count from `sent_s`.
    """

    sent_s: float
    reached_s: float

    pieces: list[Piece] = field(default_factory=list[Piece])
    request_id: str = ""
    last_id: str = ""
    gateway_changes: int = 0
    refusals: int = 0
    silent: list[ApiSilent] = field(default_factory=list[ApiSilent])

    def close_silent(self) -> None:
        while self.silent:
            self.silent.pop().close()

    def is_interrupted(self) -> bool:
        """Return True if the last event says that the gateway stops before the answer's end."""
        return any(STOPPING in event for event in self._events()[-1:])

    def drop_incomplete(self) -> None:
        """Drop an incomplete last event, which the next gateway sends again, and the event that
        announces the gateway's stop. Set `last_id` to the id of the last remaining event.
        """
        whole = [event for event in self._events() if STOPPING not in event]
        surplus = sum(len(piece) for _, piece in self.pieces) - sum(
            len(event) + len(BLANK) for event in whole
        )
        while surplus:
            at_s, piece = self.pieces.pop()
            rest = piece[: max(0, len(piece) - surplus)]
            surplus -= len(piece) - len(rest)
            if rest:
                self.pieces.append((at_s, rest))
        ids = [
            line.removeprefix(ID)
            for event in whole
            for line in event.split(b"\n")
            if line.startswith(ID)
        ]
        self.last_id = ids[-1].decode() if ids else ""

    def _events(self) -> list[bytes]:
        """Return the complete server-sent events received, without the blank line at their end."""
        return b"".join(piece for _, piece in self.pieces).split(BLANK)[:-1]


class Gateways:
    """Client of all gateways of a fleet; successive answers begin at successive gateways.
    Thread-safe.

    `silence_s`: read time-out of a connection, needed since a frozen gateway does not break its
    connections; None for the default of ten minutes.
    """

    def __init__(
        self, urls: Sequence[str], api_key: str | None = None, silence_s: float | None = None
    ) -> None:
        self._apis = [ApiClient(url, api_key) for url in urls]
        self._timeout_s = silence_s or TIMEOUT_S
        self._turns = itertools.count()

    def receive(
        self, body: bytes, is_cancelled: Callable[[], bool], request_id: str = ""
    ) -> ResumableStream:
        """Request an answer and receive it to its end. With `request_id`, send no request: receive
        the answer of that earlier request once more from its beginning.

        Once `is_cancelled()` is True, return the part received so far. Raises: ApiError in one line
        if the request is refused, or no gateway can be reached.
        """
        now_s = time.perf_counter()
        stream = ResumableStream(sent_s=now_s, reached_s=now_s, request_id=request_id)
        try:
            self._try_gateways(body, stream, is_cancelled)
        finally:
            stream.close_silent()
        return stream

    def _try_gateways(
        self, body: bytes, stream: ResumableStream, is_cancelled: Callable[[], bool]
    ) -> None:
        """Read the answer from one gateway after another, until its last event has arrived.

        If a gateway cannot be reached, or answers `FULL` or `UNAVAILABLE`, the next gateway is
        tried: for `UNREACHABLE_S` at most, except while the fleet is full.
        """
        turn, pause = next(self._turns), threading.Event()
        while True:
            before_s = stream.reached_s
            try:
                self._read(self._apis[turn % len(self._apis)], body, stream, is_cancelled)
                return
            except ApiUnreachable as error:
                if isinstance(error, ApiSilent):
                    stream.silent.append(error)
                if self._is_late(stream) or is_cancelled():
                    raise ApiUnreachable(f"no gateway could be reached: {error}") from error
                stream.gateway_changes += bool(stream.request_id)
                stream.drop_incomplete()
                pause_s = RETRY_S if stream.reached_s == before_s else 0
            except ApiRefused as error:
                # Redis may have lost a request whose gateway is silent meanwhile, and submits it
                # again.
                is_lost = error.http_status == NOT_FOUND and bool(stream.silent)
                if error.http_status == FULL:
                    stream.reached_s = time.perf_counter()
                if (
                    not (error.http_status in (FULL, UNAVAILABLE) or is_lost)
                    or self._is_late(stream)
                    or is_cancelled()
                ):
                    raise
                stream.refusals += 1
                pause_s = min(error.retry_after_s or RETRY_S, MAX_RETRY_S)
            turn += 1
            pause.wait(pause_s)

    @staticmethod
    def _is_late(stream: ResumableStream) -> bool:
        return time.perf_counter() - stream.reached_s > UNREACHABLE_S

    def _read(
        self, api: ApiClient, body: bytes, stream: ResumableStream, is_cancelled: Callable[[], bool]
    ) -> None:
        """Read from one connection until it ends: a new answer, or the rest of an answer that has
        begun. Raises: ApiRefused, ApiUnreachable, ApiSilent.
        """
        response = self._open(api, body, stream)
        stream.close_silent()
        stream.request_id = stream.request_id or response.request_id
        stream.reached_s = time.perf_counter()
        while (piece := self._read_piece(response)) and not is_cancelled():
            stream.reached_s = time.perf_counter()
            stream.pieces.append((stream.reached_s - stream.sent_s, piece))
        response.close()
        if stream.is_interrupted():
            raise ApiUnreachable(f"the gateway at {api.url} stops")

    def _read_piece(self, response: OpenResponse) -> bytes:
        return response.read()

    def _open(self, api: ApiClient, body: bytes, stream: ResumableStream) -> OpenResponse:
        if stream.request_id:
            return api.resume_chat(stream.request_id, stream.last_id, timeout_s=self._timeout_s)
        return api.open_chat(body, timeout_s=self._timeout_s)
