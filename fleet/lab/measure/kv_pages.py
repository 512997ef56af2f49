"""KV page benchmark: reads of KV blocks between two processes as in a hand-off, compared with a
plain read and with a checked copy.

A second process shares pages of a pool. The measuring process reads them block by block into its
own pages, as a worker does; then reads as many contiguous bytes; then makes a checked copy through
the arenas. Run as a module, this file is the second process.
"""

import sys
import time
from multiprocessing.connection import Connection

import msgspec
import numpy as np
import torch

from fleet.core.chunk import WireTensor
from fleet.core.ids import RequestId, WorkerId
from fleet.core.pages import Memory, PagesRef, Span, spans_between
from fleet.engine.torch.kv_pool import KVPool, KVShape, PageTable
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.page_reads import PageReads
from fleet.lab.measure.reads import peer_process
from fleet.transfer.base import BlockRead, Pull, Transfer
from fleet.transfer.factory import open_transfer
from fleet.transfer.memory import HostMemory

SHAPE, DTYPE, PAGE_TOKENS = KVShape(num_layers=48, num_kv_heads=4, head_dim=128), torch.bfloat16, 16
"""KV shape of a model of 30 billion parameters: blocks of 32 KiB."""
NUM_PAGES = 11
"""Number of pages read: the smallest number with at least 16 MiB."""
NUM_REPEATS = 20
ARENA_BYTES = 64 * 1024 * 1024
REQUEST = RequestId("bench")
SOURCE, READER = WorkerId("bench-source"), WorkerId("bench-reader")
READ_S = 10.0


class _SharedPages(msgspec.Struct, frozen=True):
    metadata: bytes
    pages: PagesRef
    plain: Memory
    data: bytes


class _Copy(msgspec.Struct, frozen=True):
    tensor: WireTensor
    duration_us: float


class _Endpoint:
    """Memory of one process, registered for transfer: its page pool, with every other page in use,
    and a contiguous region of as many bytes.
    """

    def __init__(self, worker: WorkerId) -> None:
        self.pool = KVPool(
            SHAPE,
            num_pages=2 * NUM_PAGES,
            page_size=PAGE_TOKENS,
            dtype=DTYPE,
            device=torch.device("cpu"),
        )
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
    """Measure the three ways of moving KV blocks in turns.

    Raises: ConfigError if NIXL does not start, TransferError if a read fails, BenchError if other
    bytes arrive.
    """
    with peer_process("fleet.lab.measure.kv_pages") as (connection, message):
        end = _Endpoint(READER)
        try:
            shared = msgspec.msgpack.decode(message, type=_SharedPages)
            reader = _PageReader(end, connection, shared)
            reader.check()
            turns = [
                (reader.blocks_us(), reader.plain_us(), reader.copied_us())
                for _ in range(NUM_REPEATS + 1)
            ][1:]
        finally:
            end.transfer.close()
    blocks_us, plain_us, copied_us = zip(*turns, strict=True)
    return PageReads(
        num_bytes=shared.pages.length_bytes,
        num_blocks=shared.pages.num_layers * len(shared.pages.pages),
        blocks_us=blocks_us,
        plain_us=plain_us,
        copied_us=copied_us,
    )


class _PageReader:
    def __init__(self, end: _Endpoint, connection: Connection, shared: _SharedPages) -> None:
        self._pool = end.pool
        self._plain = end.plain
        self._transfer = end.transfer
        self._connection, self._shared = connection, shared
        self._pool.close_table(end.table)

    def check(self) -> None:
        table = self._read_blocks()
        if self._pool.read(table, NUM_PAGES * PAGE_TOKENS).tobytes() != self._shared.data:
            raise BenchError("the pages that were read differ from those that were shared")
        self._pool.close_table(table)

    def blocks_us(self) -> float:
        began_ns = time.perf_counter_ns()
        table = self._read_blocks()
        duration_us = (time.perf_counter_ns() - began_ns) / 1000
        self._pool.close_table(table)
        return duration_us

    def _read_blocks(self) -> PageTable:
        """Allocate pages as an engine does, and read the remote blocks into them as a worker
        does.
        """
        table = self._pool.open_table()
        self._pool.grow(table, NUM_PAGES * PAGE_TOKENS, clean=False)
        spans = spans_between(self._shared.pages, self._pool.locate(table))
        _await(self._transfer.read_blocks(SOURCE, self._shared.metadata, spans, READ_S))
        return table

    def plain_us(self) -> float:
        began_ns = time.perf_counter_ns()
        span = Span(
            self._shared.plain.address, self._plain.address, self._shared.plain.length_bytes
        )
        _await(self._transfer.read_blocks(SOURCE, self._shared.metadata, [span], READ_S))
        return (time.perf_counter_ns() - began_ns) / 1000

    def copied_us(self) -> float:
        """Return the duration of the checked copy, both processes' parts added."""
        self._connection.send_bytes(b"copy")
        copy = msgspec.msgpack.decode(self._connection.recv_bytes(), type=_Copy)
        assert copy.tensor.ref is not None
        began_ns = time.perf_counter_ns()
        data = _await(self._transfer.pull(copy.tensor.ref, self._shared.metadata, READ_S))
        table = self._pool.open_table()
        self._pool.grow(table, NUM_PAGES * PAGE_TOKENS)
        self._pool.write(table, np.frombuffer(data, np.uint8), NUM_PAGES * PAGE_TOKENS)
        duration_us = (time.perf_counter_ns() - began_ns) / 1000
        self._pool.close_table(table)
        return copy.duration_us + duration_us


def _await(read: "Pull | BlockRead") -> bytes:
    while not (done := read.poll()):
        pass
    return done if isinstance(done, bytes) else b""


def _share(connection: Connection) -> None:
    end = _Endpoint(SOURCE)
    place = end.pool.locate(end.table)
    noise = np.random.default_rng(1).integers(0, 256, place.length_bytes, np.uint8)
    end.pool.write(end.table, noise, NUM_PAGES * PAGE_TOKENS)
    # Written also because untouched memory is a single shared page, which is faster.
    end.plain.view[:] = noise.tobytes()
    shared = _SharedPages(
        metadata=end.transfer.metadata(), pages=place, plain=end.plain.region, data=noise.tobytes()
    )
    connection.send_bytes(msgspec.msgpack.encode(shared))
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
        _share(parent)
