"""Listeners: the same requests again and again, so many at a time, each answer compared with the one learnt first.

A thread a listener, as in the benchmark: what is measured is the fleet, not an event loop beside it.
"""

import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from fleet.chaos.answer import Broken, Difference, ReceivedAnswer, first_difference, read_answer
from fleet.chaos.clients import Gateways
from fleet.chaos.errors import Unanswered

STALLED_S = 300.0
"""Ten times what a request waits for a role that nobody serves; when nobody is told anything for so long, nobody will be."""
POLL_S = 0.05


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One request as its listener met it. `lost` says why it was not answered whole, and is empty where it was.

    `id` is the fleet's name of it; `moves` counts the gateways that the listener lost meanwhile.
    Units: seconds; `sent_s` and `ended_s` since the phase began, `chunks_s` since the request was sent. `stalled_s`: silence in
    the middle of an answer played from its first sound on. `difference` is from the answer learnt first; `changed` where
    the fleet, asked for the same answer once more, told another than was heard.
    """

    request: int
    sent_s: float
    ended_s: float
    id: str = ""
    moves: int = 0
    chunks_s: tuple[float, ...] = ()
    stalled_s: float | None = None
    lost: str = ""
    difference: Difference | None = None
    changed: Difference | None = None


class ChaosLoad:
    """`concurrency` listeners. Each sends the next request as soon as its last was answered, in rounds over `bodies`.

    Without `expected` the answers are learnt; with it each is compared, and read once more from the fleet's own log of it: what
    was published, and heard, must stand there still.
    """

    def __init__(self, gateways: Gateways, bodies: Sequence[bytes], expected: Sequence[ReceivedAnswer] | None = None) -> None:
        self._gateways, self._bodies, self._expected = gateways, bodies, expected
        self.began_s = time.perf_counter()
        self.outcomes: list[Outcome] = []
        self.learnt: dict[int, ReceivedAnswer] = {}
        self._advance: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._sent = 0
        self._under_way: dict[int, float] = {}
        self._last_end_s = 0.0
        self._enough, self._cut_off = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []

    def now_s(self) -> float:
        return time.perf_counter() - self.began_s

    def start(self, concurrency: int, advance: Callable[[], None], *, once: bool = False) -> None:
        """`advance` is called after each answer, from the listeners' threads. `once`: each request once; else until `finish`."""
        self._advance = advance
        if once:
            self._enough.set()
        # Daemons: a listener whose answer never ends must not keep the command from ending.
        self._threads = [threading.Thread(target=self._listen, daemon=True) for _ in range(concurrency)]
        for thread in self._threads:
            thread.start()

    def finish(self) -> list[Outcome]:
        """Send no more than each request once at least, wait for the answers under way, and return every outcome, as they ended.

        A request is lost if nothing at all was answered for `STALLED_S`.
        """
        self._enough.set()
        self._last_end_s = max(self._last_end_s, self.now_s())
        pause = threading.Event()
        while any(thread.is_alive() for thread in self._threads) and self.now_s() - self._last_end_s < STALLED_S:
            pause.wait(POLL_S)
        with self._lock:
            self._cut_off.set()
            now_s = self.now_s()
            silent = [
                Outcome(request=number % len(self._bodies), sent_s=sent_s, ended_s=now_s, lost="no end came")
                for number, sent_s in self._under_way.items()
            ]
            return [*self.outcomes, *silent]

    def abandon(self) -> None:
        """Take no more answers; for a run that is broken off."""
        self._enough.set()
        self._cut_off.set()

    def _listen(self) -> None:
        while (number := self._next()) is not None:
            outcome = self._ask(number, number % len(self._bodies))
            with self._lock:
                if self._cut_off.is_set():
                    return
                del self._under_way[number]
                self.outcomes.append(outcome)
                self._last_end_s = outcome.ended_s
            self._advance()

    def _next(self) -> int | None:
        with self._lock:
            if self._cut_off.is_set() or (self._enough.is_set() and self._sent >= len(self._bodies)):
                return None
            number, self._sent = self._sent, self._sent + 1
            self._under_way[number] = self.now_s()
            return number

    def _ask(self, number: int, request: int) -> Outcome:
        sent_s = self._under_way[number]
        take = None
        try:
            take = self._gateways.answer(self._bodies[request], self._cut_off.is_set)
            ended_s = self.now_s()
            answer = read_answer(take.recording(request))
        except (Unanswered, Broken, msgspec.DecodeError) as error:
            name = take.request_id if take else ""
            return Outcome(request=request, sent_s=sent_s, ended_s=self.now_s(), id=name, lost=str(error))
        outcome = Outcome(
            request=request, sent_s=sent_s, ended_s=ended_s, id=take.request_id, moves=take.moves, chunks_s=answer.chunks_s,
            stalled_s=answer.stalled_s,
        )  # fmt: skip
        if self._expected is None:
            self.learnt[request] = answer
            return outcome
        return self._compared(outcome, answer, self._expected[request])

    def _compared(self, outcome: Outcome, answer: ReceivedAnswer, expected: ReceivedAnswer) -> Outcome:
        try:
            again = self._gateways.once_more(outcome.id, self._cut_off.is_set)
            changed = first_difference(answer, read_answer(again.recording(outcome.request)))
        except (Unanswered, Broken, msgspec.DecodeError) as error:
            return msgspec.structs.replace(outcome, lost=f"heard whole, but not when asked once more: {error}")
        return msgspec.structs.replace(outcome, difference=first_difference(expected, answer), changed=changed)
