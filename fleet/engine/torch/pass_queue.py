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
"""Errors that torch, numpy and programs raise for one request's data. Any other error is a bug,
which the worker handles.
"""


@dataclass(slots=True, eq=False, kw_only=True)
class PassEntry(Generic[TaskT]):
    """Positions of one request in a step. `is_void`: True if no token is sampled from them, because
    the request has ended or the positions will be computed again. `is_cut`: True if the positions
    end before those of their chunk, so that the step stays short.
    """

    task: TaskT
    extent: Extent
    is_void: bool = False
    is_cut: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PassFailure:
    """Result of a step that failed after it began. `loses_rows`: True if the earlier positions of
    its requests must be computed again too.
    """

    error: Exception
    loses_rows: bool = False


class PassQueue(Protocol[TaskT]):
    """Queue of the steps that a batch loop has begun. Not thread-safe. `num_free`: number of steps
    that may begin now. `retry_s`: seconds after which to ask again if no step may begin.
    """

    @property
    def num_free(self) -> int: ...

    @property
    def has_ended(self) -> bool:
        """True if `take_ended` would return a step."""
        ...

    @property
    def is_open(self) -> bool:
        """False while no step can run, since layers are missing."""
        return True

    @property
    def retry_s(self) -> float:
        return math.inf

    def follow_route(self) -> None:
        """Switch to the next route, if there is one: new processes for the model's other layers."""

    def take_suspects(self) -> Sequence[TaskT]:
        """Return, once, the tasks of the steps that were running when another process died."""
        return ()

    @property
    def first_layer(self) -> int:
        """Number of the first layer that this process has."""
        return 0

    @property
    def num_other_layers(self) -> int:
        """Number of the model's layers that other processes compute."""
        return 0

    def figures(self) -> SpanFigures | None:
        """Return statistics of the steps if other processes compute parts of them, else None."""
        return None

    def outage(self) -> FleetError | None:
        """Return the error with which to fail requests if layers have been missing for too long,
        else None.
        """
        return None

    def max_requests(self, num_open: int) -> int:
        """Return the largest number of requests in one step while `num_open` requests are open."""
        return max(1, num_open)

    def begin(self, entries: Sequence[PassEntry[TaskT]]) -> None:
        """Begin a step. Raises: errors of the part that is computed in this process; the step has
        not begun then.
        """
        ...

    def take_ended(self) -> PassDone | PassFailure:
        """Remove the oldest step, which has ended; sample its tokens and return its results.

        Raises: the error of sampling, if a task of the step has already advanced.
        """
        ...

    def copy_rows(
        self,
        number: int,
        table: PageTable,
        keys: NDArray[np.int64],
        layers: Sequence[NDArray[np.uint8]] | None,
    ) -> bool:
        """Begin to copy the keys and values that other processes have for a session: to read them
        if `layers` is None, else to write `layers` there. Return False if no other process has
        layers.

        `number`: identifier of the copy in `take_copied`. `table`: the session's pages. `keys`:
        keys that identify the session's positions.
        """
        return False

    def take_copied(self) -> Sequence[tuple[int, dict[int, NDArray[np.uint8]], FleetError | None]]:
        """Return, once, the finished copies: for each its number, the bytes of each layer that was
        read, and the error if it failed.
        """
        return ()

    def await_ended(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for a step to end; return True if one may have ended."""
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
