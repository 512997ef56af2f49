"""The fleet's events, read from outside: hand-offs while they happen, and what a blow set off. Writes nothing."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from fleet.chaos.recovery import Recovery, Told, recovery_of
from fleet.control import keys
from fleet.control.connect import connect, text
from fleet.control.embedded import embedded_url
from fleet.core.events import AnyEvent, TaskClaimed, TaskHandedOff, decode_event
from fleet.core.ids import RequestId, StageName

OFFERED = "offered"
BLOCK_MS = 100
Entries = list[tuple[bytes, dict[bytes, bytes]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOff:
    """A task on its way between the halves of its stage. `worker`: the id of the one to strike."""

    request: RequestId
    stage: StageName
    worker: str


class EventLog:
    """Reads of one fleet, each a blocking call from one thread. Raises: redis's errors."""

    def __init__(self, redis_data_dir: Path) -> None:
        self._redis = connect(embedded_url(redis_data_dir))

    def close(self) -> None:
        self._redis.close()

    def now_us(self) -> int:
        """Redis's clock, by which events are stamped."""
        seconds, micros = self._redis.time()
        return seconds * 1_000_000 + micros

    def after(self, victim: str, role: str, blow_us: int) -> Recovery:
        """What followed a blow, as far as it is told by now."""
        entries = cast("Entries", self._redis.xrange(keys.EVENTS, min=str(blow_us // 1000)))
        return recovery_of(_told(entries), victim, role, blow_us)

    def next_hand_off(self, stage: StageName, *, giving: bool, patience_s: float) -> HandOff | None:
        """Wait for a task of the stage that was handed off and is not confirmed yet; None if none comes in time.

        `giving`: the one to strike is the worker that gave it away; else the one that has claimed it.
        """
        newest = cast("Entries", self._redis.xrevrange(keys.EVENTS, count=1))
        last, deadline_s = text(newest[0][0]) if newest else "0-0", time.monotonic() + patience_s
        while time.monotonic() < deadline_s:
            reply = cast("list[tuple[bytes, Entries]]", self._redis.xread({keys.EVENTS: last}, block=BLOCK_MS) or [])
            entries = reply[0][1] if reply else []
            last = text(entries[-1][0]) if entries else last
            for _, event in reversed(_told(entries)):
                found = self._hand_off(event, stage, giving=giving)
                if found is not None:
                    return found
        return None

    def _hand_off(self, event: AnyEvent, stage: StageName, *, giving: bool) -> HandOff | None:
        if not isinstance(event, TaskHandedOff if giving else TaskClaimed) or event.stage != stage:
            return None
        source = self._source(event.request, stage)
        worker = event.owner if isinstance(event, TaskClaimed) else source
        return HandOff(request=event.request, stage=stage, worker=worker) if source else None

    def is_under_way(self, hand_off: HandOff) -> bool:
        return bool(self._source(hand_off.request, hand_off.stage))

    def _source(self, request: RequestId, stage: StageName) -> str:
        """Who offers the blocks of a task that nobody has confirmed yet; "" where nobody does."""
        state, source = (text(field) for field in self._redis.hmget(keys.kv(request, stage), ["state", "source"]))
        return source if state == OFFERED else ""


def _told(entries: "Entries") -> list[Told]:
    """Stream ids begin with Redis's clock in milliseconds."""
    return [(int(text(entry).partition("-")[0]) * 1000, decode_event(fields[b"e"])) for entry, fields in entries]
