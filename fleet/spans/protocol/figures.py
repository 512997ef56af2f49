"""Statistics of the steps of one process of a route: times, rows and bytes of an anchor or span
worker.

A process counts its own steps and publishes the sums; readers compare the processes of a route.
Knows no connection.
"""

import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from fleet.core.ids import WorkerId

WINDOW_PASSES = 256
"""Number of steps in `SpanFigures.recent`. A window of steps, not of seconds, covers the same steps
in all processes of a route, and stays constant while the route is idle.
"""


class PassSums(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over the steps that a process computed without error, including steps computed again
    after the loss of a worker.

    Units: microseconds. `num_rows`: computed rows. `waited_us`: time from the arrival of a step (at
    an anchor: of its result) to the start of computation. `computed_us`: computation time, until
    the bytes to send are in host memory; at an anchor including sampling. `sent_us`: time until the
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
        """Return the sums over the steps since `earlier` was recorded."""
        return PassSums(
            **{
                name: getattr(self, name) - getattr(earlier, name)
                for name in self.__struct_fields__
            }
        )


class SpanFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of one process of a route since it joined the fleet.

    `weight_bytes`: size of the process's weights. `received_bytes`, `sent_bytes`: bytes on its
    connections to other processes of its routes. `total`: sums over all steps. `recent`: sums over
    the last `WINDOW_PASSES` steps.
    """

    weight_bytes: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    total: PassSums = PassSums()
    recent: PassSums = PassSums()


class SpanPart(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a divided model that one worker (anchor or span worker) has.

    `span`: the worker's layers, for example `0:13`; "" for a span worker without any. `anchor`: the
    anchor that last claimed this span worker; "" for none. Only an anchor has `worker_spans`: spans
    of its route in the order of the layers, or the configured spans while there is no route;
    `hops`: span workers of its route, in the same order; and `gap`: why the anchor cannot compute,
    "" if it can.
    """

    is_anchor: bool
    span: str
    anchor: str = ""
    worker_spans: tuple[str, ...] = ()
    hops: tuple[WorkerId, ...] = ()
    gap: str = ""
    figures: SpanFigures = SpanFigures()


class PassTally:
    """Counter of one process's step statistics. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = PassSums()
        self._before: deque[PassSums] = deque(maxlen=WINDOW_PASSES)
        """The total before each of the last `WINDOW_PASSES` steps."""

    def add(self, passed: PassSums) -> None:
        """Add one step, whose bytes may not have been sent yet."""
        with self._lock:
            self._before.append(self._total)
            self._total += passed

    def sending(self, since_s: float) -> Callable[[], None]:
        """Return a callback that, when called, adds the time since `since_s` (`time.monotonic`) to
        the sending time.
        """

        def count() -> None:
            sent = PassSums(sent_us=int(1e6 * (time.monotonic() - since_s)))
            with self._lock:
                self._total += sent

        return count

    def sums(self) -> tuple[PassSums, PassSums]:
        """Return the sums since the start, and the sums over the last `WINDOW_PASSES` steps."""
        with self._lock:
            return self._total, self._total - (self._before[0] if self._before else self._total)
