"""The queue of steps that are being computed: several at a time if other processes compute parts of
them. Steps end in the order in which they began.

`fleet.spans.anchor.passes` has the queue of an anchor, whose steps go through span workers; this
module has the queue of a process with all layers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol

import numpy as np
from numpy.typing import NDArray

from fleet.core.errors import FleetError
from fleet.engine.torch.kv_pool import PageTable
from fleet.engine.torch.layout import Extent
from fleet.engine.torch.passes import PassDone, PassRunner
from fleet.engine.torch.program import TaskT
from fleet.spans.protocol.figures import SpanFigures

FAILURES = (FleetError, RuntimeError, ValueError, IndexError, KeyError, MemoryError)
"""Errors that torch, numpy and programs raise for one request's data. Any other error is a bug, and
handled by the worker.
"""


@dataclass(slots=True, eq=False, kw_only=True)
class PassEntry(Generic[TaskT]):
    """The rows of one request in a step. `is_void`: True if no token is sampled from them, because
    the request has ended or the rows will be computed again.
    """

    task: TaskT
    extent: Extent
    is_void: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PassFailure:
    """A pass that failed after it began. `loses_rows`: the earlier rows of its requests must be
    computed again too.
    """

    error: Exception
    loses_rows: bool = False


class PassQueue(Protocol[TaskT]):
    """Not thread-safe. `num_free`: passes that may begin now. `retry_s`: time after which to look
    again if none may.
    """

    @property
    def num_free(self) -> int: ...

    @property
    def has_ended(self) -> bool:
        """True if `take_ended` would return a pass."""
        ...

    @property
    def is_open(self) -> bool:
        """False while no pass can run, since layers are missing."""
        return True

    @property
    def retry_s(self) -> float:
        return math.inf

    def follow_route(self) -> None:
        """Continue with the next chain of other processes, if there is one."""

    def take_suspects(self) -> Sequence[TaskT]:
        """Return, once, the tasks of the passes that ran when another process died."""
        return ()

    @property
    def first_layer(self) -> int:
        """Number of the first layer that this process has."""
        return 0

    @property
    def num_other_layers(self) -> int:
        """Number of the model's layers that other processes have."""
        return 0

    def figures(self) -> SpanFigures | None:
        """Return the figures of the passes, if other processes compute parts of them."""
        return None

    def outage(self) -> FleetError | None:
        """Return the error for requests that have waited too long for missing layers."""
        return None

    def max_requests(self, num_open: int) -> int:
        """Return the largest number of requests in one step while `num_open` requests are open."""
        return max(1, num_open)

    def begin(self, entries: Sequence[PassEntry[TaskT]]) -> None:
        """Begin a pass. Raises: errors of the part that is computed here; the pass has not begun
        then.
        """
        ...

    def take_ended(self) -> PassDone | PassFailure:
        """Remove and return the first pass that has ended; its draws are made by this call.

        Raises: the error of a draw after which a task of the pass has advanced.
        """
        ...

    def copy_rows(
        self,
        number: int,
        table: PageTable,
        keys: NDArray[np.int64],
        layers: Sequence[NDArray[np.uint8]] | None,
    ) -> bool:
        """Begin to read the rows of the layers of other processes, or to write `layers` there if
        they are given. Return False if no other process has layers.

        `number`: a number by which `take_copied` identifies the copy. `keys`: the keys that
        identify the rows.
        """
        return False

    def take_copied(self) -> Sequence[tuple[int, dict[int, NDArray[np.uint8]], FleetError | None]]:
        """Return the copies that have ended: their numbers, the rows of each layer, why they
        failed.
        """
        return ()

    def await_ended(self, timeout_s: float) -> bool:
        """Wait for a pass to end; return True if one may have."""
        return False


class LocalPasses(PassQueue[TaskT]):
    """The queue of a process that has all layers: a pass runs when it begins."""

    def __init__(self, runner: PassRunner[TaskT]) -> None:
        self._runner = runner
        self._ended: list[PassDone] = []

    @property
    def num_free(self) -> int:
        return 1 - len(self._ended)

    @property
    def has_ended(self) -> bool:
        return bool(self._ended)

    def begin(self, entries: Sequence[PassEntry[TaskT]]) -> None:
        self._ended.append(self._runner.forward([(entry.task, entry.extent) for entry in entries]))

    def take_ended(self) -> PassDone | PassFailure:
        return self._ended.pop()
