"""Reader of the fleet's events in Redis: hand-offs while they happen, and the recovery from a
fault. Writes nothing.
"""

import time
from dataclasses import dataclass
from typing import cast

from fleet.control import keys
from fleet.control.connect import connect, text
from fleet.core.events import AnyEvent, TaskClaimed, TaskHandedOff, decode_event
from fleet.core.ids import RequestId, StageName
from fleet.lab.faults.patience import patiently
from fleet.lab.faults.recovery import Recovery, TimedEvent, recovery_of

OFFERED = "offered"
BLOCK_MS = 100
Entries = list[tuple[bytes, dict[bytes, bytes]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenHandOff:
    """A task in transfer from the prefill half to the decode half of its stage. `worker`: id of the
    worker that the fault hits.
    """

    request: RequestId
    stage: StageName
    worker: str


class EventLog:
    """Reader of one fleet's events. Its calls block, retry while Redis is unreachable, and must
    come from one thread. Raises: redis's errors.
    """

    def __init__(self, redis_url: str) -> None:
        self._redis = connect(redis_url)

    def close(self) -> None:
        self._redis.close()

    @patiently
    def now_us(self) -> int:
        """Return the current time in microseconds on Redis's clock, which also stamps the
        events.
        """
        seconds, micros = self._redis.time()
        return seconds * 1_000_000 + micros

    @patiently
    def recovery_since(self, fault_us: int, target: str, role: str) -> Recovery:
        """Return the recovery from a fault, as recorded so far. `fault_us`: time of the fault on
        Redis's clock. `target`: id of the process hit. `role`: role of the process.
        """
        entries = cast("Entries", self._redis.xrange(keys.EVENTS, min=str(fault_us // 1000)))
        return recovery_of(_timed_events(entries), target, role, fault_us)

    @patiently
    def next_hand_off(
        self, stage: StageName, *, from_source: bool, timeout_s: float
    ) -> OpenHandOff | None:
        """Wait until a task of the stage is handed off and not confirmed yet; return None after
        `timeout_s`.

        `from_source`: True to target the worker that handed the task off, False to target the
        worker that claimed it.
        """
        newest = cast("Entries", self._redis.xrevrange(keys.EVENTS, count=1))
        last, deadline_s = text(newest[0][0]) if newest else "0-0", time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            reply = cast(
                "list[tuple[bytes, Entries]]",
                self._redis.xread({keys.EVENTS: last}, block=BLOCK_MS) or [],
            )
            entries = reply[0][1] if reply else []
            last = text(entries[-1][0]) if entries else last
            newest_first = (event for _, event in reversed(_timed_events(entries)))
            found = (
                self._hand_off(event, stage, from_source=from_source) for event in newest_first
            )
            if (hand_off := next((one for one in found if one is not None), None)) is not None:
                return hand_off
        return None

    def _hand_off(
        self, event: AnyEvent, stage: StageName, *, from_source: bool
    ) -> OpenHandOff | None:
        if (
            not isinstance(event, TaskHandedOff if from_source else TaskClaimed)
            or event.stage != stage
        ):
            return None
        source = self._source(event.request, stage)
        worker = event.owner if isinstance(event, TaskClaimed) else source
        return OpenHandOff(request=event.request, stage=stage, worker=worker) if source else None

    @patiently
    def is_open(self, hand_off: OpenHandOff) -> bool:
        return bool(self._source(hand_off.request, hand_off.stage))

    def _source(self, request: RequestId, stage: StageName) -> str:
        """Return the id of the worker that offers the KV blocks of an unconfirmed task, "" if none
        does.
        """
        state, source = (
            text(field) for field in self._redis.hmget(keys.kv(request, stage), ["state", "source"])
        )
        return source if state == OFFERED else ""


def _timed_events(entries: "Entries") -> list[TimedEvent]:
    """Decode entries of an event stream to (microseconds on Redis's clock, event). Stream ids begin
    with that clock in milliseconds.
    """
    return [
        (int(text(entry).partition("-")[0]) * 1000, decode_event(fields[b"e"]))
        for entry, fields in entries
    ]
