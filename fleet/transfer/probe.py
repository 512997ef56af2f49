"""Test of NIXL on this host: an agent reads from a second agent in this process, and from workers
of the fleet. Run as a module.

A flaw of a transport may hang or end a process, so the caller runs this test in a process that it
kills after `LIMIT_S`. Knows no Redis.
"""

import os
import subprocess
import sys
import time

import msgspec

from fleet.core.errors import ConfigError, TransferError
from fleet.core.ids import RequestId, WorkerId
from fleet.core.pages import Span
from fleet.transfer.base import BlockRead, Pull, Transfer
from fleet.transfer.factory import open_transfer
from fleet.transfer.reach import reach_of

LIMIT_S, READ_S, POLL_S = 20.0, 5.0, 0.0002
PAYLOAD_BYTES, ARENA_BYTES, PEER_BYTES = 64 * 1024, 256 * 1024, 8
SELF = "this host"


class ProbePeer(msgspec.Struct, frozen=True):
    """A worker from which the test reads: its NIXL metadata, and an address in its registered
    memory.
    """

    metadata: bytes
    address: int


class ProbeOrder(msgspec.Struct, frozen=True):
    """Input of the test process. `interface`: value of `transfer.interface`. `peers`: workers to
    read from, by worker id.
    """

    interface: str | None
    allow_public: bool
    peers: dict[str, ProbePeer] = {}


class ProbeResult(msgspec.Struct, frozen=True):
    """Result of the test. `failures`: reason of each failed read, by `SELF` or worker id; empty if
    no read failed. `read_us`: duration of the read on this host; 0 if that read failed.
    """

    failures: dict[str, str]
    read_us: float = 0.0


def run_probe(order: ProbeOrder, limit_s: float = LIMIT_S) -> ProbeResult:
    """Run the test in a process of its own, which is killed if it does not end within `limit_s`;
    return its result.
    """
    command = [sys.executable, "-m", "fleet.transfer.probe"]
    try:
        done = subprocess.run(
            command,
            input=msgspec.msgpack.encode(order),
            capture_output=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ProbeResult({SELF: f"the read did not end within {limit_s:g} s"})
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        return ProbeResult(
            {
                SELF: f"its process ended with status {done.returncode}"
                + (f": {lines[-1]}" if lines else "")
            }
        )
    return msgspec.msgpack.decode(done.stdout, type=ProbeResult)


def probe(order: ProbeOrder) -> ProbeResult:
    """Read a tensor between two agents of this process, and `PEER_BYTES` of each peer. Raises:
    ConfigError, TransferError.
    """
    reach = reach_of(order.interface, allow_public=order.allow_public)
    suffix = str(os.getpid())
    source = open_transfer(
        "nixl", WorkerId(f"doctor-source-{suffix}"), ARENA_BYTES, ARENA_BYTES, reach
    )
    reader = open_transfer(
        "nixl", WorkerId(f"doctor-reader-{suffix}"), ARENA_BYTES, ARENA_BYTES, reach
    )
    payload = bytes(range(256)) * (PAYLOAD_BYTES // 256)
    ref = source.publish(RequestId("doctor"), "uint8", (PAYLOAD_BYTES,), payload).ref
    assert ref is not None, "NIXL sends no tensor inline"
    began_s = time.perf_counter()
    data = _await(reader.pull(ref, source.metadata(), READ_S))
    read_us = (time.perf_counter() - began_s) * 1e6
    if data != payload:
        raise TransferError("the bytes that were read are not those that were published")
    return ProbeResult(_read_peers(reader, order.peers), read_us)


def _read_peers(reader: Transfer, peers: dict[str, ProbePeer]) -> dict[str, str]:
    """Read from all peers at the same time; return the reason of each failure, by worker id."""
    failures: dict[str, str] = {}
    reads: dict[str, BlockRead] = {}
    for worker, peer in peers.items():
        span = Span(peer.address, reader.registered_address, PEER_BYTES)
        try:
            reads[worker] = reader.read_blocks(WorkerId(worker), peer.metadata, [span], READ_S)
        except TransferError as error:
            failures[worker] = error.message
    for worker, read in reads.items():
        try:
            _await(read)
        except TransferError as error:
            failures[worker] = error.message
    return failures


def _await(read: Pull | BlockRead) -> bytes | bool:
    while not (result := read.poll()):
        time.sleep(POLL_S)
    return result


def main() -> None:
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=ProbeOrder)
    try:
        result = probe(order)
    except (ConfigError, TransferError) as error:
        result = ProbeResult({SELF: error.message})
    sys.stdout.buffer.write(msgspec.msgpack.encode(result))
    sys.stdout.flush()
    os._exit(0)  # closing an agent whose peer does not answer may take long


if __name__ == "__main__":
    main()
