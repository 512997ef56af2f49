"""Slots that limit how many captures (transfers of an answer's hidden states) are in flight at one
time. The limit falls when a worker's arena has no room for the hidden states.
"""

import contextlib
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from anyio import CapacityLimiter

from fleet.core.errors import TransferError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSlot:
    """A slot that a capture holds.

    `is_alone`: True if it is the only slot, so that no other capture is in flight.
    `num_reductions`: reductions of the limit before the slot was taken.
    """

    is_alone: bool
    num_reductions: int


class CaptureSlots:
    """Slots for captures, between 1 and `most`. The number of slots is halved when hidden states
    had no room, and grows by one after as many successful captures as there are slots.

    Used on one event loop; a task takes one slot at a time.
    """

    def __init__(self, most: int) -> None:
        self._most, self._limiter = most, CapacityLimiter(most)
        self._num_reductions = self._num_since = 0

    @property
    def limit(self) -> int:
        """The number of slots now."""
        return int(self._limiter.total_tokens)

    @contextlib.asynccontextmanager
    async def take(self) -> AsyncGenerator[CaptureSlot]:
        """Async context manager that waits for a slot, and holds it."""
        async with self._limiter:
            is_alone = self.limit == self._limiter.borrowed_tokens == 1
            yield CaptureSlot(is_alone=is_alone, num_reductions=self._num_reductions)

    def note_success(self) -> None:
        """Count a capture whose hidden states had room; the number of slots may then grow."""
        self._num_since += 1
        if self._num_since >= self.limit and self.limit < self._most:
            self._limiter.total_tokens, self._num_since = self.limit + 1, 0

    def note_no_room(self, slot: CaptureSlot, error: TransferError) -> None:
        """Halve the number of slots after a capture whose hidden states had no room. A capture that
        took its slot before the last reduction changes nothing, since fewer captures run now. A
        single slot is kept.
        """
        if slot.num_reductions < self._num_reductions or self.limit == 1:
            return
        self._limiter.total_tokens = self.limit // 2
        self._num_reductions, self._num_since = self._num_reductions + 1, 0
        log.warning(
            "at most %d captures at a time, since the rows of more had no room: %s",
            self.limit,
            error.message,
        )
