"""Transfer of large payloads (blocks) of a span connection: the sender writes them to a ring of
memory registered with NIXL, and the peer reads them from there.

The connection carries only the place of a block, so that frames keep their order. A ring belongs to
one connection, and a block has stamps at both ends, which are checked after the read: a read that
is late, or reads a peer that is gone, delivers nothing. The end of a connection closes its NIXL
agent, after which no read can write to this process's memory.
"""

import logging
import math
import secrets
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fleet.config import FleetConfig
from fleet.core.errors import TransferError
from fleet.core.ids import StageName
from fleet.core.pages import Span
from fleet.transfer.agent import Agent, check_metadata
from fleet.transfer.memory import HostMemory
from fleet.transfer.reach import LOCAL, Reach, copies_between_processes, has_rdma

log = logging.getLogger(__name__)

MIN_BLOCK_BYTES = 2 << 20
"""Default payload size from which NIXL is used.

Source: `fleet bench --span-hops` between two processes of one host, with copies by the kernel. Time
by TCP divided by time by the ring, in eight runs: 0.9 to 1.8 for 1 MiB, 1.2 to 2.1 for 2 MiB, 1.3
to 1.8 for 4 MiB, 1.4 to 1.8 for 16 MiB; 0.6 to 0.8 for 256 KiB. A ninth gave 0.95 for 2 MiB.
"""
RING_BYTES = 64 << 20
MAX_BLOCK_SHARE = 4
"""A block is at most 1/4 of the ring; a larger payload travels on the connection."""
MAX_METADATA_BYTES = 1 << 20
"""Limit of a NIXL agent's metadata, which normally has some kilobytes."""
STAMP = struct.Struct("<Q")
BLOCK = struct.Struct("<QQQ")
"""Place of a block: its address in the sender's memory, payload length, and the stamp at both ends.
"""
READ_TIMEOUT_S = 5.0
AGENT_CLOSE_S = 2.0
PAUSE_S = 60.0
"""Time in which new connections use no blocks, after a live peer's memory could not be read."""
NUM_BUSY_POLLS, MIN_POLL_S, MAX_POLL_S = 20, 20e-6, 1e-3


def nixl_starts(reach: Reach = LOCAL) -> bool:
    """Return True if a NIXL agent can be created in this process. The first agent of a process
    takes 0.4 s, further ones some milliseconds.
    """
    try:
        Agent(f"start {secrets.token_hex(8)}", (), reach).close()
    except (ImportError, TransferError) as error:
        log.warning(
            "NIXL does not start here (%s); all rows between processes travel on connections", error
        )
        return False
    return True


@dataclass(slots=True, kw_only=True)
class BlockReads:
    """Settings of payloads that are read by NIXL, shared by all span connections of a process.

    `min_bytes`: smallest payload to transfer as a block. `ring_bytes`: size of a connection's ring.
    `reach`: the hosts and network devices that transfers may use. If a live peer's memory cannot be
    read, connections that open within `PAUSE_S` use no blocks.
    """

    min_bytes: int = MIN_BLOCK_BYTES
    ring_bytes: int = RING_BYTES
    reach: Reach = LOCAL
    _usable_from_s: float = -math.inf

    @property
    def is_usable(self) -> bool:
        return time.monotonic() >= self._usable_from_s

    def pause(self) -> None:
        """Use no blocks on connections that open within the next `PAUSE_S`."""
        self._usable_from_s = time.monotonic() + PAUSE_S

    @property
    def max_bytes(self) -> int:
        return self.ring_bytes // MAX_BLOCK_SHARE


