"""Contract of block reads between two processes: each block is written to its destination, which
stays reserved while it may be written.
"""

from collections.abc import Iterator

import pytest

from fleet.core.errors import TransferError
from fleet.core.ids import WorkerId
from fleet.core.pages import Memory, Span
from fleet.transfer.base import BlockRead
from fleet.transfer.inline import InlineTransfer
from fleet.transfer.memory import HostMemory
from fleet.transfer.nixl import NixlTransfer
from fleet.transfer.reach import LOCAL, Reach
from tests.contract.transfer_peer import PeerCommand, PeerProcess, pattern, peer_process
from tests.support import wait_until

pytestmark = pytest.mark.one_file_in(3, "transfers between processes")

MIB = 1024 * 1024
LENGTH_BYTES = 8 * MIB
BLOCK_BYTES = 4096
DEADLINE_S, SHORT_S = 10.0, 0.3
TCP_ALONE = {"UCX_TLS": "tcp"}
PAINT = 0xA5


class BlockReader:
    """A transfer and memory of its own that it reads blocks into."""

    def __init__(self, reach: Reach = LOCAL) -> None:
        self.transfer = NixlTransfer(WorkerId("reader@here:30"), MIB, MIB, reach)
        self.memory = HostMemory(LENGTH_BYTES)
        assert self.transfer.register(self.memory.region)
        self.paint()

    def paint(self) -> None:
        self.memory.view[:] = bytes([PAINT]) * LENGTH_BYTES

    def read(
        self, peer: PeerProcess, spans: list[Span], deadline_s: float = DEADLINE_S
    ) -> BlockRead:
        return self.transfer.read_blocks(peer.worker, peer.metadata, spans, deadline_s)

    def wait_settled(self, read: BlockRead) -> None:
        wait_until(lambda: self.transfer.reap() or read.settled, "the read to land")

    def whole(self, peer: PeerProcess) -> list[Span]:
        assert peer.lent is not None
        return [Span(peer.lent.address, self.memory.address, LENGTH_BYTES)]


@pytest.fixture
def reader() -> Iterator[BlockReader]:
    reader = BlockReader()
    yield reader
    reader.transfer.close()


@pytest.fixture
def tcp_reader() -> Iterator[BlockReader]:
    reader = BlockReader(Reach(("lo",)))
    yield reader
    reader.transfer.close()


@pytest.fixture(scope="module")
def peer() -> Iterator[PeerProcess]:
    with peer_process("nixl", "lender@peer:31", LENGTH_BYTES) as process:
        yield process


@pytest.fixture
def tcp_peer() -> Iterator[PeerProcess]:
    with peer_process(
        "nixl", "lender@peer:32", LENGTH_BYTES, env=TCP_ALONE, interface="lo"
    ) as process:
        yield process


def finish(read: BlockRead) -> None:
    """Wait until a block read ends and its destination is settled. Raises: TransferError if the
    read failed.
    """
    wait_until(read.poll, "the read to end", timeout_s=DEADLINE_S + 5)
    assert read.settled


def test_block_read_writes_each_block_to_its_place_only(
    peer: PeerProcess, reader: BlockReader
) -> None:
    data = pattern(3, LENGTH_BYTES)
    source = peer.lend(3, LENGTH_BYTES)
    places = [(7, 0), (3, 9), (4, 2), (0, 5)]
    spans = [
        Span(source + there * BLOCK_BYTES, reader.memory.address + here * BLOCK_BYTES, BLOCK_BYTES)
        for there, here in places
    ]
    finish(reader.read(peer, spans))
    expected = bytearray([PAINT]) * LENGTH_BYTES
    for there, here in places:
        expected[here * BLOCK_BYTES : (here + 1) * BLOCK_BYTES] = data[
            there * BLOCK_BYTES : (there + 1) * BLOCK_BYTES
        ]
    assert bytes(reader.memory.view) == bytes(expected)


def test_block_read_returns_current_memory(peer: PeerProcess, reader: BlockReader) -> None:
    """A block read returns the current content of memory: memory is registered once, and its
    content changes.
    """
    for seed in (1, 2):
        peer.lend(seed, LENGTH_BYTES)
        finish(reader.read(peer, reader.whole(peer)))
        assert bytes(reader.memory.view) == pattern(seed, LENGTH_BYTES)


