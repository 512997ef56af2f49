"""The version of the draft head that a worker has, and that it follows: its bytes are read by NIXL
from any worker that has them.

Each worker that drafts with a head, and the trainer, holds one packed head in memory that it
registered at its start, from which others read it. The hash of the version decides whether what
arrived is used, so a holder may change its own at any time.
"""

import ctypes
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from fleet.config import FleetConfig
from fleet.core.errors import ConfigError, FleetError, TransferError, failure_of
from fleet.core.ids import RoleName, StageName, WorkerId
from fleet.core.pages import Memory, Span
from fleet.drafts.figures.head_holders import HeldHead
from fleet.drafts.figures.training import DraftVersion
from fleet.stages.base import HeadExchange
from fleet.transfer.base import BlockRead, Transfer
from fleet.worker.process.redis_link import RedisLink

if TYPE_CHECKING:
    from fleet.worker.loop.loop import WorkerLoop

log = logging.getLogger(__name__)
RETRY_S = 1.0


class HeadMemory:
    """Registered memory for one packed head."""

    def __init__(self, capacity_bytes: int, transfer: Transfer) -> None:
        """Raises: TransferError if the transfer refuses the memory."""
        self._data = np.zeros(capacity_bytes, np.uint8)
        self.address = self._data.ctypes.data
        self.is_shared = transfer.register(Memory(self.address, capacity_bytes))

    @property
    def capacity_bytes(self) -> int:
        return len(self._data)

    def read(self, num_bytes: int) -> bytes:
        return self._data[:num_bytes].tobytes()

    def write(self, data: bytes) -> None:
        ctypes.memmove(self.address, data, len(data))


class HeadFollower:
    """Follows the fleet's version of a stage's draft head. Not thread-safe; heads are loaded in a
    thread.

    `held`: the version in the memory, None while it changes. `stage`: that drafts; `holder_roles`:
    of workers that may hold versions.
    """

    def __init__(
        self,
        stage: StageName,
        heads: HeadExchange,
        memory: HeadMemory,
        transfer: Transfer,
        link: RedisLink,
        holder_roles: Sequence[RoleName],
        peer: Callable[[WorkerId], bytes],
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._heads, self._memory, self._transfer, self._link = heads, memory, transfer, link
        self._stage, self._roles, self._peer, self._deadline_s, self._clock = (
            stage,
            holder_roles,
            peer,
            deadline_s,
            clock,
        )
        self.held: HeldHead | None = None
        self._used = 0
        self._wanted: DraftVersion | None = None
        self._num_bytes = 0
        self._read: BlockRead | None = None
        self._loading: Future[object] | None = None
        self._thread = ThreadPoolExecutor(1, "fleet-draft-head")
        self._retry_s = 0.0
        self._failed: set[tuple[WorkerId, int]] = set()
        self._unusable: set[int] = set()
        self._logged = ""

    def advance(self) -> None:
        """Continue; called regularly. A version that cannot be used is refused once, and the
        present one stays.
        """
        try:
            if self._read is not None:
                self._continue_read(self._read)
            elif self._loading is not None:
                self._end_loading(self._loading)
            elif self._clock() >= self._retry_s:
                self._begin()
        except FleetError as error:
            self._give_up(error)

    def _begin(self) -> None:
        number = self._link.chosen_version(self._stage)
        if number == self._used or number in self._unusable:
            return
        self._retry_s = self._clock() + RETRY_S
        if not number:
            self._heads.use(None, 0)
            self._used = 0
            log.info("drafts are made with the head of the start again")
            return
        self._wanted = version = self._link.read_version(number)
        if version is None:
            return
        local = self._heads.read_local(version.sha256)
        if local is not None:
            self._check_size(len(local))
            self.held, self._num_bytes = None, len(local)
            self._memory.write(local)
            self._load(local)
            return
        holders = self._link.find_head_holders(number, self._roles)
        holder = next((worker for worker in holders if (worker, number) not in self._failed), None)
        if holder is None:
            self._failed.clear()
            return
        self._failed.add((holder, number))
        held = holders[holder]
        self._check_size(held.num_bytes)
        self.held, self._num_bytes = None, held.num_bytes
        span = Span(held.address, self._memory.address, held.num_bytes)
        self._read = self._transfer.read_blocks(
            holder, self._peer(holder), [span], self._deadline_s
        )

    def _check_size(self, num_bytes: int) -> None:
        if not 0 < num_bytes <= self._memory.capacity_bytes:
            raise TransferError(
                f"version {self._number} has {num_bytes} bytes, there is room for "
                f"{self._memory.capacity_bytes}"
            )

    @property
    def _number(self) -> int:
        return self._wanted.number if self._wanted is not None else 0

    def _continue_read(self, read: BlockRead) -> None:
        # given up; its destination is used again once nothing can write to it
        if self._wanted is None:
            self._read = None if read.settled else read
        elif read.poll():
            self._read = None
            self._load(self._memory.read(self._num_bytes))

    def _load(self, data: bytes) -> None:
        assert self._wanted is not None, "a head that is not wanted"
        self._loading = self._thread.submit(self._heads.prepare, data, self._wanted.sha256)

    def _end_loading(self, loading: "Future[object]") -> None:
        if not loading.done():
            return
        self._loading = None
        try:
            head = loading.result()
        except (
            ArithmeticError,
            LookupError,
            MemoryError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            raise failure_of("the draft head cannot be loaded", error) from error
        self._heads.use(head, self._number)
        self._used, self._wanted = self._number, None
        self._failed.clear()
        self.held = HeldHead(
            version=self._used, address=self._memory.address, num_bytes=self._num_bytes
        )
        log.info("version %d of the draft head is in use", self._used)

    def _give_up(self, error: FleetError) -> None:
        if isinstance(error, ConfigError):
            self._unusable.add(self._number)
        if error.message != self._logged:
            log.warning(
                "version %d of the draft head is not used, version %d stays: %s",
                self._number,
                self._used,
                error.message,
            )
        self._logged = error.message
        self._wanted, self._retry_s = None, self._clock() + RETRY_S
        if self._read is not None:
            self._read.cancel()

    def close(self) -> None:
        if self._read is not None:
            self._read.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)


def follow_heads(
    config: FleetConfig, heads: HeadExchange, memory: HeadMemory, loop: "WorkerLoop"
) -> HeadFollower:
    """Return the follower of a worker's loop."""
    main = config.graph_declaration().main_stage.name
    roles = [role.name for role in config.roles() if role.stage == main or role.optional]
    return HeadFollower(
        main,
        heads,
        memory,
        loop.transfer,
        loop.link,
        roles,
        loop.receiver.peer,
        config.transfer.deadline_s,
    )