def block_reads(config: FleetConfig, stage: StageName, reach: Reach) -> BlockReads | None:
    """Return the block settings for a stage's route; None if all payloads travel on its
    connections.

    Unless the configuration sets a size, blocks are used only where NIXL is faster than a
    connection: not over a network without RDMA, nor on a host whose kernel forbids copies between
    processes.
    """
    spans = config.stage(stage).spans
    if spans is None or config.transfer.kind == "redis":
        return None
    default = (
        MIN_BLOCK_BYTES if (has_rdma() if reach.devices else copies_between_processes()) else 0
    )
    min_bytes = default if spans.nixl_kib is None else spans.nixl_kib << 10
    return (
        BlockReads(min_bytes=min_bytes, reach=reach) if min_bytes and nixl_starts(reach) else None
    )


def _copy(source: memoryview, into: memoryview) -> None:
    """Copy bytes without holding the GIL, unlike an assignment to a memoryview."""
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))


class RingSpace:
    """Allocator of offsets in a ring. Space is freed in the order of its reservation. Pure."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._next = capacity, 0
        self._reserved: deque[tuple[int, int]] = deque()

    @property
    def num_reserved(self) -> int:
        return len(self._reserved)

    def reserve(self, size: int) -> int | None:
        """Reserve `size` contiguous bytes; return their offset, or None if the ring has no room for
        them.
        """
        if not self._reserved:
            self._next = 0
        start, first = self._next, self._reserved[0][0] if self._reserved else self._capacity
        if self._reserved and start > first and start + size > self._capacity:
            start = 0  # the rest of the ring is too short
        limit = self._capacity if start > first or not self._reserved else first
        if start + size > limit:
            return None
        self._reserved.append((start, size))
        self._next = start + size
        return start

    def free_first(self) -> None:
        self._reserved.popleft()


class BlockPort:
    """Block transfer at one end of a connection: ring, read buffer and NIXL agent, created on first
    use.

    `writing`: lock to hold while a block is written and sent, so that the ring's metadata is sent
    before the first block. Any thread may write; only the connection's reader thread reads.
    """

    def __init__(self, options: BlockReads, is_over: Callable[[], bool]) -> None:
        """Take the settings; no memory is allocated yet.

        `is_over` returns True once either side has closed the connection; a read in progress then
        ends.
        """
        self._options, self._is_over = options, is_over
        self.writing = threading.RLock()
        self._lock = threading.Lock()
        self._agent: Agent | None = None
        self._is_closed = False
        self._space = RingSpace(options.ring_bytes)
        self._ring: HostMemory | None = None
        self._inbox: HostMemory | None = None
        self._peer: str | None = None
        self._stamp = int.from_bytes(secrets.token_bytes(7))
        self.name = f"span {secrets.token_hex(8)}"
        self.peer_reads = False
        """True once the peer has announced that it can read blocks."""
        self.num_written = self.num_read = 0

    def fits(self, num_bytes: int) -> bool:
        """Return True if a payload of this size is to be sent as a block."""
        return self.peer_reads and self._options.min_bytes <= num_bytes <= self._options.max_bytes

    def write(
        self, buffers: Sequence[memoryview], num_bytes: int
    ) -> tuple[bytes, bytes | None] | None:
        """Write a block into the ring. The caller holds `writing`.

        Returns: the block's place, packed as `BLOCK`, and the ring's metadata to send before it, or
        None after the first block. None for both if the ring is full or cannot be created.
        """
        metadata = None
        if self._ring is None:
            metadata = self._open_ring()
            if metadata is None:
                return None
        ring = self._ring
        assert ring is not None
        size = num_bytes + 2 * STAMP.size
        with self._lock:
            offset = self._space.reserve(size)
        if offset is None:
            return None
        self._stamp += 1
        STAMP.pack_into(ring.view, offset, self._stamp)
        at = offset + STAMP.size
        for buffer in buffers:
            _copy(buffer, ring.view[at : at + buffer.nbytes])
            at += buffer.nbytes
        STAMP.pack_into(ring.view, at, self._stamp)
        self.num_written += 1
        return BLOCK.pack(ring.address + offset, num_bytes, self._stamp), metadata

    def free_first(self) -> None:
        """Free the space of the oldest block, which the peer has read. Raises: TransferError if
        there is none.
        """
        with self._lock:
            if not self._space.num_reserved:
                raise TransferError("the peer has read a block that was not written")
            self._space.free_first()

    def load_peer(self, name: bytes, metadata: memoryview) -> None:
        """Load the metadata of the peer's ring, after which its blocks can be read.

        Raises: TransferError if that fails, or if the peer sends a second ring.
        """
        if self._inbox is not None or metadata.nbytes > MAX_METADATA_BYTES:
            raise TransferError("the peer sent the metadata of a second ring, or too much of it")
        check_metadata(name.decode(errors="replace"), bytes(metadata))
        self._inbox = HostMemory(self._options.max_bytes + 2 * STAMP.size, huge_pages=True)
        agent = self._open_agent()
        agent.register(self._inbox.region)
        self._peer = agent.add_peer(bytes(metadata))

    def read(self, block: bytes | memoryview) -> memoryview:
        """Read a block from the peer's ring and return its payload. `block`: place of the block,
        packed as `BLOCK`.

        Raises: TransferError if the block cannot be read in time, or has changed.
        """
        if self._peer is None or self._inbox is None or len(block) != BLOCK.size:
            raise TransferError("the peer sent a block without its metadata")
        address, num_bytes, stamp = BLOCK.unpack(block)
        size = num_bytes + 2 * STAMP.size
        if size > self._inbox.length_bytes:
            raise TransferError(
                f"the peer sent a block of {num_bytes} bytes, limit {self._options.max_bytes}"
            )
        self._await(self._open_agent(), Span(address, self._inbox.address, size))
        view = self._inbox.view
        payload = np.empty(num_bytes, np.uint8).data
        _copy(view[STAMP.size : STAMP.size + num_bytes], payload)
        if {STAMP.unpack_from(view)[0], STAMP.unpack_from(view, size - STAMP.size)[0]} != {stamp}:
            raise TransferError("a block of the peer changed before it was read")
        STAMP.pack_into(view, 0, 0)
        self.num_read += 1
        return payload

    def _await(self, agent: Agent, span: Span) -> None:
        assert self._peer is not None
        handle, deadline_s = agent.start_read(self._peer, [span]), time.monotonic() + READ_TIMEOUT_S
        num_polls, pause_s = 0, MIN_POLL_S
        while not agent.is_done(handle):
            num_polls += 1
            if num_polls <= NUM_BUSY_POLLS:
                continue
            if self._is_over():
                raise TransferError("the connection is closed")
            if time.monotonic() > deadline_s:
                raise TransferError(
                    f"a block of {span.length_bytes} bytes was not read within {READ_TIMEOUT_S:g} s"
                )
            time.sleep(pause_s)  # polling without a pause would take a core from the computation
            pause_s = min(2 * pause_s, MAX_POLL_S)
        agent.release(handle)

    def _open_ring(self) -> bytes | None:
        """Allocate the ring and return its metadata; None if NIXL fails, and all payloads then
        travel on the connection.
        """
        try:
            agent, ring = self._open_agent(), HostMemory(self._options.ring_bytes, huge_pages=True)
            agent.register(ring.region)
            metadata = agent.metadata()
        except TransferError as error:
            log.warning("payloads of a span connection are not read by NIXL: %s", error)
            self.peer_reads = False
            return None
        self._ring = ring
        return metadata

    def _open_agent(self) -> Agent:
        with self._lock:
            if self._is_closed:
                raise TransferError("the connection is closed")
            if self._agent is None:
                self._agent = Agent(self.name, (), self._options.reach)
            return self._agent

    def close(self) -> None:
        """Close the NIXL agent: no read of this end can write to memory any more, and the peer
        cannot begin a read. Waits up to `AGENT_CLOSE_S`; a slower close ends in the background.
        """
        with self.writing, self._lock:
            self._is_closed = True
        if self._agent is not None:
            self._agent.begin_close(keep=(self._ring, self._inbox)).wait(AGENT_CLOSE_S)
