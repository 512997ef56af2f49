"""Chaos load: the same requests in rounds, a fixed number at a time, each answer compared with a
reference answer.

A thread per client, as in the benchmark, so that the fleet is measured and not an event loop beside
it.
"""

import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from fleet.lab.client.errors import ApiError, ApiRefused
from fleet.lab.faults.answer import Difference, ReceivedAnswer, first_difference, read_answer
from fleet.lab.faults.clients import Gateways

STALLED_S = 300.0
"""Time without any answer after which the open requests count as lost: ten times the wait for a
role without a worker.
"""
POLL_S = 0.05
NOT_FOUND = 404


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One request as its client received it. `lost`: the reason for which it was not completely
    answered, else "".

    `id`: the fleet's request id; `gateway_changes`: gateways lost during the answer; `refusals`:
    those after which it was sent again. `unread`: it could not be read once more, since Redis had
    lost or deleted it.
    Units: seconds; `sent_s` and `ended_s` since the phase began, `chunks_s` since the request was
    sent. `stalled_s`: pauses of playback from the first audio on. `difference`: from the reference
    answer; `changed`: from the same answer read once more.
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


class ChaosLoad:
    """`concurrency` clients, each of which sends the next request as soon as its last is answered,
    in rounds over `bodies`.

    Without `expected` the answers become the reference. With it each is compared, and read once
    more from the fleet's log, which must still hold the bytes that were received, unless it
    `may_forget`: Redis lost writes, or had to delete retained audio.
    """

    def __init__(
        self,
        gateways: Gateways,
        bodies: Sequence[bytes],
        expected: Sequence[ReceivedAnswer] | None = None,
        *,
        may_forget: bool = False,
    ) -> None:
        self._gateways, self._bodies, self._expected, self._may_forget = (
            gateways,
            bodies,
            expected,
            may_forget,
        )
        self.began_s = time.perf_counter()
        self.outcomes: list[Outcome] = []
        self.answers: dict[int, ReceivedAnswer] = {}
        self._advance: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._sent = 0
        self._open: dict[int, float] = {}
        self._last_end_s = 0.0
        self._finishing, self._cancelled = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []

    def now_s(self) -> float:
        return time.perf_counter() - self.began_s

    def start(self, concurrency: int, advance: Callable[[], None], *, once: bool = False) -> None:
        """Start the clients; `advance` is called after each answer, from their threads. `once`:
        stop after one round.
        """
        self._advance = advance
        if once:
            self._finishing.set()
        # Daemons: a client whose answer never ends must not keep the command from ending.
        self._threads = [
            threading.Thread(target=self._run_client, daemon=True) for _ in range(concurrency)
        ]
        for thread in self._threads:
            thread.start()

    def finish(self) -> list[Outcome]:
        """Complete the first round, wait for the open answers, and return all outcomes in order of
        their end.

        Open requests are lost once nothing has been answered for `STALLED_S`.
        """
        self._finishing.set()
        self._last_end_s = max(self._last_end_s, self.now_s())
        pause = threading.Event()
        while (
            any(thread.is_alive() for thread in self._threads)
            and self.now_s() - self._last_end_s < STALLED_S
        ):
            pause.wait(POLL_S)
        with self._lock:
            self._cancelled.set()
            now_s = self.now_s()
            open_requests = [
                Outcome(
                    request=number % len(self._bodies),
                    sent_s=sent_s,
                    ended_s=now_s,
                    lost="its answer did not end",
                )
                for number, sent_s in self._open.items()
            ]
            return [*self.outcomes, *open_requests]

    def abandon(self) -> None:
        """Stop without waiting for answers."""
        self._finishing.set()
        self._cancelled.set()

    def _run_client(self) -> None:
        while (number := self._next_number()) is not None:
            outcome = self._request(self._open[number], number % len(self._bodies))
            with self._lock:
                if self._cancelled.is_set():
                    return
                del self._open[number]
                self.outcomes.append(outcome)
                self._last_end_s = outcome.ended_s
            self._advance()

    def _next_number(self) -> int | None:
        with self._lock:
            if self._cancelled.is_set() or (
                self._finishing.is_set() and self._sent >= len(self._bodies)
            ):
                return None
            number, self._sent = self._sent, self._sent + 1
            self._open[number] = self.now_s()
            return number

    def _request(self, sent_s: float, request: int) -> Outcome:
        stream = None
        try:
            stream = self._gateways.receive(self._bodies[request], self._cancelled.is_set)
            ended_s = self.now_s()
            answer = read_answer(stream.pieces)
        except ApiError as error:
            request_id = stream.request_id if stream else ""
            return Outcome(
                request=request, sent_s=sent_s, ended_s=self.now_s(), id=request_id, lost=str(error)
            )
        outcome = Outcome(
            request=request,
            sent_s=sent_s,
            ended_s=ended_s,
            id=stream.request_id,
            gateway_changes=stream.gateway_changes,
            refusals=stream.refusals,
            chunks_s=answer.chunks_s,
            stalled_s=answer.stalled_s,
        )
        if self._expected is None:
            self.answers[request] = answer
            return outcome
        return self._compare(outcome, answer, self._expected[request])

    def _compare(
        self, outcome: Outcome, answer: ReceivedAnswer, expected: ReceivedAnswer
    ) -> Outcome:
        try:
            again = self._gateways.receive(b"", self._cancelled.is_set, outcome.id)
            changed = first_difference(answer, read_answer(again.pieces))
        except ApiError as error:
            if (
                self._may_forget
                and isinstance(error, ApiRefused)
                and error.http_status == NOT_FOUND
            ):
                return msgspec.structs.replace(
                    outcome, difference=first_difference(expected, answer), unread=True
                )
            return msgspec.structs.replace(
                outcome, lost=f"complete, but not when it was read once more: {error}"
            )
        return msgspec.structs.replace(
            outcome, difference=first_difference(expected, answer), changed=changed
        )
