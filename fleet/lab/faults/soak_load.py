"""Load of a soak: many short requests at an even pace, some of them aborted. Equal requests must
get equal answers.
"""

import random
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from fleet.lab.client.errors import ApiError
from fleet.lab.faults.answer import ReceivedAnswer, first_difference, read_answer
from fleet.lab.faults.clients import Gateways
from fleet.lab.faults.load import RequestLoad

ABORTED = 0.1
"""Share of clients that disconnect before the end of their answer."""
ABORTED_AFTER = (1, 6)
"""Range of the number of stream pieces after which an aborting client disconnects."""
SHOWN_FAILURES = 8


class SoakCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of requests by the way they ended. `different`: number of answers, included in
    `answered`, whose bytes differ from the first answer to the same request. `first_failures`: a
    line for each of the first lost or different answers.
    """

    answered: int = 0
    aborted: int = 0
    lost: int = 0
    different: int = 0
    gateway_changes: int = 0
    refusals: int = 0
    first_failures: tuple[str, ...] = ()


COUNTED = SoakCounts.__struct_fields__[:-1]
"""Names of the numeric fields of `SoakCounts`."""


class SoakLoad(RequestLoad):
    """Load of `total` requests, spread evenly over `duration_s`. The load takes longer if all
    clients still wait for answers when the next request is due.
    """

    def __init__(
        self,
        gateways: Gateways,
        bodies: Sequence[bytes],
        *,
        total: int,
        duration_s: float,
        seed: int,
    ) -> None:
        super().__init__(gateways, bodies)
        self._total = total
        self._seed = seed
        self._interval_s = duration_s / total
        self._first: dict[int, ReceivedAnswer] = {}
        self._ended: list[SoakCounts] = []

    @property
    def share_sent(self) -> float:
        return self.sent / self._total

    @property
    def is_running(self) -> bool:
        return self._threads.is_alive()

    def stop(self) -> None:
        """Send no more requests; open answers are received to their end."""
        self._threads.cancelled.set()

    def counts(self) -> SoakCounts:
        with self._lock:
            ended = [*self._ended, SoakCounts(lost=self.sent - len(self._ended))]
        failures = [failure for each in ended for failure in each.first_failures]
        return SoakCounts(
            **{name: sum(getattr(each, name) for each in ended) for name in COUNTED},
            first_failures=tuple(failures[:SHOWN_FAILURES]),
        )

    def _is_done(self) -> bool:
        return self._threads.cancelled.is_set() or self.sent >= self._total

    def _request(self, number: int) -> None:
        self._threads.cancelled.wait(max(0.0, number * self._interval_s - self.now_s()))
        ended = self._answer(number)
        with self._lock:
            self._ended.append(ended)

    def _answer(self, number: int) -> SoakCounts:
        """Send request `number`, receive its answer, and return its counts."""
        request, leaving = number % len(self._bodies), _Leaving(self._seed, number)
        try:
            stream = self._gateways.receive(self._bodies[request], leaving.is_due)
            counts = SoakCounts(gateway_changes=stream.gateway_changes, refusals=stream.refusals)
            if leaving.left:
                return replace(counts, aborted=1)
            answer = read_answer(stream.pieces)
        except ApiError as error:
            if leaving.left:
                return SoakCounts(aborted=1)
            return SoakCounts(lost=1, first_failures=(f"request {number}: {error}",))
        with self._lock:
            expected = self._first.setdefault(request, answer)
        if (difference := first_difference(expected, answer)) is None:
            return replace(counts, answered=1)
        reason = (
            f"request {number}: its {difference.medium} differs from byte {difference.offset} on"
        )
        return replace(counts, answered=1, different=1, first_failures=(reason,))


class _Leaving:
    """Decides when a client disconnects: after a number of pieces of its answer, or never."""

    def __init__(self, seed: int, number: int) -> None:
        rng = random.Random(seed * 1_000_003 + number)
        self._pieces_left = rng.randint(*ABORTED_AFTER) if rng.random() < ABORTED else None
        self.left = False

    def is_due(self) -> bool:
        if self._pieces_left is not None:
            self._pieces_left -= 1
            self.left = self._pieces_left <= 0
        return self.left
