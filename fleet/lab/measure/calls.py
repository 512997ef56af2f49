"""Calls of this project's functions in child processes, with messages between caller and function.

`python -m fleet.lab.measure.calls module:function` reads the function's arguments from the first
line of its standard input, and writes a line of JSON for each value, result, progress or error.
Text that the function prints counts as progress. Knows no measurement.
"""

import io
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import GenericAlias
from typing import Any, Self, TextIO, TypeVar, cast, get_type_hints

import msgspec

from fleet.config import FleetConfig
from fleet.core.errors import FleetError
from fleet.lab.measure.errors import BenchError
from fleet.process.parent_death import signalled_with_parent

T = TypeVar("T")
MODULE = "fleet.lab.measure.calls"
TAIL_LINES, TAIL_BYTES = 8, 100_000
STOP_S = 20.0
PASSIVE_WAIT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Environment variable that makes waiting OpenMP threads sleep. Two spinning threads beside a busy
process slowed a small model tenfold (measured).
"""
FAILURES = (FleetError, RuntimeError, ValueError, MemoryError, OSError)
"""Errors of a called function that are reported as one line, without a traceback."""


class CallLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of output of the called process: a value, an error, or progress."""

    value: msgspec.Raw = msgspec.Raw()
    error: str = ""


def _encode(value: object) -> bytes:
    return msgspec.json.encode(value, enc_hook=_as_json)


def _as_json(value: object) -> object:
    return value.model_dump(mode="json") if isinstance(value, FleetConfig) else str(value)


def _decode(line: bytes | msgspec.Raw, kind: Any) -> Any:
    return msgspec.json.decode(line, type=kind, dec_hook=_from_json)


def _from_json(kind: Any, value: Any) -> Any:
    return FleetConfig.model_validate(value) if kind is FleetConfig else kind(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """Settings of a child process.

    `env`: environment variables, by default this process's; `PASSIVE_WAIT` is added. `num_threads`:
    number of OpenMP threads, which torch reads at import. `command`: prefix of the command line.
    `core`: the only core that the process may run on. `data_limit_bytes`: limit of the process's
    private writable memory (RLIMIT_DATA). `pass_fds`: inherited file descriptors.
    """

    env: Mapping[str, str] | None = None
    num_threads: int | None = None
    command: Sequence[str] = ()
    core: int | None = None
    data_limit_bytes: int | None = None
    pass_fds: Sequence[int] = ()

    def environment(self) -> dict[str, str]:
        threads = {"OMP_NUM_THREADS": str(self.num_threads)} if self.num_threads else {}
        return {**(os.environ if self.env is None else self.env), **PASSIVE_WAIT, **threads}

    def apply_limits(self) -> None:
        """Apply the core and memory limits to the calling process."""
        if self.core is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {self.core})
        if self.data_limit_bytes is not None:
            limits = (self.data_limit_bytes, self.data_limit_bytes)
            resource.setrlimit(resource.RLIMIT_DATA, limits)


PLAIN = ProcessSettings()


