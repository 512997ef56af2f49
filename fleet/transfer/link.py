"""The reads from one peer, through an agent of their own: tearing that agent down is the one way to stop a late landing.

A read's destination slot: allocated by `pull`; freed when the bytes were copied out, when the read ended unwanted, or with the
agent. In between it may be quarantined: the read was given up, and still may land. Knows no requests.
"""

import time

from fleet.core.chunk import TensorRef
from fleet.core.errors import TransferError
from fleet.core.ids import WorkerId
from fleet.transfer.agent import Agent
from fleet.transfer.arena import Arena, Slot
from fleet.transfer.memory import HostMemory, stored_bytes


class NixlPull:
    """One read under way, ended with bytes, or ended with a failure.

    Invariants: at most one of `data`, `failure` is set, and once set it stays.
    Units: `deadline_s` is a time of `time.monotonic`.
    """

    def __init__(self, link: "Link", ref: TensorRef, slot: Slot, handle: int, deadline_s: float) -> None:
        self.ref, self.slot, self.handle, self.deadline_s = ref, slot, handle, deadline_s
        self.data: bytes | None = None
        self.failure: str | None = None
        self._link = link

    def poll(self) -> bytes | None:
        if self.wanted():
            self._link.advance(self)
        if self.failure is not None:
            raise TransferError(self.failure)
        return self.data

    def cancel(self) -> None:
        if self.wanted():
            self._link.give_up(self, f"the read of slot {self.ref.slot} of {self.ref.agent} was cancelled")

    def wanted(self) -> bool:
        return self.data is None and self.failure is None


class Link:
    """Reads from one peer, until `close`.

    Invariants: `reads` are those that NIXL may still be writing for, each with its slot held; none after `close`.
    """

    def __init__(self, name: str, peer: WorkerId, peer_metadata: bytes, memory: HostMemory, arena: Arena) -> None:
        """Raises: TransferError if NIXL cannot start, or the metadata is not the peer's."""
        self.peer = peer
        self.closed = False
        self.reads: set[NixlPull] = set()
        self._memory, self._arena = memory, arena
        self._agent = Agent(name, memory)
        named = self._agent.add_peer(peer_metadata)
        if named != peer:
            self._agent.close()
            raise TransferError(f"the metadata given for {peer} is that of {named}")

    def pull(self, ref: TensorRef, deadline_s: float) -> NixlPull:
        """Begin a read; a link that NIXL refuses it on is closed. Raises: TransferError then, or when the arena is full."""
        num_bytes = stored_bytes(ref.length_bytes)
        slot = self._arena.allocate(num_bytes)
        try:
            handle = self._agent.start_read(self.peer, ref.address, self._memory.address + slot.offset, num_bytes)
        except TransferError as error:
            self.close(error.message)
            self._arena.free(slot)
            raise
        pull = NixlPull(self, ref, slot, handle, deadline_s)
        self.reads.add(pull)
        return pull

    def advance(self, pull: NixlPull) -> None:
        """Bring a wanted read to its end if it has come to one, or to its deadline."""
        if self._landed(pull):
            try:
                pull.data = self._memory.open(pull.slot, pull.ref)
            except TransferError as error:
                pull.failure = error.message
            self._end(pull)
        elif pull.wanted() and time.monotonic() > pull.deadline_s:
            self.give_up(pull, f"slot {pull.ref.slot} of {self.peer} did not arrive before the deadline")

    def give_up(self, pull: NixlPull, reason: str) -> None:
        """Stop wanting a read that may still land: its destination is out of use until that is certain."""
        pull.failure = reason
        self._arena.quarantine(pull.slot)

    def reap(self) -> None:
        """Free the destinations of given-up reads that have ended; give up those that nobody polled before the deadline."""
        now_s = time.monotonic()
        for pull in list(self.reads):
            if pull.wanted() and now_s > pull.deadline_s:
                self.give_up(pull, f"slot {pull.ref.slot} of {self.peer} was not asked for before the deadline")
            if not pull.wanted() and not self.closed and self._landed(pull):
                self._end(pull)

    def close(self, reason: str) -> None:
        """Tear the agent down, then free every destination; reads that are still wanted fail. Idempotent."""
        self.closed = True
        self._agent.close()
        for pull in self.reads:
            if pull.wanted():
                pull.failure = reason
            self._arena.free(pull.slot)
        self.reads.clear()

    def _landed(self, pull: NixlPull) -> bool:
        """Whether NIXL is through with a read. A failed one takes the link down, for its connection is gone."""
        try:
            return self._agent.is_done(pull.handle)
        except TransferError as error:
            self.close(f"the connection to {self.peer} broke: {error.message}")
            return False

    def _end(self, pull: NixlPull) -> None:
        self.reads.discard(pull)
        self._arena.free(pull.slot)
        self._agent.release(pull.handle)
