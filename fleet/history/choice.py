"""The choice of the answers to keep, from the fleet's events, which bring their time. Pure."""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from fleet.core.events import (
    AnyEvent,
    ChunkAppended,
    RequestEnded,
    RequestSubmitted,
    TaskLost,
)
from fleet.core.ids import EdgeName, RequestId
from fleet.telemetry.views import FeedEntry

REASONS = ("failed", "interrupted", "slow", "dropouts", "pinned")
"""Reasons to keep an answer, in this order: the request failed; a task lost its worker or gateway;
at least 99 of 100 earlier answers began sooner; the playback had gaps; a person pinned the answer.
"""
MAX_OPEN = 20_000
"""Largest number of unfinished requests that are followed at a time; beyond it the oldest are
dropped.
"""
NUM_COMPARED, MIN_COMPARED = 1000, 100
"""Number of earlier answers with which the first output is compared; with fewer than the minimum no
answer counts as slow.
"""
SLOW_SHARE = 0.99


@dataclass(slots=True)
class _Open:
    """A request that has not ended. `first_ms`: time until the first chunk of a client edge."""

    began_ms: int
    outputs: tuple[EdgeName, ...]
    first_ms: int | None = None
    is_interrupted: bool = False


@dataclass(slots=True)
class AnswerChoice:
    """Rule that chooses the answers to keep from the events of their requests. A request submitted
    before the first event cannot count as slow; its failure and interruptions are still noticed.
    After an entry without an event all unfinished requests are forgotten.
    """

    _open: "OrderedDict[RequestId, _Open]" = field(
        default_factory=OrderedDict["RequestId", "_Open"]
    )
    _earlier_ms: dict[tuple[EdgeName, ...], deque[int]] = field(
        default_factory=dict["tuple[EdgeName, ...]", "deque[int]"]
    )

    def follow(self, entry: FeedEntry) -> tuple[RequestId, Sequence[str]] | None:
        """Take the next event. If it ends a request whose answer is to be kept, return the request
        and the reasons, which are in `REASONS`; else return None.
        """
        if entry.event is None:
            self._open.clear()
            return None
        at_ms = int(entry.id.partition("-")[0])
        if isinstance(entry.event, RequestEnded):
            return self._end(entry.event)
        self._note(entry.event, at_ms)
        return None

    def _note(self, event: AnyEvent, at_ms: int) -> None:
        if isinstance(event, RequestSubmitted):
            self._add(event.request, _Open(began_ms=at_ms, outputs=event.outputs))
        elif isinstance(event, TaskLost):
            known = self._open.get(event.request) or _Open(began_ms=0, outputs=())
            known.is_interrupted = True
            self._add(event.request, known)
        elif isinstance(event, ChunkAppended) and event.request in self._open:
            known = self._open[event.request]
            if known.first_ms is None and event.edge in known.outputs:
                known.first_ms = at_ms - known.began_ms

    def _add(self, request: RequestId, known: _Open) -> None:
        self._open[request] = known
        while len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)

    def _end(self, event: RequestEnded) -> tuple[RequestId, Sequence[str]] | None:
        known = self._open.pop(event.request, None)
        why: list[str] = []
        if event.state == "failed":
            why.append("failed")
        if known is not None:
            why += ["interrupted"] if known.is_interrupted else []
            why += ["slow"] if event.state == "finished" and self._is_slow(known) else []
        return (event.request, why) if why else None

    def _is_slow(self, known: _Open) -> bool:
        """Return True if the first output came later than almost all first outputs of earlier
        answers with the same client edges; count the answer among the earlier ones.
        """
        if known.first_ms is None or not known.began_ms:
            return False
        earlier = self._earlier_ms.setdefault(known.outputs, deque(maxlen=NUM_COMPARED))
        slower = sum(first_ms >= known.first_ms for first_ms in earlier)
        is_slow = len(earlier) >= MIN_COMPARED and slower <= len(earlier) * (1 - SLOW_SHARE)
        earlier.append(known.first_ms)
        return is_slow
