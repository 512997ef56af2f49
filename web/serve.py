"""Process of the gateway: control-plane client, frontend and uvicorn. Knows no route."""

import asyncio
import contextlib
import getpass
import logging
import math
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import uvicorn
import uvloop
from starlette.applications import Starlette

from fleet.config.safety import is_loopback
from fleet.config.schema import FleetConfig, WebConfig
from fleet.config.settings import EnvironmentSettings
from fleet.control.client import FleetClient
from fleet.core.errors import FleetError
from fleet.process.background import full_thread_pool, start
from fleet.process.beat import LEAVING_S, beat
from fleet.process.gc_freeze import freeze_gc
from fleet.process.lan_address import EVERYWHERE, lan_address
from fleet.processing import open_frontend
from web.app import create_app
from web.http.protocol.config import BoundedConfig
from web.http.protocol.descriptors import connection_bound
from web.http.protocol.http import BoundedHttp
from web.http.protocol.table import ConnectionTable
from web.http.protocol.websocket import BoundedWebSocket
from web.http.tls import TlsFiles, tls_files
from web.realtime.protocol.client_events import MAX_EVENT_BYTES

log = logging.getLogger("fleet.web")

GRACE_S = 4.0
"""Time in seconds for answers to finish after a stop signal. Answers that are unfinished then get
an error event and can be resumed at another gateway.
"""
BACKLOG = 2048
"""Limit of connections that wait to be accepted. Clients may connect in large numbers as soon as
the address is printed.
"""
MAX_THREADS = 32
"""Limit of threads for work that would stall the event loop. Below the limit, four threads more
than cores, which is asyncio's default.
"""
DETACH_S = 1.0
"""Time in seconds for sending error events to clients with unfinished answers."""
BEAT_S = 0.2
STANDING_S, COMPUTING_S = 10.0, 60.0
"""Seconds for which the event loop may stand still before the gateway's keeper kills it: while the
loop's thread waits, and while the thread computes.
"""
ABORTING_S = 0.5
"""Seconds before the end of uvicorn's shutdown time-out at which the remaining connections, of
clients that do not read, are aborted, so that their requests can end.
"""


class Server(uvicorn.Server):
    """Uvicorn server that, when stopping, first ends the console's endless streams, which would use
    up the time for unfinished answers.

    `serve` handles signals: uvicorn's own handling would end the process before it leaves the
    fleet.
    """

    def __init__(self, config: BoundedConfig, app: Starlette) -> None:
        super().__init__(config)
        self._app = app
        self._table = config.table

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        """Stop the server; a second call no longer waits for unfinished answers."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._table.start(asyncio.get_running_loop())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.state.closing.set()
        loop = asyncio.get_running_loop()
        detaching = loop.call_later(GRACE_S, self._app.state.detach_all)
        assert self.config.timeout_graceful_shutdown is not None
        aborting = loop.call_later(
            self.config.timeout_graceful_shutdown - ABORTING_S, self._table.abort_all
        )
        try:
            await super().shutdown(sockets)
            await self._app.state.calls_left()
        finally:
            detaching.cancel()
            aborting.cancel()
            self._table.stop()
            self._app.state.close()


def run(
    config: FleetConfig, settings: EnvironmentSettings, redis_url: str, checkpoint: Path
) -> None:
    """Serve until SIGTERM or SIGINT. A failure at start prints one line on stderr and exits with
    status 1.
    """
    config = config.model_copy(update={"checkpoint": str(checkpoint)})
    try:
        with _bound_socket(config.web.host, config.web.port) as listener:
            # uvloop: fifty microphones send 2,500 frames a second
            uvloop.run(serve(config, settings, redis_url, checkpoint, listener))
    except (FleetError, OSError) as error:
        print(f"fleet web: {error}", file=sys.stderr)
        raise SystemExit(1) from None


async def serve(
    config: FleetConfig,
    settings: EnvironmentSettings,
    redis_url: str,
    checkpoint: Path,
    listener: socket.socket,
) -> None:
    tls = tls_files(config)
    frontend = open_frontend(config, checkpoint)
    client = await FleetClient.connect(redis_url, config)
    app = create_app(config, client, frontend, settings.api_key)
    await client.start()
    try:
        await client.open_connections()
        asyncio.get_running_loop().set_default_executor(
            full_thread_pool(min(MAX_THREADS, (os.cpu_count() or 1) + 4), "fleet-web")
        )
        server = Server(uvicorn_config(app, config, tls, connection_bound(config.web)), app)
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, server.stop)
        freeze_gc()
        listener.listen(BACKLOG)
        _announce(config, listener)
        beating = start(_beat_regularly(), "the gateway's beat")
        for follower in app.state.followers:
            follower.start()
        await server.serve([listener])
        beating.cancel()
    finally:
        beat(LEAVING_S, LEAVING_S)
        for follower in app.state.followers:
            await follower.stop()
        await app.state.stop_captures()
        await client.stop()


async def _beat_regularly() -> None:
    """Show the keeper every `BEAT_S` seconds that the event loop runs, without end."""
    while True:
        beat(STANDING_S, COMPUTING_S)
        await asyncio.sleep(BEAT_S)


def uvicorn_config(
    app: Starlette,
    config: FleetConfig,
    tls: TlsFiles | None = None,
    max_connections: int | None = None,
) -> BoundedConfig:
    """Return uvicorn's configuration for the gateway. `max_connections` replaces the deployment's
    limit, for a process that may open fewer connections.
    """
    web = config.web.model_copy(
        update={"max_connections": max_connections or config.web.max_connections}
    )
    return BoundedConfig(
        app,
        ConnectionTable(web),
        _tls_context(tls) if tls is not None else None,
        http=BoundedHttp,
        ws=BoundedWebSocket,
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        # any client could otherwise choose its address, and with it evade the limits per address
        proxy_headers=bool(web.trusted_proxies),
        forwarded_allow_ips=list(web.trusted_proxies),
        # compression takes time and does not shrink audio
        ws_per_message_deflate=False,
        # above the limit of an event, so that a larger one gets its own error
        ws_max_size=MAX_EVENT_BYTES + 1024 * 1024,
        timeout_graceful_shutdown=math.ceil(GRACE_S + DETACH_S + ABORTING_S),
    )


def _tls_context(tls: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.cert, tls.key)
    return context


def _bound_socket(host: str, port: int) -> socket.socket:
    """Return the listening socket. Called before anything is loaded, so that a used port is
    reported immediately.

    Raises: OSError with the remedy.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise OSError(
            f"cannot listen on {host} port {port}: {reason}; choose another with --set web.port=N"
        ) from error
    return listener


