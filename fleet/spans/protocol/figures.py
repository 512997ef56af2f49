"""Times, rows and bytes of the passes of one process of a route: an anchor or a span worker.

Each process counts its own and publishes them; readers compare the processes of a route. Knows no
connection.
"""

import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from fleet.core.ids import WorkerId

WINDOW_PASSES = 256
"""Passes in `SpanFigures.recent`. Passes and not seconds: all processes of a route then have the
same, and figures of an idle route do not change.
"""


class PassSums(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over the steps that a process computed without an error, again after a loss included.

    Units: microseconds. `num_rows`: computed rows. `waited_us`: time between the arrival of a step,
    or of its result at an anchor, and the computation. `computed_us`: computation, until what is
    sent lies in the host's memory as bytes; at an anchor with sampling. `sent_us`: time until the
    kernel has taken the bytes, which grows if a connection is slower than the computation; on busy
    cores it includes the sender's wait for a core. `took_us`: duration of a step at an anchor; 0 at
    a span worker.
    """

    num_passes: int = 0
    num_rows: int = 0
    waited_us: int = 0
    computed_us: int = 0
    sent_us: int = 0
    took_us: int = 0

    def __add__(self, other: "PassSums") -> "PassSums":
        return PassSums(
            **{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__}
        )

    def __sub__(self, earlier: "PassSums") -> "PassSums":
        """Return the sums over the passes since `earlier`."""
        return PassSums(
            **{
                name: getattr(self, name) - getattr(earlier, name)
                for name in self.__struct_fields__
            }
        )


class SpanFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of one process since it joined.

    `recent`: sums over its last `WINDOW_PASSES` steps. `weight_bytes`: size of its weights.
    `received_bytes`, `sent_bytes`: frames on its connections to the other processes of its routes.
    """

    weight_bytes: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    total: PassSums = PassSums()
    recent: PassSums = PassSums()


class SpanPart(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a divided model that a worker has.

    `span`: layers, in the notation of spans; "" for a span worker without any. `anchor`: the
    anchor that claimed a span worker last; "" without one. An anchor has `worker_spans`, the spans
    of its route in the order of the layers, or the configured ones while it has no route; `hops`,
    the workers of its route in that order; and `gap`, why it cannot compute, "" if it can.
    """

    is_anchor: bool
    span: str
    anchor: str = ""
    worker_spans: tuple[str, ...] = ()
    hops: tuple[WorkerId, ...] = ()
    gap: str = ""
    figures: SpanFigures = SpanFigures()


class PassTally:
    """Thread-safe counts of one process's passes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = PassSums()
        self._before: deque[PassSums] = deque(maxlen=WINDOW_PASSES)
        """The total before each of the last passes."""

    def add(self, passed: PassSums) -> None:
        """Count one pass, whose sending may not have ended."""
        with self._lock:
            self._before.append(self._total)
            self._total += passed

    def sending(self, since_s: float) -> Callable[[], None]:
        """Return a function that counts the time from `since_s`, by `time.monotonic`, to its call
        as time of sending.
        """

        def count() -> None:
            sent = PassSums(sent_us=int(1e6 * (time.monotonic() - since_s)))
            with self._lock:
                self._total += sent

        return count

    def sums(self) -> tuple[PassSums, PassSums]:
        """Return the sums since the start, and over the last passes."""
        with self._lock:
            return self._total, self._total - (self._before[0] if self._before else self._total)
