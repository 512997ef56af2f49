"""A worker's end of NIXL: one arena holds the tensors that the worker publishes and the tensors
that it pulls.

NIXL does not fence, so every read has a deadline, and its bytes are used only if generation and
checksum are right. There are two kinds of agent: one from which peers read, with the worker's name
and lifetime, and one per peer from which this worker reads.
"""

import time
from collections.abc import Sequence

from fleet.core.chunk import TensorRef, WireTensor
from fleet.core.errors import TransferError
from fleet.core.ids import RequestId, WorkerId
from fleet.core.pages import Memory, Span
from fleet.transfer import closing, peer_link
from fleet.transfer.agent import BACKEND, HOST_DEVICE, Agent
from fleet.transfer.arena import Arena
from fleet.transfer.memory import HostMemory, flat_bytes, stored_bytes
from fleet.transfer.peer_link import NixlBlockRead, NixlPull, PeerLink
from fleet.transfer.reach import LOCAL, Reach

MAX_FORGOTTEN = 1024
"""Number of the latest forgotten peers whose ids are kept, so that reads from them are refused.
Reads from peers forgotten earlier fail since Redis no longer lists these peers.
"""


class NixlTransfer:
    """Implements `base.Transfer` by NIXL.

    Invariants: a slot is in use only while a request has published it or a read may write to it.
    Links close in the background, so no call but `close` waits for that.
    Raises: ImportError where NIXL is missing, TransferError where it does not start.
    """

    def __init__(
        self, agent: WorkerId, arena_bytes: int, request_cap_bytes: int, reach: Reach = LOCAL
    ) -> None:
        self.agent = agent
        self.reach = reach
        self.arena = Arena(capacity_bytes=arena_bytes, request_cap_bytes=request_cap_bytes)
        self.memory = HostMemory(arena_bytes)
        self._server = Agent(agent, [self.memory.region], reach)
        self._metadata = self._server.metadata()
        self._more: list[Memory] = []
        self._links: dict[WorkerId, PeerLink] = {}
        self._ending: list[PeerLink] = []
        """Closed links whose agents have not closed yet."""
        self._forgotten: dict[WorkerId, None] = {}

    def register(self, memory: Memory) -> bool:
        assert not self._links, "memory is registered before anything is pulled"
        self._server.register(memory)
        self._metadata = self._server.metadata()
        self._more.append(memory)
        return True

    @property
    def shares_memory(self) -> bool:
        return bool(self._more)

    def metadata(self) -> bytes:
        return self._metadata

    def publish(
        self, request: RequestId, dtype: str, shape: tuple[int, ...], data: bytes | memoryview
    ) -> WireTensor:
        self.reap()
        source = flat_bytes(dtype, shape, data)
        slot = self.arena.allocate(stored_bytes(source.nbytes), request)
        ref = TensorRef(
            agent=self.agent,
            address=self.memory.address + slot.offset,
            length_bytes=source.nbytes,
            device_id=HOST_DEVICE,
            generation=slot.generation,
            checksum=self.memory.seal(slot, source),
            slot=slot.index,
        )
        return WireTensor(dtype=dtype, shape=shape, ref=ref)

    def pull(self, ref: TensorRef, peer_metadata: bytes, deadline_s: float) -> NixlPull:
        return self._link(ref.agent, peer_metadata).pull(ref, time.monotonic() + deadline_s)

    def connect(self, peer: WorkerId, peer_metadata: bytes) -> None:
        self._link(peer, peer_metadata)

    def read_blocks(
        self, peer: WorkerId, peer_metadata: bytes, spans: Sequence[Span], deadline_s: float
    ) -> NixlBlockRead:
        return self._link(peer, peer_metadata).read_blocks(spans, time.monotonic() + deadline_s)

    def release(self, request: RequestId) -> None:
        for slot in self.arena.free_request(request):
            self.memory.wipe(slot)

    def peers(self) -> list[WorkerId]:
        self.reap()
        return list(self._links)

    def stalled_peers(self) -> list[WorkerId]:
        self.reap()
        return [
            peer
            for peer, link in self._links.items()
            if any(not pull.is_wanted() for pull in link.reads)
        ]

    def forget_peer(self, peer: WorkerId) -> None:
        self._forgotten[peer] = None
        for oldest in list(self._forgotten)[:-MAX_FORGOTTEN]:
            del self._forgotten[oldest]
        link = self._links.pop(peer, None)
        if link is not None:
            link.close_in_order(f"{peer} is gone")
            self._ending.append(link)

    def used_slots(self) -> int:
        self.reap()
        return self.arena.used_slots

    def used_bytes(self) -> int:
        return self.arena.used_bytes

    @property
    def registered_address(self) -> int:
        return self.memory.address

    @property
    def registered_bytes(self) -> int:
        return self.memory.length_bytes + sum(region.length_bytes for region in self._more)

    @property
    def backend(self) -> str:
        return f"nixl {BACKEND}"

    def reap(self) -> None:
        """Free the destinations of abandoned reads that have completed."""
        for peer, link in list(self._links.items()):
            link.reap()
            if link.closed:
                del self._links[peer]
                self._ending.append(link)
        self._ending = [link for link in self._ending if not link.settle()]

    def close(self) -> bool:
        closings = [
            link.close_in_order(f"{self.agent} is closing")
            for link in (*self._links.values(), *self._ending)
        ]
        until_s = time.monotonic() + peer_link.ANSWER_S + closing.CLOSE_S
        have_closed = [each.wait(until_s - time.monotonic()) for each in closings]
        self.reap()
        return self._server.close() and all(have_closed)

    def _link(self, peer: WorkerId, peer_metadata: bytes) -> PeerLink:
        if peer in self._forgotten:
            raise TransferError(f"{peer} is gone; a worker that joins again has a new id")
        self.reap()
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = PeerLink(
                f"{self.agent}<{peer}",
                peer,
                peer_metadata,
                self.memory,
                self.arena,
                self._more,
                self.reach,
            )
        return link