def test_block_read_works_after_connect(peer: PeerProcess, reader: BlockReader) -> None:
    for _ in range(2):
        reader.transfer.connect(peer.worker, peer.metadata)
    peer.lend(4, LENGTH_BYTES)
    finish(reader.read(peer, reader.whole(peer)))
    assert bytes(reader.memory.view) == pattern(4, LENGTH_BYTES)
    with pytest.raises(TransferError, match="not that of unknown"):
        reader.transfer.connect(WorkerId("unknown@host:1"), peer.metadata)


def test_block_read_of_unregistered_memory_is_refused(
    peer: PeerProcess, reader: BlockReader
) -> None:
    assert peer.lent is not None and peer.unregistered is not None
    unregistered = HostMemory(LENGTH_BYTES)
    to_unregistered = Span(peer.lent.address, unregistered.address, BLOCK_BYTES)
    from_unregistered = Span(peer.unregistered.address, reader.memory.address, BLOCK_BYTES)
    for span in (to_unregistered, from_unregistered):
        with pytest.raises(TransferError):
            finish(reader.read(peer, [span]))

    def succeeds() -> bool:
        """Return True once a valid block read succeeds. The refused read may have closed the
        connection, which the first read after it then reports.
        """
        try:
            finish(reader.read(peer, reader.whole(peer)))
        except TransferError:
            return False
        return True

    wait_until(succeeds, "a valid read to succeed")


def test_cancelled_block_read_settles_when_it_completes(
    peer: PeerProcess, reader: BlockReader
) -> None:
    read = reader.read(peer, reader.whole(peer))
    read.cancel()
    read.cancel()
    with pytest.raises(TransferError, match="cancelled"):
        read.poll()
    reader.wait_settled(read)


def test_block_read_from_frozen_peer_fails_at_deadline_and_keeps_its_destination(
    tcp_peer: PeerProcess, tcp_reader: BlockReader
) -> None:
    tcp_peer.lend(5, LENGTH_BYTES)
    finish(tcp_reader.read(tcp_peer, tcp_reader.whole(tcp_peer)))
    tcp_peer.freeze()
    late = tcp_reader.read(tcp_peer, tcp_reader.whole(tcp_peer), SHORT_S)
    with pytest.raises(TransferError, match="deadline"):
        finish(late)
    tcp_reader.transfer.reap()
    assert not late.settled
    assert tcp_reader.transfer.stalled_peers() == [tcp_peer.worker]
    tcp_peer.thaw()
    tcp_reader.wait_settled(late)
    assert not tcp_reader.transfer.stalled_peers()


def test_block_read_from_forgotten_frozen_peer_writes_nothing(
    tcp_peer: PeerProcess, tcp_reader: BlockReader
) -> None:
    tcp_peer.lend(6, LENGTH_BYTES)
    finish(tcp_reader.read(tcp_peer, tcp_reader.whole(tcp_peer)))
    tcp_peer.freeze()
    read = tcp_reader.read(tcp_peer, tcp_reader.whole(tcp_peer), SHORT_S)
    tcp_reader.transfer.forget_peer(tcp_peer.worker)
    tcp_reader.wait_settled(read)
    with pytest.raises(TransferError, match="gone"):
        read.poll()
    tcp_reader.paint()
    tcp_peer.thaw()
    # The peer's remaining writes fail on the closed connection. UCX may end such a process, which
    # is harmless once it is fenced.
    tcp_peer.send(PeerCommand(op="used"))
    wait_until(lambda: tcp_peer.ended() or tcp_peer.answered(), "the peer to run on")
    assert bytes(tcp_reader.memory.view) == bytes([PAINT]) * LENGTH_BYTES


def test_block_read_from_dead_peer_fails_within_deadline(reader: BlockReader) -> None:
    with peer_process("nixl", "mortal@peer:33", LENGTH_BYTES) as mortal:
        finish(reader.read(mortal, reader.whole(mortal)))
        mortal.kill()
        with pytest.raises(TransferError):
            finish(reader.read(mortal, reader.whole(mortal)))
        reader.transfer.forget_peer(mortal.worker)


def test_inline_transfer_registers_no_memory() -> None:
    inline = InlineTransfer(WorkerId("w@here:34"), MIB, MIB)
    assert not inline.register(Memory(0, MIB))
    assert not inline.shares_memory
    with pytest.raises(TransferError, match="alike for every worker"):
        inline.read_blocks(WorkerId("w@there:1"), b"", [Span(0, 0, 1)], DEADLINE_S)