class ProcessCall:
    """Call of a function `module:function` in a child process. The process starts with the
    construction and ends with the `with` block.

    `name`: prefix of error messages, by default the module.
    """

    def __init__(
        self, function: str, *arguments: object, name: str = "", settings: ProcessSettings = PLAIN
    ) -> None:
        self.name = name or function.partition(":")[0]
        self._log = tempfile.TemporaryFile()
        die_with_parent = signalled_with_parent(signal.SIGKILL)
        self._process = subprocess.Popen(
            [*settings.command, sys.executable, "-m", MODULE, function],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=settings.environment(),
            pass_fds=settings.pass_fds,
            preexec_fn=partial(_prepare, die_with_parent, settings),
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self.send(arguments)

    def send(self, message: object) -> None:
        """Send a message to the function. Raises: BenchError if the process has ended."""
        try:
            self._input.write(_encode(message) + b"\n")
            self._input.flush()
        except BrokenPipeError as error:
            self.receive(msgspec.Raw)
            raise self._failure() from error

    def receive(self, kind: type[T], advance: Callable[[], None] = lambda: None) -> T:
        """Wait for the next value that the function sends or returns, and return it, converted to
        `kind`. Calls `advance` for each line of progress meanwhile. Raises: BenchError if the
        function failed.
        """
        while line := self._output.readline():
            received = msgspec.json.decode(line, type=CallLine)
            if received.error:
                raise BenchError(f"{self.name}: {received.error}")
            if bytes(received.value):
                return _decode(received.value, kind)
            advance()
        raise self._failure()

    def ask(self, message: object, kind: type[T]) -> T:
        """Send a message and return the reply, converted to `kind`. Raises: BenchError."""
        self.send(message)
        return self.receive(kind)

    def _failure(self) -> BenchError:
        status = self._process.wait()
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - TAIL_BYTES))
        tail = self._log.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
        output = "\n".join(tail) or "it printed nothing"
        return BenchError(f"{self.name} ended with status {status}: {output}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        """Close the process's input and wait for its end; kill it after an error, or if it does not
        end in time.
        """
        with suppress(BrokenPipeError):
            self._input.close()
        try:
            self._process.wait(0 if failure else STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()
        self._log.close()


def call(
    function: str,
    *arguments: object,
    kind: type[T],
    advance: Callable[[], None] = lambda: None,
    name: str = "",
    settings: ProcessSettings = PLAIN,
) -> T:
    """Run a function `module:function` in a child process and return its result, converted to
    `kind`. Raises: BenchError.
    """
    with ProcessCall(function, *arguments, name=name, settings=settings) as process:
        return process.receive(kind, advance)


def _prepare(die_with_parent: Callable[[], None] | None, settings: ProcessSettings) -> None:
    if die_with_parent is not None:
        die_with_parent()
    settings.apply_limits()


class Caller(io.TextIOBase):
    """The calling process, as seen by the called function. Text written to this stream is reported
    as progress.
    """

    def __init__(self) -> None:
        self._output = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)

    def fileno(self) -> int:
        """Return the file descriptor on which messages arrive, for `select`."""
        return sys.stdin.fileno()

    def write(self, text: str) -> int:
        if text.strip():
            self._put(CallLine())
        return len(text)

    def receive(self, kind: Any) -> Any:
        """Return the next message, converted to the type `kind`. Raises: EOFError if the caller has
        closed the input.
        """
        if not (line := sys.stdin.buffer.readline()):
            raise EOFError
        return _decode(line, kind)

    def messages(self, kind: Any) -> Iterator[Any]:
        """Yield the messages, converted to the type `kind`, until the caller closes the input."""
        with suppress(EOFError):
            while True:
                yield self.receive(kind)

    def send(self, value: object) -> None:
        self._put(CallLine(value=msgspec.Raw(_encode(value))))

    def fail(self, error: Exception) -> None:
        self._put(CallLine(error=" ".join(str(error).split()) or type(error).__name__))

    def _put(self, line: CallLine) -> None:
        self._output.write(msgspec.json.encode(line) + b"\n")
        self._output.flush()


def main(path: str) -> int:
    """Run the function `path` (`module:function`) with arguments from standard input; return the
    exit status. A function with a parameter of type `Caller` exchanges messages with the caller,
    and its return value is not sent.
    """
    caller = Caller()
    sys.stdout = cast("TextIO", caller)
    line = sys.stdin.buffer.readline()
    module, _, name = path.partition(":")
    try:
        function: Callable[..., object] = getattr(import_module(module), name)
        hints = get_type_hints(function)
        hints.pop("return", None)
        speaks = [parameter for parameter, kind in hints.items() if kind is Caller]
        kinds = tuple(kind for parameter, kind in hints.items() if parameter not in speaks)
        arguments = _decode(line, GenericAlias(tuple, kinds)) if kinds else ()
        result = function(*arguments, **dict.fromkeys(speaks, caller))
    except EOFError:
        return 0
    except FAILURES as error:
        caller.fail(error)
        return 1
    if not speaks:
        caller.send(result)
    return 0


if __name__ == "__main__":
    # the module that functions import, not a second copy of it
    sys.exit(import_module(MODULE).main(sys.argv[1]))
