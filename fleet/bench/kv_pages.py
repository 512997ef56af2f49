"""How fast keys and values cross between two processes as a hand-off moves them: beside one plain read, and beside the slow twin.

A second process lends pages of a pool, this one reads them into pages of its own, block by block, as a worker does; then as many
bytes in one piece; then a copy by way of the arenas, checked. Run as a module, it is that second process.
"""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import msgspec
import numpy as np
import torch

from fleet.bench.errors import BenchError
from fleet.bench.hand_off import PageReads
from fleet.core.chunk import WireTensor
from fleet.core.ids import RequestId, WorkerId
from fleet.core.pages import Memory, PagesRef, Span, spans_between
from fleet.engine.torch.kv_pool import KVPool, KVShape, PageTable
from fleet.transfer.base import BlockRead, Pull, Transfer
from fleet.transfer.factory import open_transfer
from fleet.transfer.memory import HostMemory

SHAPE, DTYPE, PAGE_TOKENS = KVShape(num_layers=48, num_kv_heads=4, head_dim=128), torch.bfloat16, 16
"""Those of a model of 30 billion parameters: blocks of 32 KiB."""
NUM_PAGES = 11
"""The fewest that are 16 MiB."""
NUM_REPEATS = 20
ARENA_BYTES = 64 * 1024 * 1024
REQUEST = RequestId("bench")
LENDER, READER = WorkerId("bench-lender"), WorkerId("bench-reader")
START_S, READ_S = 300.0, 10.0


class _Lent(msgspec.Struct, frozen=True):
    metadata: bytes
    pages: PagesRef
    plain: Memory
    data: bytes


class _Copy(msgspec.Struct, frozen=True):
    tensor: WireTensor
    took_us: float


class _End:
    """One process's pool, with every other page in use, and a region of as many bytes in one piece; both registered."""

    def __init__(self, worker: WorkerId) -> None:
        self.pool = KVPool(SHAPE, num_pages=2 * NUM_PAGES, page_size=PAGE_TOKENS, dtype=DTYPE, device=torch.device("cpu"))
        self.table, others = self.pool.open_table(), self.pool.open_table()
        for page in range(NUM_PAGES):
            for table in (self.table, others):
                self.pool.grow(table, (page + 1) * PAGE_TOKENS)
        self.plain = HostMemory(self.pool.locate(self.table).length_bytes)
        self.transfer = open_transfer("nixl", worker, ARENA_BYTES, ARENA_BYTES)
        assert self.pool.memory is not None
        for memory in (self.pool.memory, self.plain.region):
            self.transfer.register(memory)


def measure_pages() -> PageReads:
    """Raises: ConfigError where NIXL does not start, TransferError if a read fails, BenchError if other bytes arrive."""
    end = _End(READER)
    try:
        with _lender() as (connection, lent):
            reader = _Reader(end, connection, lent)
            reader.check()
            turns = [(reader.blocks_us(), reader.plain_us(), reader.copied_us()) for _ in range(NUM_REPEATS + 1)][1:]
    finally:
        end.transfer.close()
    blocks_us, plain_us, copied_us = zip(*turns, strict=True)
    return PageReads(
        num_bytes=lent.pages.length_bytes,
        num_blocks=lent.pages.num_layers * len(lent.pages.pages),
        blocks_us=blocks_us,
        plain_us=plain_us,
        copied_us=copied_us,
    )


class _Reader:
    def __init__(self, end: _End, connection: Connection, lent: _Lent) -> None:
        self._pool, self._plain, self._transfer = end.pool, end.plain, end.transfer
        self._connection, self._lent = connection, lent
        self._pool.close_table(end.table)

    def check(self) -> None:
        table = self._read_blocks()
        if self._pool.read(table, NUM_PAGES * PAGE_TOKENS).tobytes() != self._lent.data:
            raise BenchError("the pages that were read are not those that were lent")
        self._pool.close_table(table)

    def blocks_us(self) -> float:
        began_ns = time.perf_counter_ns()
        table = self._read_blocks()
        took_us = (time.perf_counter_ns() - began_ns) / 1000
        self._pool.close_table(table)
        return took_us

    def _read_blocks(self) -> PageTable:
        """As an engine receives pages, and a worker reads into them."""
        table = self._pool.open_table()
        self._pool.grow(table, NUM_PAGES * PAGE_TOKENS, clean=False)
        spans = spans_between(self._lent.pages, self._pool.locate(table))
        _await(self._transfer.read_blocks(LENDER, self._lent.metadata, spans, READ_S))
        return table

    def plain_us(self) -> float:
        began_ns = time.perf_counter_ns()
        span = Span(self._lent.plain.address, self._plain.address, self._lent.plain.length_bytes)
        _await(self._transfer.read_blocks(LENDER, self._lent.metadata, [span], READ_S))
        return (time.perf_counter_ns() - began_ns) / 1000

    def copied_us(self) -> float:
        """The other process's part, and ours."""
        self._connection.send_bytes(b"copy")
        copy = msgspec.msgpack.decode(self._connection.recv_bytes(), type=_Copy)
        assert copy.tensor.ref is not None
        began_ns = time.perf_counter_ns()
        data = _await(self._transfer.pull(copy.tensor.ref, self._lent.metadata, READ_S))
        table = self._pool.open_table()
        self._pool.grow(table, NUM_PAGES * PAGE_TOKENS)
        self._pool.write(table, np.frombuffer(data, np.uint8), NUM_PAGES * PAGE_TOKENS)
        took_us = (time.perf_counter_ns() - began_ns) / 1000
        self._pool.close_table(table)
        return copy.took_us + took_us


def _await(read: "Pull | BlockRead") -> bytes:
    while not (done := read.poll()):
        pass
    return done if isinstance(done, bytes) else b""


@contextmanager
def _lender() -> Iterator[tuple[Connection, _Lent]]:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "fleet.bench.kv_pages", str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()
    try:
        with Connection(ours.detach()) as connection:
            if not connection.poll(START_S):
                raise BenchError(f"the process that lends pages did not start within {START_S:.0f} s")
            try:
                lent = connection.recv_bytes()
            except EOFError:
                raise BenchError("the process that lends pages ended before it did; its error is above") from None
            yield connection, msgspec.msgpack.decode(lent, type=_Lent)
    finally:
        process.kill()
        process.wait()


def _lend(connection: Connection) -> None:
    end = _End(LENDER)
    place = end.pool.locate(end.table)
    noise = np.random.default_rng(1).integers(0, 256, place.length_bytes, np.uint8)
    end.pool.write(end.table, noise, NUM_PAGES * PAGE_TOKENS)
    # Also because memory that was never written to is one shared page, and faster than any other.
    end.plain.view[:] = noise.tobytes()
    lent = _Lent(metadata=end.transfer.metadata(), pages=place, plain=end.plain.region, data=noise.tobytes())
    connection.send_bytes(msgspec.msgpack.encode(lent))
    while True:
        try:
            connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(msgspec.msgpack.encode(_copy(end.pool, end.table, end.transfer)))


def _copy(pool: KVPool, table: PageTable, transfer: Transfer) -> _Copy:
    transfer.release(REQUEST)
    began_ns = time.perf_counter_ns()
    data = pool.read(table, NUM_PAGES * PAGE_TOKENS)
    tensor = transfer.publish(REQUEST, "uint8", data.shape, data.tobytes())
    return _Copy(tensor, (time.perf_counter_ns() - began_ns) / 1000)


if __name__ == "__main__":
    with Connection(int(sys.argv[1])) as parent:
        _lend(parent)
