"""A source process is frozen during a read over TCP: its late bytes are written to unused memory or
not at all.

Over TCP alone a read takes both processes, so that a frozen source leaves a part of the bytes in
the sockets.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from fleet.core.chunk import TensorRef
from fleet.core.errors import TransferError
from fleet.core.ids import RequestId, WorkerId
from fleet.core.pages import Span
from fleet.transfer.memory import HEADER, HostMemory
from fleet.transfer.nixl import NixlTransfer
from fleet.transfer.peer_link import NixlBlockRead, NixlPull
from fleet.transfer.reach import Reach
from tests.contract.transfer_peer import PeerCommand, PeerProcess, pattern, peer_process, ref_of
from tests.support import wait_until

pytestmark = pytest.mark.one_file_in(3, "transfers between processes")

MIB = 1024 * 1024
LENGTH_BYTES = 24 * MIB
"""Size of a read in bytes: more than the sender's socket holds (4 MiB), so that bytes remain unsent
when the source stops.
"""
ARENA_BYTES, PEER_ARENA_BYTES = 80 * MIB, 52 * MIB
STEP_BYTES = MIB // 4
NUM_PLACES = LENGTH_BYTES // STEP_BYTES + 1
DEADLINE_S = 30.0
SHORT_S = 1.0
MOST_TRIES = 20
TCP_ALONE = {"UCX_TLS": "tcp"}
PAINT, SEED, SMALL_BYTES = 0xA5, 7, 4096
WANTED = pattern(SEED, LENGTH_BYTES)


class TensorReader:
    """The reading worker's transfer, with an arena, and memory of its own for blocks."""

    def __init__(self) -> None:
        self.transfer = NixlTransfer(
            WorkerId("reader@here:20"), ARENA_BYTES, ARENA_BYTES, Reach(("lo",))
        )
        self.blocks = HostMemory(LENGTH_BYTES)
        self.transfer.register(self.blocks.region)

    def quarantined(self) -> int:
        return self.transfer.arena.quarantined_slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Destination of a read of `LENGTH_BYTES`, filled with a pattern that shows which places are
    overwritten.
    """

    memory: HostMemory
    start: int

    def num_landed(self) -> int:
        """Return the number of overwritten places; one place per step is checked, and the last
        byte.
        """
        end = self.start + LENGTH_BYTES
        paint = bytes([PAINT]) * 8
        return sum(
            bytes(self.memory.view[at : at + 8]) != paint
            for at in (*range(self.start, end, STEP_BYTES), end - 8)
        )

    def wait_until_unchanged(self) -> None:
        """Wait until the destination stops changing, because the bytes in the sockets have been
        written.
        """
        seen: list[int] = []

        def same_again() -> bool:
            seen.append(self.num_landed())
            return len(seen) > 10 and len(set(seen[-10:])) == 1

        wait_until(same_again, "the bytes on the way to land")


@pytest.fixture
def reader() -> Iterator[TensorReader]:
    reader = TensorReader()
    yield reader
    reader.transfer.arena.check()
    assert reader.transfer.used_slots() == 0, "a test left slots behind"
    reader.transfer.close()


@pytest.fixture
def source() -> Iterator[PeerProcess]:
    with peer_process(
        "nixl", "source@peer:21", PEER_ARENA_BYTES, env=TCP_ALONE, interface="lo"
    ) as process:
        yield process


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[tuple[PeerProcess, TensorRef]]:
    """A second source of the same bytes, which is never frozen."""
    with peer_process(
        "nixl", "elsewhere@peer:22", PEER_ARENA_BYTES, env=TCP_ALONE, interface="lo"
    ) as process:
        yield process, ref_of(process.publish("large", SEED, LENGTH_BYTES))


def finish(pull: NixlPull) -> bytes:
    data = wait_until(pull.poll, "the read to end", timeout_s=DEADLINE_S)
    assert data is not None
    return data


def read_tensor(source: PeerProcess, reader: TensorReader) -> tuple[NixlPull, Destination]:
    memory = reader.transfer.memory
    memory.view[:] = bytes([PAINT]) * len(memory.view)
    source.release("large")
    ref = ref_of(source.publish("large", SEED, LENGTH_BYTES))
    pull = reader.transfer.pull(ref, source.metadata, SHORT_S)
    return pull, Destination(memory=memory, start=pull.slot.offset + HEADER.size)


def read_blocks(source: PeerProcess, reader: TensorReader) -> tuple[NixlBlockRead, Destination]:
    reader.blocks.view[:] = bytes([PAINT]) * LENGTH_BYTES
    address = source.lend(SEED, LENGTH_BYTES)
    spans = [
        Span(address + at, reader.blocks.address + at, MIB) for at in range(0, LENGTH_BYTES, MIB)
    ]
    read = reader.transfer.read_blocks(source.worker, source.metadata, spans, SHORT_S)
    return read, Destination(memory=reader.blocks, start=0)


def freeze_in_mid_read(
    source: PeerProcess, reader: TensorReader, *, blocks: bool = False
) -> tuple[NixlPull | NixlBlockRead, Destination]:
    """Freeze the source once a part of its bytes has arrived; a read that was too fast is
    repeated.
    """
    small = ref_of(source.publish("small", SEED, SMALL_BYTES))
    assert finish(reader.transfer.pull(small, source.metadata, DEADLINE_S)) == pattern(
        SEED, SMALL_BYTES
    ), "they are connected"
    for _ in range(MOST_TRIES):
        read, into = read_blocks(source, reader) if blocks else read_tensor(source, reader)
        until = time.monotonic() + SHORT_S
        while not into.num_landed() and time.monotonic() < until:
            pass
        source.freeze()
        into.wait_until_unchanged()
        if 0 < into.num_landed() < NUM_PLACES:
            return read, into
        source.thaw()
        wait_until(
            lambda: reader.transfer.used_slots() == 0 and not reader.transfer.stalled_peers(),
            "the read to end",
            DEADLINE_S,
        )
    raise AssertionError(f"none of {MOST_TRIES} reads could be met half-way")


def give_up(source: PeerProcess, reader: TensorReader, read: NixlPull | NixlBlockRead) -> None:
    with pytest.raises(TransferError, match="deadline"):
        wait_until(read.poll, "the read to end", timeout_s=DEADLINE_S)
    assert reader.transfer.stalled_peers() == [source.worker]
    assert not read.settled


def fill(transfer: NixlTransfer) -> list[range]:
    """Publish tensors until the arena is full; return where they lie."""
    spans: list[range] = []
    while True:
        try:
            ref = ref_of(transfer.publish(RequestId("mine"), "uint8", (MIB,), bytes(MIB)))
        except TransferError:
            return spans
        start = ref.address - transfer.memory.address
        spans.append(range(start, start + HEADER.size + MIB))


def overlap(one: range, other: range) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


def test_late_tensor_is_written_to_quarantined_slot_only(
    source: PeerProcess, reader: TensorReader, elsewhere: tuple[PeerProcess, TensorRef]
) -> None:
    read, into = freeze_in_mid_read(source, reader)
    give_up(source, reader, read)
    assert isinstance(read, NixlPull) and reader.quarantined() == 1
    quarantined = range(read.slot.offset, read.slot.offset + read.slot.size_bytes)
    healthy, ref = elsewhere
    other = reader.transfer.pull(ref, healthy.metadata, DEADLINE_S)
    assert not overlap(
        quarantined, range(other.slot.offset, other.slot.offset + other.slot.size_bytes)
    )
    assert finish(other) == WANTED

    mine = fill(reader.transfer)
    assert mine and not any(overlap(span, quarantined) for span in mine)
    view = reader.transfer.memory.view
    before = [bytes(view[span.start : span.stop]) for span in mine]
    source.thaw()
    wait_until(lambda: not reader.transfer.stalled_peers(), "the late read to be over", DEADLINE_S)
    assert (into.num_landed(), reader.quarantined()) == (NUM_PLACES, 0), "it landed, late"
    assert [bytes(view[span.start : span.stop]) for span in mine] == before
    reader.transfer.release(RequestId("mine"))
    assert finish(reader.transfer.pull(read.ref, source.metadata, DEADLINE_S)) == WANTED


def test_late_blocks_are_written_to_their_reserved_destination_only(
    source: PeerProcess, reader: TensorReader, elsewhere: tuple[PeerProcess, TensorRef]
) -> None:
    """Late blocks are written only to their reserved destination. KV pages have no checksum, so
    they stay reserved until the read is settled.
    """
    read, into = freeze_in_mid_read(source, reader, blocks=True)
    give_up(source, reader, read)
    healthy, ref = elsewhere
    assert finish(reader.transfer.pull(ref, healthy.metadata, DEADLINE_S)) == WANTED
    assert not read.settled and into.num_landed() < NUM_PLACES
    source.thaw()
    wait_until(lambda: not reader.transfer.stalled_peers(), "the late read to be over", DEADLINE_S)
    assert read.settled and bytes(reader.blocks.view) == WANTED


@pytest.mark.parametrize("blocks", [False, True], ids=["tensor", "blocks"])
def test_read_from_forgotten_peer_writes_nothing(
    source: PeerProcess, reader: TensorReader, blocks: bool
) -> None:
    """A read from a forgotten peer writes nothing more, so that its destination can be reused
    immediately.
    """
    read, into = freeze_in_mid_read(source, reader, blocks=blocks)
    give_up(source, reader, read)
    reader.transfer.forget_peer(source.worker)
    assert reader.transfer.stalled_peers() == []
    wait_until(lambda: reader.transfer.used_slots() == 0, "the reading agent to be closed")
    wait_until(lambda: reader.transfer.reap() or read.settled, "the read to be settled")
    into.memory.view[:] = bytes([PAINT]) * len(into.memory.view)

    source.thaw()
    # The peer's remaining writes fail on the closed connection. UCX may end such a process, which
    # is harmless once forgotten.
    source.send(PeerCommand(op="used"))
    wait_until(lambda: source.ended() or source.answered(), "the source to run on")
    into.wait_until_unchanged()
    assert bytes(into.memory.view) == bytes([PAINT]) * len(into.memory.view)