def _announce(config: FleetConfig, listener: socket.socket) -> None:
    for line in startup_lines(config.web, listener.getsockname()[1]):
        print(f"fleet web: {line}", flush=True)


def startup_lines(
    web: WebConfig,
    port: int,
    env: Mapping[str, str] = os.environ,
    *,
    find_address: Callable[[], str | None] = lan_address,
) -> list[str]:
    """Return the lines to print at start: the gateway's address; and, if browsers deny microphone
    access at this address, how to get access from another machine.

    `env` holds SSH_CONNECTION if the user is logged in from another machine; the last two words of
    the value are the address and port by which that machine reaches this machine.
    `find_address` returns this machine's address for other devices, such as phones.
    """
    scheme = web.scheme
    shown = "localhost" if web.host in EVERYWHERE or is_loopback(web.host) else web.host
    shown = f"[{shown}]" if ":" in shown else shown
    lines = [f"console {scheme}://{shown}:{port}/  API {scheme}://{shown}:{port}/v1"]
    elsewhere = find_address() if web.host in EVERYWHERE else None
    if elsewhere is not None:
        lines[0] += f"  from other devices {scheme}://{elsewhere}:{port}/"
    if is_loopback(web.host):
        ssh = _ssh_line(port, env.get("SSH_CONNECTION", ""))
        if ssh is not None:
            lines.append(
                f"to talk from your own machine run there:  {ssh}  and open "
                f"{scheme}://localhost:{port}/"
            )
    elif scheme == "http":
        ssh = (
            _ssh_line(port, env.get("SSH_CONNECTION", ""))
            or f"ssh -L {port}:127.0.0.1:{port} USER@HOST"
        )
        lines.append(
            "browsers give sound and microphone only to localhost and https; from another "
            "machine use "
            f"{ssh}  or serve https: --set web.tls=self-signed"
        )
    return lines


def _ssh_line(port: int, connection: str) -> str | None:
    """Return the command that opens an SSH tunnel to `port`; None if `connection` gives no address.
    `connection` is the value of SSH_CONNECTION: address and port of the client, then of this
    machine.
    """
    words = connection.split()
    if len(words) != 4:
        return None
    host, ssh_port = words[2], words[3]
    extra = "" if ssh_port == "22" else f"-p {ssh_port} "
    return f"ssh {extra}-L {port}:127.0.0.1:{port} {getpass.getuser()}@{host}"
