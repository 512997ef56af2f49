"""Reads from one peer, through a NIXL agent of their own: closing that agent is the only way to
stop a late write.

A read into the arena has a destination slot, which `pull` allocates. The slot is freed when the
bytes were copied, when the abandoned read has completed, or when the agent has closed; it is
quarantined while its read is abandoned and may still complete. A read of blocks writes to memory of
the caller, who must not reuse it before the read is `settled`. An agent closes in the background,
and may never do so: its destinations then stay reserved. Knows no requests.
"""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from fleet.core.chunk import TensorRef
from fleet.core.errors import TransferError
from fleet.core.ids import WorkerId
from fleet.core.pages import Memory, Span
from fleet.transfer.agent import Agent, check_metadata, readable_address
from fleet.transfer.arena import Arena, ArenaSlot
from fleet.transfer.closing import AgentClosing
from fleet.transfer.memory import HostMemory, stored_bytes
from fleet.transfer.reach import LOCAL, Reach

FIRST_READ_BYTES = 8
ANSWER_S = 1.0
"""Longest time that the close of a link in good order waits for the peer's answer to its request to
connect.
"""
POLL_S = 0.001


class RemoteRead:
    """Read in progress, completed or failed.

    Invariants: `settled` once NIXL no longer writes for it; until then its destination is reserved.
    `failure`, once set, is final, and the bytes are not used. Units: `deadline_s` is a time of
    `time.monotonic`.
    """

    def __init__(self, link: "PeerLink", what: str, handle: int, deadline_s: float) -> None:
        self.what = what
        self.handle = handle
        self.deadline_s = deadline_s
        self.failure: str | None = None
        self.settled = False
        self._link = link

    def advance(self) -> None:
        """Check whether the read has completed. Raises: TransferError once it has failed."""
        if self.is_wanted():
            self._link.advance(self)
        if self.failure is not None:
            raise TransferError(self.failure)

    def cancel(self) -> None:
        if self.is_wanted():
            self._link.give_up(self, f"the read of {self.what} was cancelled")

    def is_wanted(self) -> bool:
        return not self.settled and self.failure is None

    def on_landed(self) -> None:
        """Handle the arrival of all bytes in the destination (hook for subclasses)."""

    def settle(self) -> None:
        """Record that nothing can write to the destination any more."""
        self.settled = True

    def on_abandoned(self) -> None:
        """Handle the abandonment of a read that may still complete (hook for subclasses)."""


class NixlPull(RemoteRead):
    """A read of one tensor through a slot of the arena.

    Invariants: at most one of `data`, `failure` is set.
    """

    def __init__(
        self, link: "PeerLink", ref: TensorRef, slot: ArenaSlot, handle: int, deadline_s: float
    ) -> None:
        super().__init__(link, f"slot {ref.slot} of {ref.agent}", handle, deadline_s)
        self.ref = ref
        self.slot = slot
        self.data: bytes | None = None

    def poll(self) -> bytes | None:
        self.advance()
        return self.data

    def on_landed(self) -> None:
        try:
            self.data = self._link.memory.open(self.slot, self.ref)
        except TransferError as error:
            self.failure = error.message

    def settle(self) -> None:
        super().settle()
        self._link.arena.free(self.slot)

    def on_abandoned(self) -> None:
        self._link.arena.quarantine(self.slot)


class NixlBlockRead(RemoteRead):
    """A read of blocks from a peer's registered memory."""

    def poll(self) -> bool:
        self.advance()
        return self.settled


ReadT = TypeVar("ReadT", bound=RemoteRead)


