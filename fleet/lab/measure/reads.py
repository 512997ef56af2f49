"""Benchmark of tensor reads on this machine: a second process publishes tensors, the measuring
process pulls them. Run as a module, this file is the publisher.
"""

import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection

import msgspec

from fleet.core.chunk import TensorRef, WireTensor
from fleet.core.errors import TransferError
from fleet.core.ids import RequestId, WorkerId
from fleet.transfer.base import Transfer
from fleet.transfer.factory import open_transfer

REQUEST = RequestId("measure")
START_S = 300.0
READ_S = 10.0
HEADROOM_BYTES = 4096


class ReadSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Median duration of a whole pull of one size: read, copy and checksum."""

    num_bytes: int
    p50_us: float
    gb_per_s: float


class _Offer(msgspec.Struct):
    metadata: bytes
    tensors: list[WireTensor]


def measure_reads(sizes: Sequence[int], num_repeats: int = 20) -> list[ReadSpeed]:
    """Pull tensors of `sizes` bytes from another process, each `num_repeats` times after one
    warm-up.

    Raises: ConfigError if NIXL does not start, TransferError if a read fails.
    """
    with (
        peer_process("fleet.lab.measure.reads", *map(str, sizes)) as (_, message),
        closing(
            open_transfer("nixl", WorkerId("measure-reader"), _arena_bytes([max(sizes)]), 1)
        ) as transfer,
    ):
        offer = msgspec.msgpack.decode(message, type=_Offer)
        refs = [tensor.ref for tensor in offer.tensors if tensor.ref is not None]
        return [_measure(transfer, ref, offer.metadata, num_repeats) for ref in refs]


def _measure(transfer: Transfer, ref: TensorRef, metadata: bytes, num_repeats: int) -> ReadSpeed:
    _timed_read_us(transfer, ref, metadata)
    p50_us = statistics.median(_timed_read_us(transfer, ref, metadata) for _ in range(num_repeats))
    return ReadSpeed(
        num_bytes=ref.length_bytes, p50_us=p50_us, gb_per_s=ref.length_bytes / p50_us / 1000
    )


def _timed_read_us(transfer: Transfer, ref: TensorRef, metadata: bytes) -> float:
    started_ns = time.perf_counter_ns()
    pull = transfer.pull(ref, metadata, READ_S)
    while pull.poll() is None:
        pass
    return (time.perf_counter_ns() - started_ns) / 1000


def _arena_bytes(sizes: Sequence[int]) -> int:
    return sum(sizes) + HEADROOM_BYTES * (len(sizes) + 1)


@contextmanager
def peer_process(module: str, *arguments: str) -> Iterator[tuple[Connection, bytes]]:
    """Run `python -m MODULE FD ARGUMENTS` during the block. Yield a connection to the process's
    descriptor FD, and its first message.

    The process is killed at the end of the block. A transfer that reads from the process must be
    closed before: see `Agent.close`.
    Raises: TransferError if the process sends no first message.
    """
    parent_end, child_end = socket.socketpair()
    command = [sys.executable, "-m", module, str(child_end.fileno()), *arguments]
    process = subprocess.Popen(command, pass_fds=[child_end.fileno()])
    child_end.close()
    try:
        with Connection(parent_end.detach()) as connection:
            if not connection.poll(START_S):
                raise TransferError(f"the publishing process did not start within {START_S:.0f} s")
            try:
                first = connection.recv_bytes()
            except EOFError:
                raise TransferError(
                    "the publishing process ended before it published; its error is above"
                ) from None
            yield connection, first
    finally:
        process.kill()
        process.wait()


def _publish(fd: int, sizes: Sequence[int]) -> None:
    arena_bytes = _arena_bytes(sizes)
    transfer = open_transfer("nixl", WorkerId("measure-publisher"), arena_bytes, arena_bytes)
    tensors = [transfer.publish(REQUEST, "uint8", (size,), bytes(size)) for size in sizes]
    with Connection(fd) as connection:
        connection.send_bytes(
            msgspec.msgpack.encode(_Offer(metadata=transfer.metadata(), tensors=tensors))
        )
        # Nothing is ever sent: this returns when the reader has ended, for any reason.
        connection.poll(None)


if __name__ == "__main__":
    _publish(int(sys.argv[1]), [int(size) for size in sys.argv[2:]])
