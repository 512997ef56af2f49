"""Processes of the measurement of layer spans, as the measurement holds them: started, asked, and
ended. Knows no layers.
"""

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.processes import end_of
from fleet.lab.measure.reference import PASSIVE_WAIT
from fleet.lab.measure.spans_protocol import LOOPBACK, Begin, Connect, SpanCommand, SpanReply
from fleet.process.parent_death import signalled_with_parent

MODULE = "fleet.lab.measure.spans_run"
KEY_BYTES = 32
STOP_S = 20.0
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
DECODER = msgspec.json.Decoder(SpanReply)


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """The beginning of a process's command line, and the address at which it listens."""

    command: Sequence[str] = ()
    host: str = LOOPBACK


HERE = ProcessPlace()


class SpanProcess:
    """One process, which replies to commands in their order."""

    def __init__(self, begin: Begin, log: Path, command: Sequence[str] = ()) -> None:
        """`command`: the beginning of its command line."""
        self.name, self._log = begin.name, log
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [*command, sys.executable, "-m", MODULE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **PASSIVE_WAIT, **ONE_THREAD},
                preexec_fn=signalled_with_parent(signal.SIGKILL),
            )
        self.send(begin)

    def send(self, command: SpanCommand) -> None:
        """Send a command, whose reply is the next one. Raises: BenchError if the process has
        ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(command) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._ended() from error

    def receive(self) -> SpanReply:
        """Wait for the reply of the first command without one. Raises: BenchError if it failed."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        reply = DECODER.decode(line)
        if reply.error:
            raise BenchError(f"{self.name}: {reply.error}")
        return reply

    def ask(self, command: SpanCommand) -> SpanReply:
        """Send a command and return its reply. Raises: BenchError."""
        self.send(command)
        return self.receive()

    def _ended(self) -> BenchError:
        status = self._process.wait()
        return BenchError(
            f"{self.name} ended with status {status}: {end_of(self._log) or 'it printed nothing'}"
        )

    def stop(self) -> None:
        """End the process with its input; kill it if it does not end."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(STOP_S)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanGroup:
    """An anchor and its span workers, in the order of the layers; or one process with all layers
    and no worker.
    """

    anchor: SpanProcess
    workers: Sequence[SpanProcess] = field(default_factory=list[SpanProcess])


@contextmanager
def span_group(
    name: str,
    config: Path,
    num_workers: int,
    cores: Sequence[int],
    *,
    data_limit_bytes: int | None = None,
    places: Sequence[ProcessPlace] = (),
) -> Iterator[SpanGroup]:
    """Start processes on one of the cores each, in turn; stop them at the end of the block. Raises:
    BenchError.

    `places`: of the anchor and of each worker; here without them.
    """
    key, folder = secrets.token_hex(KEY_BYTES), config.parent
    names = [name, *(f"{name}-worker-{number}" for number in range(1, num_workers + 1))]
    started: list[SpanProcess] = []
    try:
        for number, (each, place) in enumerate(
            zip(names, places or [HERE] * len(names), strict=True)
        ):
            begin = Begin(
                config=str(config),
                hosts_spans=number > 0,
                name=each,
                key=key,
                data_limit_bytes=data_limit_bytes,
                core=cores[number % len(cores)] if cores else None,
                host=place.host,
            )
            started.append(SpanProcess(begin, folder / f"{each}.log", place.command))
        replies = [process.receive() for process in started]
        _connect(
            started,
            {
                each: reply.address
                for each, reply in zip(names, replies, strict=True)
                if reply.address
            },
        )
        yield SpanGroup(anchor=started[0], workers=started[1:])
    finally:
        for process in started:
            process.stop()


def _connect(started: Sequence[SpanProcess], addresses: Mapping[str, tuple[str, int]]) -> None:
    """Let the workers, then the anchor, connect to each other."""
    if addresses:
        for process in (*started[1:], started[0]):
            process.ask(Connect(addresses=dict(addresses)))
