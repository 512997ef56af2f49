"""Follows the fleet's version of the draft head in one worker: reads the version by NIXL from any
worker that holds it, loads and uses it, and goes back to the version before if it is worse.

All workers that draft with a head, and the trainer, hold a packed head in memory that is registered
when the worker starts. Other workers read the head there, and check it against the version's hash,
so that a holder may change its memory at any time.
"""

import ctypes
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from fleet.config import FleetConfig
from fleet.control import scripts
from fleet.control.scripts import Call
from fleet.core.errors import ConfigError, FleetError, TransferError, failure_of
from fleet.core.ids import RoleName, StageName, WorkerId
from fleet.core.pages import Memory, Span
from fleet.drafts.exchange.watch import HeadWatch
from fleet.drafts.figures.head_holders import HeldHead
from fleet.drafts.figures.speculation import SpeculationFigures
from fleet.drafts.figures.training import DraftVersion
from fleet.stages.base import HeadExchange
from fleet.transfer.base import BlockRead, Transfer
from fleet.worker.process.redis_link import RedisLink

log = logging.getLogger(__name__)
RETRY_S = 1.0
LOADING_ERRORS = (
    ArithmeticError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)


class HeadMemory:
    """Host memory, registered for transfers, for one packed draft head."""

    def __init__(self, capacity_bytes: int, transfer: Transfer) -> None:
        """Allocate and register `capacity_bytes`. Raises: TransferError if the transfer refuses the
        memory.
        """
        self._data = np.zeros(capacity_bytes, np.uint8)
        self.address = self._data.ctypes.data
        transfer.register(Memory(self.address, capacity_bytes))

    @property
    def capacity_bytes(self) -> int:
        return len(self._data)

    def read(self, num_bytes: int) -> bytes:
        return self._data[:num_bytes].tobytes()

    def write(self, data: bytes) -> None:
        ctypes.memmove(self.address, data, len(data))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSettings:
    """Settings for the exchange of a stage's draft head.

    `holder_roles`: roles whose workers may hold versions. `deadline_s`: time limit of one read.
    `floor`: see `HeadWatch`.
    """

    stage: StageName
    holder_roles: Sequence[RoleName]
    deadline_s: float
    floor: float


def head_settings(config: FleetConfig) -> HeadSettings:
    main = config.graph_declaration().main_stage.name
    roles = [role.name for role in config.roles() if role.stage == main or role.optional]
    return HeadSettings(
        stage=main,
        holder_roles=roles,
        deadline_s=config.transfer.deadline_s,
        floor=config.training.floor,
    )


class HeadFollower:
    """Follows the fleet's version of a stage's draft head. Not thread-safe; heads are loaded in a
    thread of their own.
    """

    def __init__(
        self,
        settings: HeadSettings,
        heads: HeadExchange,
        memory: HeadMemory,
        transfer: Transfer,
        link: RedisLink,
        peer: Callable[[WorkerId], bytes],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with the head that the worker was started with.

        `heads`: loads and uses heads. `memory`: memory that holds the present version for other
        workers. `peer`: returns the transfer metadata of another worker.
        """
        self._settings = settings
        self._heads = heads
        self._memory = memory
        self._transfer, self._link = transfer, link
        self._peer, self._clock = peer, clock
        self._watch = HeadWatch(settings.floor)
        self._held: HeldHead | None = None
        """The version in the memory; None before the first one, and from the time at which another
        is written until it is in use.
        """
        self._used: DraftVersion | None = None
        self._wanted: DraftVersion | None = None
        self._num_bytes = 0
        self._read: BlockRead | None = None
        self._loading: Future[object] | None = None
        self._thread = ThreadPoolExecutor(1, "fleet-draft-head")
        self._retry_s = 0.0
        self._failed: set[tuple[WorkerId, str]] = set()
        self._unusable: set[str] = set()
        self._logged = ""

    @property
    def held(self) -> HeldHead | None:
        """The version in this worker's memory, which other workers may read; None before the first
        one, and from the time at which another is written until it is in use.
        """
        return self._held

    def advance(self, figures: SpeculationFigures | None) -> Sequence[Call]:
        """Take the next action towards the fleet's version, and return Redis scripts to run. Called
        regularly.

        `figures`: draft statistics of this worker; if they show that the present version is worse
        than the one before, a script that promotes the version before is returned. A version that
        is damaged or does not fit is not tried again; other errors are retried after `RETRY_S`.
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
        worse = self._watch.observe(figures) if figures is not None else None
        if worse is None:
            return ()
        log.warning(
            "version %d of the draft head gives way to version %d: %s",
            worse.version,
            worse.before,
            worse.reason,
        )
        stage, worker = self._settings.stage, self._link.worker
        hashes = worse.sha256, worse.sha256_before
        return [scripts.promote_version(worker, None, stage, *hashes, worse.reason)]

    def _begin(self) -> None:
        sha256 = self._link.chosen_version(self._settings.stage)
        used = self._used.sha256 if self._used is not None else ""
        if sha256 == used or sha256 in self._unusable:
            return
        self._retry_s = self._clock() + RETRY_S
        if not sha256:
            self._heads.use(None, None)
            self._used = None
            log.info("drafts are made with the head of the start again")
            return
        self._wanted = version = self._link.read_version(sha256)
        if version is None:
            return
        local = self._heads.read_local(sha256)
        if local is not None:
            self._reserve(len(local))
            self._memory.write(local)
            self._load(local)
            return
        holders = self._link.find_head_holders(sha256, self._settings.holder_roles)
        holder = next((worker for worker in holders if (worker, sha256) not in self._failed), None)
        if holder is None:
            self._failed.clear()
            return
        self._failed.add((holder, sha256))
        held = holders[holder]
        self._reserve(held.num_bytes)
        span = Span(held.address, self._memory.address, held.num_bytes)
        self._read = self._transfer.read_blocks(
            holder, self._peer(holder), [span], self._settings.deadline_s
        )

    def _reserve(self, num_bytes: int) -> None:
        """Withdraw the version in the memory, so that the wanted version can be written there.
        Raises: TransferError if the memory is too small.
        """
        if not 0 < num_bytes <= self._memory.capacity_bytes:
            raise TransferError(
                f"version {self._number} has {num_bytes} bytes, there is room for "
                f"{self._memory.capacity_bytes}"
            )
        self._held, self._num_bytes = None, num_bytes

    @property
    def _number(self) -> int:
        return self._wanted.number if self._wanted is not None else 0

    def _continue_read(self, read: BlockRead) -> None:
        # A read that was given up may still write: its memory is used again once it has settled.
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
        except LOADING_ERRORS as error:
            raise failure_of("the draft head cannot be loaded", error) from error
        version, self._wanted = self._wanted, None
        assert version is not None, "a head that is not wanted"
        self._heads.use(head, version)
        self._used = version
        self._failed.clear()
        self._held = HeldHead(
            sha256=version.sha256, address=self._memory.address, num_bytes=self._num_bytes
        )
        log.info("version %d of the draft head is in use", version.number)

    def _give_up(self, error: FleetError) -> None:
        if isinstance(error, ConfigError) and self._wanted is not None:
            self._unusable.add(self._wanted.sha256)
        if error.message != self._logged:
            log.warning(
                "version %d of the draft head is not used, version %d stays: %s",
                self._number,
                self._used.number if self._used is not None else 0,
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
