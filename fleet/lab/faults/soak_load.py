"""The load of a soak: many short requests at an even pace, some of them aborted. Equal requests
must have equal answers.
"""

import random
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from fleet.lab.client.errors import ApiError
from fleet.lab.faults.answer import ReceivedAnswer, first_difference, read_answer
from fleet.lab.faults.clients import Gateways

ABORTED_AFTER = (1, 6)
"""Pieces of an answer after which its client leaves, at least and at most."""


class SoakCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Requests by their end. `different`: answers with other bytes than the first to the same
    request.
    """

    answered: int = 0
    aborted: int = 0
    lost: int = 0
    different: int = 0
    gateway_changes: int = 0
    refusals: int = 0
    first_failures: tuple[str, ...] = ()


class SoakLoad:
    """`total` requests in `duration_s`, or as fast as `concurrency` clients receive the answers if
    that takes longer.
    """

    def __init__(
        self,
        gateways: Gateways,
        bodies: Sequence[bytes],
        *,
        total: int,
        duration_s: float,
        aborts: float,
        seed: int,
    ) -> None:
        self._gateways, self._bodies, self._total, self._seed = gateways, bodies, total, seed
        self._interval_s, self._aborts = duration_s / total, aborts
        self._began_s = time.perf_counter()
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._first: dict[int, ReceivedAnswer] = {}
        self._ended: list[tuple[str, str, int, int]] = []
        self._threads: list[threading.Thread] = []
        self.sent = 0

    def now_s(self) -> float:
        return time.perf_counter() - self._began_s

    @property
    def share_sent(self) -> float:
        return self.sent / self._total

    def start(self, concurrency: int, advance: Callable[[], None]) -> None:
        """Start the clients; `advance` is called after each request, from their threads."""
        self._began_s = time.perf_counter()
        self._threads = [
            threading.Thread(target=self._run_client, args=(advance,), daemon=True)
            for _ in range(concurrency)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_running(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def stop(self) -> None:
        """Send nothing more; open answers end by themselves."""
        self._stopped.set()

    def counts(self) -> SoakCounts:
        with self._lock:
            ended = list(self._ended)
        kinds = [kind for kind, *_ in ended]
        return SoakCounts(
            answered=kinds.count("answered") + kinds.count("different"),
            aborted=kinds.count("aborted"),
            lost=kinds.count("lost") + self.sent - len(ended),
            different=kinds.count("different"),
            gateway_changes=sum(changes for _, _, changes, _ in ended),
            refusals=sum(refusals for *_, refusals in ended),
            first_failures=tuple(reason for _, reason, _, _ in ended if reason)[:8],
        )

    def _run_client(self, advance: Callable[[], None]) -> None:
        while (number := self._next_number()) is not None:
            self._stopped.wait(max(0.0, number * self._interval_s - self.now_s()))
            ended = self._request(number)
            with self._lock:
                self._ended.append(ended)
            advance()

    def _next_number(self) -> int | None:
        with self._lock:
            if self._stopped.is_set() or self.sent >= self._total:
                return None
            self.sent += 1
            return self.sent - 1

    def _request(self, number: int) -> tuple[str, str, int, int]:
        """Return the kind of its end, the reason of a failure, and the numbers of gateways changed
        and of refusals.
        """
        draw = random.Random(self._seed * 1_000_003 + number)
        leaves_after = draw.randint(*ABORTED_AFTER) if draw.random() < self._aborts else 0
        leaving = _Leaving(leaves_after)
        request = number % len(self._bodies)
        try:
            stream = self._gateways.receive(self._bodies[request], leaving.is_due)
            if leaving.left:
                return "aborted", "", stream.gateway_changes, stream.refusals
            answer = read_answer(stream.pieces)
        except ApiError as error:
            return (
                ("aborted", "", 0, 0)
                if leaving.left
                else ("lost", f"request {number}: {error}", 0, 0)
            )
        with self._lock:
            expected = self._first.setdefault(request, answer)
        difference = first_difference(expected, answer)
        if difference is None:
            return "answered", "", stream.gateway_changes, stream.refusals
        reason = (
            f"request {number}: its {difference.medium} differs from byte {difference.offset} on"
        )
        return "different", reason, stream.gateway_changes, stream.refusals


class _Leaving:
    """A client that leaves after so many pieces of its answer; 0: never."""

    def __init__(self, after: int) -> None:
        self._left, self._leaves = after, after > 0
        self.left = False

    def is_due(self) -> bool:
        self._left -= 1
        self.left = self._leaves and self._left <= 0
        return self.left
