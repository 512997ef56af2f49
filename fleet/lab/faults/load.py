"""Load of a chaos run: the same requests in rounds, a fixed number at a time, each answer compared
with a reference answer.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import msgspec

from fleet.lab.client.errors import ApiError, ApiRefused
from fleet.lab.faults.answer import Difference, ReceivedAnswer, first_difference, read_answer
from fleet.lab.faults.client_threads import ClientThreads
from fleet.lab.faults.clients import NOT_FOUND, Gateways, ResumableStream

STALLED_S = 300.0
"""Time without any answer after which the open requests count as lost: ten times the wait for a
role without a worker.
"""
POLL_S = 0.05


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A request of the load and how it ended for its client.

    `lost`: reason why the request was not completely answered, else "". `id`: the fleet's request
    id. `request`: index of the request body. `gateway_changes`: number of gateways lost during the
    answer. `refusals`: number of refusals, each followed by another try. `unread`: whether the
    answer could not be read a second time, since Redis had lost or deleted it. Units: seconds;
    `sent_s` and `ended_s` since the phase began, `chunks_s` since the request was sent.
    `stalled_s`: total time of playback with an empty buffer; None without audio. `difference`:
    difference from the reference answer. `changed`: difference between the first and the second
    reading.
    """

    request: int
    sent_s: float
    ended_s: float
    id: str = ""
    gateway_changes: int = 0
    refusals: int = 0
    chunks_s: tuple[float, ...] = ()
    stalled_s: float | None = None
    lost: str = ""
    difference: Difference | None = None
    changed: Difference | None = None
    unread: bool = False


class RequestLoad(ABC):
    """Clients that send the requests `bodies` in rounds; each client sends the next request as soon
    as its last one is answered. `sent`: number of requests sent so far.
    """

    def __init__(self, gateways: Gateways, bodies: Sequence[bytes]) -> None:
        self._gateways = gateways
        self._bodies = bodies
        self._began_s = time.perf_counter()
        self._lock = threading.Lock()
        self._threads = ClientThreads()
        self._sent_s: list[float] = []

    @property
    def sent(self) -> int:
        return len(self._sent_s)

    def now_s(self) -> float:
        """Return the seconds since the load was started."""
        return time.perf_counter() - self._began_s

    def start(self, concurrency: int, advance: Callable[[], None]) -> None:
        """Start the clients; `advance` is called after each answer, from their threads."""

        def run_client(_: int) -> None:
            while (number := self._next_number()) is not None:
                self._request(number)
                advance()

        self._began_s = time.perf_counter()
        self._threads.start(concurrency, run_client)

    def _next_number(self) -> int | None:
        with self._lock:
            if self._is_done():
                return None
            self._sent_s.append(self.now_s())
            return self.sent - 1

    @abstractmethod
    def _is_done(self) -> bool:
        """Return True if clients shall send no further request."""

    @abstractmethod
    def _request(self, number: int) -> None:
        """Send the request `number`, receive its answer, and record how it ended."""


class ChaosLoad(RequestLoad):
    """Load that repeats its requests in rounds until `finish` is called, or sends one round with
    `once`.

    Without `expected` the answers are kept in `answers`, as the reference. With `expected` each
    answer is compared, and read once more from the fleet's log, which must still hold the bytes
    that were received. `may_forget`: whether the log may lack an answer, since Redis lost writes or
    had to delete retained audio.
    """

    def __init__(
        self,
        gateways: Gateways,
        bodies: Sequence[bytes],
        expected: Sequence[ReceivedAnswer] | None = None,
        *,
        may_forget: bool = False,
        once: bool = False,
    ) -> None:
        super().__init__(gateways, bodies)
        self._expected = expected
        self._may_forget = may_forget
        self.outcomes: list[Outcome] = []
        self.answers: dict[int, ReceivedAnswer] = {}
        self._ended: set[int] = set()
        self._last_end_s = 0.0
        if once:
            self._threads.finishing.set()

    def finish(self) -> list[Outcome]:
        """Complete the first round, wait for the open answers, and return all outcomes in order of
        their end.

        Open requests count as lost once nothing has been answered for `STALLED_S`.
        """
        self._threads.finishing.set()
        self._last_end_s = max(self._last_end_s, self.now_s())
        pause = threading.Event()
        while self._threads.is_alive() and self.now_s() - self._last_end_s < STALLED_S:
            pause.wait(POLL_S)
        with self._lock:
            self._threads.cancelled.set()
            still_open = sorted(set(range(self.sent)) - self._ended)
            lost = [self._lost(number, "its answer did not end") for number in still_open]
            return [*self.outcomes, *lost]

    def abandon(self) -> None:
        """Stop the clients without waiting for answers."""
        self._threads.cancelled.set()

    def _is_done(self) -> bool:
        finished = self._threads.finishing.is_set() and self.sent >= len(self._bodies)
        return finished or self._threads.cancelled.is_set()

    def _request(self, number: int) -> None:
        outcome = self._answer(number)
        with self._lock:
            if not self._threads.cancelled.is_set():
                self._ended.add(number)
                self.outcomes.append(outcome)
                self._last_end_s = outcome.ended_s

    def _lost(self, number: int, reason: str, request_id: str = "") -> Outcome:
        return Outcome(
            request=number % len(self._bodies),
            sent_s=self._sent_s[number],
            ended_s=self.now_s(),
            id=request_id,
            lost=reason,
        )

    def _answer(self, number: int) -> Outcome:
        request, request_id = number % len(self._bodies), ""
        try:
            stream = self._receive(self._bodies[request])
            ended_s, request_id = self.now_s(), stream.request_id
            answer = read_answer(stream.pieces)
        except ApiError as error:
            return self._lost(number, str(error), request_id)
        outcome = Outcome(
            request=request,
            sent_s=self._sent_s[number],
            ended_s=ended_s,
            id=request_id,
            gateway_changes=stream.gateway_changes,
            refusals=stream.refusals,
            chunks_s=answer.chunks_s,
            stalled_s=answer.stalled_s,
        )
        if self._expected is None:
            self.answers[request] = answer
            return outcome
        return self._compare(outcome, answer, self._expected[request])

    def _receive(self, body: bytes, request_id: str = "") -> ResumableStream:
        return self._gateways.receive(body, self._threads.cancelled.is_set, request_id)

    def _compare(
        self, outcome: Outcome, answer: ReceivedAnswer, expected: ReceivedAnswer
    ) -> Outcome:
        difference = first_difference(expected, answer)
        try:
            again = read_answer(self._receive(b"", outcome.id).pieces)
        except ApiError as error:
            is_gone = isinstance(error, ApiRefused) and error.http_status == NOT_FOUND
            if self._may_forget and is_gone:
                return msgspec.structs.replace(outcome, difference=difference, unread=True)
            return msgspec.structs.replace(
                outcome, lost=f"complete, but not when it was read once more: {error}"
            )
        return msgspec.structs.replace(
            outcome, difference=difference, changed=first_difference(answer, again)
        )
