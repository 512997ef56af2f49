"""Client of the fork server: keepers start workers through it. If the fork server cannot start a
worker, the keeper starts a new process instead.

The first keeper that needs a fork server starts it. Keepers of a deployment share a server if their
child processes would inherit the same environment.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleet.cli.environment import without_secrets
from fleet.cli.fork_protocol import (
    LOCK,
    Ended,
    Greeting,
    Message,
    NotStarted,
    Started,
    StartRequest,
    is_own_peer,
    locked,
    receive,
    send,
    socket_name,
)
from fleet.cli.hangs import HangWatch, hang_watch
from fleet.cli.keeper import UNKNOWN_STATUS, ChildProcess, NewProcesses, ProcessStarter
from fleet.config import FleetConfig
from fleet.config.roles import Role
from fleet.process import background
from fleet.process.beat import UNBOUNDED_S
from fleet.process.private import make_private_folder
from fleet.process.title import RESERVE
from fleet.process.unix_sockets import address_of

log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 180.0
"""Wait for a server to finish its imports. The value is far above the usual import time: on a
machine too slow for it, a new process would be as slow.
"""
REPLY_TIMEOUT_S = 5.0
STATUS_TIMEOUT_S = 5.0
AVOID_S = 300.0
"""Time after a server's time-out during which workers are started as new processes, so that only
one start waits for a stuck server.
"""
LOCK_POLL_S = 0.05
BACKLOG = 128
ENGINE = "torch"
MODULES = ("fleet.cli.main", "fleet.worker.main", "fleet.transfer.factory")
"""Modules that the server imports in addition to the modules that build the stages."""


class ServerUnavailable(Exception):
    """The fork server cannot start a process.

    `final`: whether no later attempt can succeed. `late`: whether the server did not answer in
    time.
    """

    def __init__(self, reason: str, *, final: bool = False, late: bool = False) -> None:
        super().__init__(reason)
        self.final = final
        self.late = late


def make_starter(config: FleetConfig, role: Role) -> ProcessStarter:
    """Return the process starter for a role's workers. Roles on the torch engine use the fork
    server; vLLM starts its own processes, and the other engines import little.
    """
    if not config.preload_workers or config.engine_of(role.stage) != ENGINE:
        return NewProcesses()
    if sys.platform != "linux":
        log.info("workers are started as new processes: a fork server needs Linux")
        return NewProcesses()
    stages = config.graph_declaration().stages
    builders = [
        stage.builder.partition(":")[0]
        for stage in stages
        if config.engine_of(stage.name) == ENGINE
    ]
    return ForkStarter(
        folder=config.data_dir.absolute(),
        modules=(*MODULES, *builders),
        hangs=hang_watch(config.lease, starting_s=UNBOUNDED_S),
    )


@dataclass(slots=True, kw_only=True)
class ForkedProcess:
    """A process that the fork server has started. `lifeline`: write end of a pipe; closing it kills
    the process.
    """

    pid: int
    pidfd: int
    lifeline: int
    connection: socket.socket
    when_server_lost: Callable[[], None]

    async def wait(self) -> int:
        """Wait for the process to end and return its exit status, or `UNKNOWN_STATUS` if the fork
        server ended first.
        """
        ended = asyncio.create_task(_readable(self.pidfd))
        reply = asyncio.create_task(_receive(self.connection))
        reply.add_done_callback(self._check_server)
        try:
            await ended
            # The server reaps it at the same time, unless the server is frozen or gone.
            await asyncio.wait({reply}, timeout=STATUS_TIMEOUT_S)
            if not reply.done():
                # its late answer must not be taken for that to the next request
                self.when_server_lost()
            message = reply.result()[0] if reply.done() and not reply.exception() else None
            return message.status if isinstance(message, Ended) else UNKNOWN_STATUS
        finally:
            await _cancel(ended, reply)
            os.close(self.lifeline)
            os.close(self.pidfd)

    def _check_server(self, reply: asyncio.Task[tuple[Message, list[int]]]) -> None:
        if not reply.cancelled() and reply.exception():
            self.when_server_lost()

    def terminate(self) -> None:
        signal.pidfd_send_signal(self.pidfd, signal.SIGTERM)


@dataclass(slots=True, kw_only=True)
class ForkStarter:
    """Starts `fleet` commands through a fork server, one at a time, and as new processes if that
    fails.

    `modules`: modules that the server has imported. `folder`: folder of the server's socket.
    `hangs`: watch by which a stopped server is killed; None kills none.
    """

    folder: Path
    modules: tuple[str, ...]
    hangs: HangWatch | None = None
    _connection: socket.socket | None = None
    _server_pid: int | None = None
    _greeted_by: int | None = None
    _watching: asyncio.Task[None] | None = None
    _unusable: bool = False
    _avoided_until_s: float = 0.0
    _connecting: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])

    async def start(
        self,
        arguments: Sequence[str],
        output: int,
        env: Mapping[str, str] | None,
        beat: int | None = None,
    ) -> ChildProcess:
        """Start `fleet ARGUMENTS` and return the process. Raises: OSError if neither the fork
        server nor a new process can run it.
        """
        await self._cancel_connecting()
        if not self._unusable and asyncio.get_running_loop().time() >= self._avoided_until_s:
            environment = os.environ if env is None else env
            descriptors = [output] if beat is None else [output, beat]
            try:
                return await self._fork_or_reconnect(arguments, descriptors, environment)
            except (ServerUnavailable, OSError, EOFError) as error:
                is_late = isinstance(error, ServerUnavailable) and error.late
                was_ended = is_late and self._end_late_server()
                self._disconnect()
                self._unusable = isinstance(error, ServerUnavailable) and error.final
                if is_late and not was_ended:
                    self._avoided_until_s = asyncio.get_running_loop().time() + AVOID_S
                which = (
                    "workers start as new processes"
                    if self._unusable
                    else "this worker starts as a new process"
                )
                log.warning("%s, not by the fork server: %s", which, error)
        return await NewProcesses().start(arguments, output, env, beat)

    async def _fork_or_reconnect(
        self, arguments: Sequence[str], descriptors: list[int], environment: Mapping[str, str]
    ) -> ForkedProcess:
        try:
            await self._connect(environment)
            return await self._fork(arguments, descriptors, environment)
        except (EOFError, ConnectionError):
            # The server ended while no process of this keeper ran.
            self._disconnect()
            await self._connect(environment)
            return await self._fork(arguments, descriptors, environment)

    async def close(self) -> None:
        """Disconnect from the fork server, which ends when its last keeper has disconnected."""
        await self._cancel_connecting()
        self._disconnect()
        self._reap_server()

    def _disconnect(self) -> None:
        self._stop_watching()
        self._greeted_by = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _reap_server(self) -> None:
        if self._server_pid is not None and os.waitpid(self._server_pid, os.WNOHANG) != (0, 0):
            self._server_pid = None

    def _watch_server(self, pid: int) -> None:
        """Begin to watch the fork server `pid` in place of any former one; kill the server if it is
        stopped for too long. Without `hangs` nothing is watched.
        """
        self._stop_watching()
        if self.hangs is not None:
            self._watching = background.start(
                _end_hung_server(pid, self.hangs), "the watch of the fork server"
            )

    def _stop_watching(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None

    def _end_late_server(self) -> bool:
        """Kill a server that has greeted this keeper but does not reply; return True if it was
        killed. The connection to the server is still open, so no other process can have its pid.
        """
        if self.hangs is None or self._greeted_by is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._greeted_by, signal.SIGKILL)
        return True

    async def _cancel_connecting(self) -> None:
        await _cancel(*self._connecting)
        self._connecting.clear()

    def _reconnect(self, environment: Mapping[str, str]) -> None:
        """Start a new fork server in the background, so that its imports are done before the next
        start.
        """

        async def connect() -> None:
            # the next start reports it
            with contextlib.suppress(ServerUnavailable, OSError, EOFError):
                await self._connect(environment)

        self._disconnect()
        self._reap_server()
        self._connecting.add(asyncio.create_task(connect()))

    async def _connect(self, environment: Mapping[str, str]) -> None:
        """Connect to the fork server; start one first if none is running. Raises:
        ServerUnavailable, OSError, EOFError.
        """
        if self._connection is not None:
            return
        try:
            self._connection = await self._greet(environment)
        except EOFError:
            # The server was ending, or was killed; a new server is started.
            self._connection = await self._greet(environment)

    async def _greet(self, environment: Mapping[str, str]) -> socket.socket:
        connection = await self._open(environment)
        try:
            if not is_own_peer(connection):
                raise ServerUnavailable(f"a socket in {self.folder} is another user's", final=True)
            message, _ = await _receive(connection, LOAD_TIMEOUT_S)
            assert isinstance(message, Greeting), "the first message of a server"
            if message.refusal:
                raise ServerUnavailable(message.refusal, final=True)
            self._greeted_by = message.pid
            self._watch_server(message.pid)
        except BaseException:
            connection.close()
            raise
        return connection

    async def _open(self, environment: Mapping[str, str]) -> socket.socket:
        """Return a connection to a fork server, which may still be importing its modules. If no
        server runs, start it, or wait while another keeper does.
        """
        make_private_folder(self.folder)
        name = socket_name(self.modules, environment)
        deadline_s = asyncio.get_running_loop().time() + REPLY_TIMEOUT_S
        while True:
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                return self._dial(name)
            with contextlib.suppress(BlockingIOError), locked(self.folder):
                with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                    return self._dial(name)  # the keeper that held the lock has started one
                self._launch(name, environment)
                return self._dial(name)
            if asyncio.get_running_loop().time() > deadline_s:
                raise ServerUnavailable(f"another process holds the lock {self.folder / LOCK}")
            await asyncio.sleep(LOCK_POLL_S)

    def _dial(self, name: str) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.setblocking(False)
            with address_of(self.folder, name) as path:
                connection.connect(path)
        except BaseException:
            connection.close()
            raise
        return connection

    def _launch(self, name: str, environment: Mapping[str, str]) -> None:
        """Create the listening socket and start a fork server on it, in a process session of its
        own, since the server may outlive this keeper.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            with address_of(self.folder, name) as path:
                Path(path).unlink(missing_ok=True)
                listener.bind(path)
                Path(path).chmod(0o600)
            listener.listen(BACKLOG)
            listener.set_inheritable(True)
            number = listener.fileno()
            command = [
                sys.executable,
                "-m",
                "fleet.cli.fork_server",
                str(number),
                str(self.folder),
                name,
                *self.modules,
                RESERVE,
            ]
            null = [
                (os.POSIX_SPAWN_OPEN, standard, os.devnull, os.O_RDWR, 0) for standard in range(3)
            ]
            env = without_secrets(environment, frozenset())
            self._server_pid = os.posix_spawn(
                sys.executable, command, env, file_actions=null, setsid=True
            )
            self._watch_server(self._server_pid)

    async def _fork(
        self, arguments: Sequence[str], descriptors: list[int], environment: Mapping[str, str]
    ) -> ForkedProcess:
        """Let the server fork a process. `descriptors`: file for the output of the process, then,
        if a keeper watches the process, the memory for its beats.
        """
        assert self._connection is not None
        read_end, write_end = os.pipe()
        request = StartRequest(
            arguments=[os.fsencode(argument) for argument in arguments],
            environment=[os.fsencode(f"{name}={value}") for name, value in environment.items()],
            folder=os.fsencode(os.getcwd()),
            keeper=os.getpid(),
        )
        try:
            send(self._connection, request, [descriptors[0], read_end, *descriptors[1:]])
            message, received = await _receive(self._connection, REPLY_TIMEOUT_S)
            if not isinstance(message, Started):
                raise ServerUnavailable(
                    message.reason if isinstance(message, NotStarted) else f"unexpected {message}"
                )
        except BaseException:
            # A process that is forked later finds its lifeline closed, and ends.
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
        return ForkedProcess(
            pid=message.pid,
            pidfd=received[0],
            lifeline=write_end,
            connection=self._connection,
            when_server_lost=lambda: self._reconnect(environment),
        )


async def _end_hung_server(pid: int, hangs: HangWatch) -> None:
    """Wait until the fork server `pid` counts as hung, then kill it. The processes that it forked
    continue.
    """
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            complaint = await hangs.until_hung(pid, None)
            log.warning(
                "the fork server (pid %d) hangs: %s; it is killed, and a keeper starts another one",
                pid,
                complaint,
            )
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            os.close(pidfd)


async def _receive(
    connection: socket.socket, timeout_s: float | None = None
) -> tuple[Message, list[int]]:
    """Receive a message and its file descriptors from the fork server. Raises: ServerUnavailable
    after `timeout_s`; EOFError or OSError if the server is gone.
    """
    try:
        await asyncio.wait_for(_readable(connection.fileno()), timeout_s)
    except TimeoutError:
        raise ServerUnavailable(f"it did not answer within {timeout_s:g} s", late=True) from None
    try:
        return receive(connection)
    except (EOFError, ConnectionError):
        raise EOFError("it has ended") from None


async def _readable(descriptor: int) -> None:
    loop, event = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, event.set)
    try:
        await event.wait()
    finally:
        loop.remove_reader(descriptor)


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
