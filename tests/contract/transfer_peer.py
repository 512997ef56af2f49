"""A transfer in a process of its own, so that tests can freeze and kill it. Run as a module, this
file is that process.

Commands and answers are MessagePack over a socket pair.
"""

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import IO, cast

import msgspec

from fleet.core.chunk import TensorRef, WireTensor
from fleet.core.errors import TransferError
from fleet.core.ids import RequestId, WorkerId
from fleet.core.pages import Memory
from fleet.transfer.base import Transfer
from fleet.transfer.factory import open_transfer
from fleet.transfer.memory import HEADER, HostMemory
from fleet.transfer.nixl import NixlTransfer
from fleet.transfer.reach import reach_of
from tests.support import REPO, cli_env, freeze_process

START_S = 60.0
ANSWER_S = 20.0


def pattern(seed: int, length_bytes: int) -> bytes:
    """Return bytes that both processes can compute from `seed`, different for each seed."""
    return random.Random(seed).randbytes(length_bytes)


def ref_of(tensor: WireTensor) -> TensorRef:
    assert tensor.ref is not None
    return tensor.ref


class PeerCommand(msgspec.Struct, kw_only=True):
    """Command to a peer process. `op`: publish, release, used (count used slots), scribble (change
    the first published byte), republish (free and refill, `rounds` times), lend (fill the first
    bytes of the registered memory beside the arena), or read (pull `ref` from the worker with this
    `metadata`, `rounds` times).
    """

    op: str
    request: RequestId = RequestId("")
    seed: int = 0
    length_bytes: int = 0
    rounds: int = 0
    ref: TensorRef | None = None
    metadata: bytes = b""


class PeerReply(msgspec.Struct, kw_only=True):
    tensor: WireTensor | None = None
    used_slots: int = 0
    metadata: bytes = b""
    lent: Memory | None = None
    unregistered: Memory | None = None
    error: str = ""