class PeerLink:
    """Connection to one peer and all reads from it, until `close`.

    Opening a link begins a read of some bytes: once this read ends, the peer has answered the
    request to connect. If this end closed earlier, the peer would crash when the request arrives:
    UCX 1.23 handles the error by a configuration that the endpoint does not have.

    Invariants: `reads` contains every pull and block read for which NIXL may still write to memory.
    The owner of a closed link keeps it until `settle` returns True.
    """

    def __init__(
        self,
        name: str,
        peer: WorkerId,
        peer_metadata: bytes,
        memory: HostMemory,
        arena: Arena,
        more: Sequence[Memory] = (),
        reach: Reach = LOCAL,
    ) -> None:
        """Connect to the peer. `name`: name of this end's agent; `memory`: memory of the arena;
        `more`: further memory into which blocks are read.

        Raises: TransferError if NIXL cannot start, or the metadata is not the peer's.
        """
        self.peer = peer
        self.reads: set[RemoteRead] = set()
        self.memory = memory
        self.arena = arena
        self._closing: AgentClosing | None = None
        check_metadata(peer, peer_metadata)
        self._first_bytes = HostMemory(FIRST_READ_BYTES)
        self._agent = Agent(name, [memory.region, self._first_bytes.region, *more], reach)
        self._first_read: int | None = None
        try:
            self._connect(peer_metadata)
        except BaseException:
            self.close("the peer cannot be read")
            raise

    def _connect(self, peer_metadata: bytes) -> None:
        named = self._agent.add_peer(peer_metadata)
        if named != self.peer:
            raise TransferError(f"the metadata registered for {self.peer} is that of {named}")
        first = Span(readable_address(peer_metadata), self._first_bytes.address, FIRST_READ_BYTES)
        self._first_read = self._agent.start_read(self.peer, [first])

    @property
    def closed(self) -> bool:
        """True once the link is closed: no read begins or succeeds any more."""
        return self._closing is not None

    def pull(self, ref: TensorRef, deadline_s: float) -> NixlPull:
        """Begin to read a tensor into a slot of the arena. Raises: TransferError when the arena is
        full, or when NIXL refuses the read, which closes the link.
        """
        num_bytes = stored_bytes(ref.length_bytes)
        slot = self.arena.allocate(num_bytes)
        try:
            handle = self._prepare(
                [Span(ref.address, self.memory.address + slot.offset, num_bytes)]
            )
        except TransferError:
            self.arena.free(slot)
            raise
        return self._post(NixlPull(self, ref, slot, handle, deadline_s))

    def read_blocks(self, spans: Sequence[Span], deadline_s: float) -> NixlBlockRead:
        """Begin to read blocks into memory that the caller reserves. Raises: TransferError when
        NIXL refuses the read, which closes the link.
        """
        what = f"{len(spans)} blocks of {self.peer}"
        return self._post(NixlBlockRead(self, what, self._prepare(spans), deadline_s))

    def _prepare(self, spans: Sequence[Span]) -> int:
        try:
            return self._agent.prepare_read(self.peer, spans)
        except TransferError as error:
            self.close_in_order(error.message)
            raise

    def _post(self, read: ReadT) -> ReadT:
        """Begin a read. If that fails, close the link: the read has failed, but its destination
        stays reserved until the agent has closed, since a part of it may have begun.
        """
        self.reads.add(read)
        try:
            self._agent.post_read(read.handle)
        except TransferError as error:
            self.close_in_order(error.message)
        return read

    def advance(self, read: RemoteRead) -> None:
        """End a read that is still wanted, if it has completed or reached its deadline."""
        if self._has_landed(read):
            read.on_landed()
            self._end(read)
        elif read.is_wanted() and time.monotonic() > read.deadline_s:
            self.give_up(read, f"{read.what} did not arrive before the deadline")

    def give_up(self, read: RemoteRead, reason: str) -> None:
        """Abandon a read that may still complete: its destination stays reserved until then."""
        read.failure = reason
        read.on_abandoned()

    def reap(self) -> None:
        """Settle abandoned reads that have completed; abandon reads that were not polled before the
        deadline.
        """
        now_s = time.monotonic()
        for read in list(self.reads):
            if read.is_wanted() and now_s > read.deadline_s:
                self.give_up(read, f"{read.what} was not polled before the deadline")
            if not read.is_wanted() and not self.closed and self._has_landed(read):
                self._end(read)

    def settle(self) -> bool:
        """Settle every read if the agent of the closed link has closed, after which nothing writes
        to memory any more; return False otherwise.
        """
        if self._closing is None or not self._closing.is_done:
            return False
        for read in self.reads:
            read.settle()
        self.reads.clear()
        return True

    def close_in_order(self, reason: str) -> AgentClosing:
        """Fail every read that is still wanted, and close the agent in the background once the peer
        has answered the request to connect, or after `ANSWER_S`; return the close. Idempotent.
        """
        return self.close(reason, before=self._await_answer)

    def _await_answer(self) -> None:
        deadline_s = time.monotonic() + ANSWER_S
        while not self._is_answered() and time.monotonic() < deadline_s:
            time.sleep(POLL_S)

    def _is_answered(self) -> bool:
        """Return True if the peer has answered the request to connect, or can no longer answer
        it.
        """
        if self._first_read is None:
            return True
        try:
            if not self._agent.is_done(self._first_read):
                return False
            self._agent.release(self._first_read)
        except TransferError:
            pass
        self._first_read = None
        return True

    def close(self, reason: str, before: Callable[[], None] | None = None) -> AgentClosing:
        """Fail every read that is still wanted, and begin to close the agent; return the close, on
        which callers can wait. Idempotent. `before`: see `Agent.begin_close`.
        """
        if self._closing is None:
            for read in self.reads:
                if read.is_wanted():
                    self.give_up(read, reason)
            self._closing = self._agent.begin_close(before, keep=self)
        return self._closing

    def _has_landed(self, read: RemoteRead) -> bool:
        """Return True if NIXL has completed a read. A failed read closes the link, since its
        connection is gone.
        """
        try:
            return self._agent.is_done(read.handle)
        except TransferError as error:
            self.close(f"the connection to {self.peer} broke: {error.message}")
            return False

    def _end(self, read: RemoteRead) -> None:
        self.reads.discard(read)
        read.settle()
        self._agent.release(read.handle)