class PeerProcess:
    """The test's handle of a peer process. Methods such as `publish` wait for the peer's answer."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        connection: Connection,
        worker: WorkerId,
        stderr: IO[bytes],
    ) -> None:
        self.worker = worker
        self._process = process
        self._connection = connection
        self._stderr = stderr
        begun = self._answer(START_S)
        self.metadata = begun.metadata
        self.lent = begun.lent
        self.unregistered = begun.unregistered

    def publish(self, request: str, seed: int, length_bytes: int) -> WireTensor:
        """Publish the pattern of `seed` as a tensor of `request`; return its location. Raises:
        TransferError if the peer's transfer raised it.
        """
        answer = self.call(
            PeerCommand(
                op="publish", request=RequestId(request), seed=seed, length_bytes=length_bytes
            )
        )
        if answer.error:
            raise TransferError(answer.error)
        assert answer.tensor is not None
        return answer.tensor

    def lend(self, seed: int, length_bytes: int) -> int:
        """Write the pattern of `seed` to the registered memory; return its address."""
        self.call(PeerCommand(op="lend", seed=seed, length_bytes=length_bytes))
        assert self.lent is not None, "this kind of transfer lends nothing"
        return self.lent.address

    def read(self, ref: TensorRef, metadata: bytes, rounds: int = 1) -> None:
        """Let the peer pull a tensor of another worker, `rounds` times."""
        answer = self.call(PeerCommand(op="read", ref=ref, metadata=metadata, rounds=rounds))
        assert not answer.error, answer.error

    def release(self, request: str) -> int:
        """Release the tensors of a request; return the number of slots still in use."""
        return self.call(PeerCommand(op="release", request=RequestId(request))).used_slots

    def call(self, command: PeerCommand) -> PeerReply:
        try:
            self.send(command)
            return self._answer(ANSWER_S)
        except (EOFError, ConnectionError) as error:
            status = self._process.wait(ANSWER_S)
            self._stderr.seek(0)
            printed = self._stderr.read().decode(errors="replace")
            raise AssertionError(
                f"{self.worker} ended with status {status}, and printed: {printed}"
            ) from error

    def send(self, command: PeerCommand) -> None:
        """Send a command whose answer `answered` consumes later."""
        self._connection.send_bytes(msgspec.msgpack.encode(command))

    def answered(self) -> bool:
        """Return True, and consume the answer, if the answer to `send` has arrived; False if the
        peer died before it answered.
        """
        try:
            if not self._connection.poll(0):
                return False
            self._answer(0)
        except (EOFError, ConnectionResetError):
            return False
        return True

    @property
    def pid(self) -> int:
        return self._process.pid

    def freeze(self) -> None:
        freeze_process(self._process.pid)

    def thaw(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def ended(self) -> bool:
        return self._process.poll() is not None

    def _answer(self, timeout_s: float) -> PeerReply:
        assert self._connection.poll(timeout_s), (
            f"{self.worker} did not answer within {timeout_s} s"
        )
        return msgspec.msgpack.decode(self._connection.recv_bytes(), type=PeerReply)


@contextmanager
def peer_process(
    kind: str,
    worker: str,
    arena_bytes: int,
    env: Mapping[str, str] | None = None,
    interface: str = "",
) -> Iterator[PeerProcess]:
    """Run a peer that lets one request use half of its arena, and kill it at the end. `interface`:
    value of `transfer.interface`, "" for null.
    """
    parent_end, child_end = socket.socketpair()
    options = [str(child_end.fileno()), kind, worker, str(arena_bytes), interface]
    command = [sys.executable, "-m", "tests.contract.transfer_peer", *options]
    with tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            command,
            cwd=REPO,
            env=cli_env(env),
            pass_fds=[child_end.fileno()],
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
        child_end.close()
        try:
            with Connection(parent_end.detach()) as connection:
                yield PeerProcess(process, connection, WorkerId(worker), stderr)
        finally:
            process.kill()
            process.wait()


def execute(transfer: Transfer, memory: HostMemory, command: PeerCommand) -> PeerReply:
    tensor: WireTensor | None = None
    if command.op == "publish":
        data = pattern(command.seed, command.length_bytes)
        try:
            tensor = transfer.publish(command.request, "uint8", (command.length_bytes,), data)
        except TransferError as error:
            return PeerReply(error=error.message)
    elif command.op == "release":
        transfer.release(command.request)
    elif command.op == "scribble":
        view = cast(NixlTransfer, transfer).memory.view
        view[HEADER.size] ^= 0xFF
    elif command.op == "lend":
        memory.view[: command.length_bytes] = pattern(command.seed, command.length_bytes)
    elif command.op == "read":
        assert command.ref is not None
        try:
            for _ in range(command.rounds):
                pull = transfer.pull(command.ref, command.metadata, ANSWER_S)
                while pull.poll() is None:
                    continue
        except TransferError as error:
            return PeerReply(error=error.message)
    elif command.op == "republish":
        for number in range(command.rounds):
            transfer.release(command.request)
            transfer.publish(
                command.request,
                "uint8",
                (command.length_bytes,),
                bytes([number]) * command.length_bytes,
            )
    return PeerReply(tensor=tensor, used_slots=transfer.used_slots())


def serve(
    connection: Connection, kind: str, worker: WorkerId, arena_bytes: int, interface: str
) -> None:
    transfer = open_transfer(
        kind, worker, arena_bytes, arena_bytes // 2, reach_of(interface or None, allow_public=False)
    )
    memory, unregistered = HostMemory(arena_bytes), HostMemory(arena_bytes)
    lends = transfer.register(memory.region)
    lent = memory.region if lends else None
    answer = PeerReply(metadata=transfer.metadata(), lent=lent, unregistered=unregistered.region)
    while True:
        connection.send_bytes(msgspec.msgpack.encode(answer))
        try:
            raw = connection.recv_bytes()
        except EOFError:
            return
        answer = execute(transfer, memory, msgspec.msgpack.decode(raw, type=PeerCommand))


if __name__ == "__main__":
    with Connection(int(sys.argv[1])) as parent:
        serve(parent, sys.argv[2], WorkerId(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
