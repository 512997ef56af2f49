"""Running the gateway: control-plane client, frontend and uvicorn in one process. Knows no route."""

import asyncio
import contextlib
import logging
import math
import signal
import socket
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path

import uvicorn
import uvloop
from starlette.applications import Starlette

from fleet.config.schema import FleetConfig
from fleet.config.settings import EnvironmentSettings
from fleet.control.client import FleetClient
from fleet.core.errors import FleetError
from fleet.core.gc_freeze import freeze_gc
from fleet.processing import load_frontend
from web.app import create_app
from web.http.protocol.bounds import Bounds
from web.http.protocol.config import BoundedConfig
from web.http.protocol.descriptors import connection_bound
from web.http.protocol.http import BoundedHttp
from web.http.protocol.table import ConnectionTable
from web.http.protocol.websocket import BoundedWebSocket
from web.http.tls import TlsFiles, tls_files
from web.realtime.client_events import MAX_EVENT_BYTES
from web.startup_message import how_to_reach

log = logging.getLogger("fleet.web")

GRACE_S = 4.0
"""How long answers under way may still run after a stop signal. Those that need longer are then told where they go on."""
BACKLOG = 2048
"""Connections that wait to be accepted: those of clients that connect as soon as the address is announced, too."""
PARTING_S = 1.0
"""How long these may take to tell it."""
ABORTING_S = 0.5
"""Before uvicorn's time is over, connections are aborted whose clients do not read: time for what runs behind them to end."""


class Server(uvicorn.Server):
    """Uvicorn that ends the console's endless streams first, or its grace time would always run out.

    It leaves signals to `serve`: its own handling would end the process before the fleet is left in order.
    """

    def __init__(self, config: BoundedConfig, app: Starlette) -> None:
        super().__init__(config)
        self._app = app
        self._table = config.table

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        """A second call does not wait for answers under way."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._table.start(asyncio.get_running_loop())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.state.closing.set()
        loop = asyncio.get_running_loop()
        parting = loop.call_later(GRACE_S, self._app.state.detach_all)
        assert self.config.timeout_graceful_shutdown is not None
        aborting = loop.call_later(self.config.timeout_graceful_shutdown - ABORTING_S, self._table.abort_all)
        try:
            await super().shutdown(sockets)
        finally:
            parting.cancel()
            aborting.cancel()
            self._table.stop()
            self._app.state.close()


def run(config: FleetConfig, settings: EnvironmentSettings, redis_url: str, checkpoint: Path) -> None:
    """Serve until SIGTERM or SIGINT. What goes wrong at start is one line on stderr and exit status 1."""
    config = config.model_copy(update={"checkpoint": str(checkpoint)})
    try:
        with _bound_socket(config.web.host, config.web.port) as listener:
            # libuv's loop: fifty microphones are 2,500 frames a second
            uvloop.run(serve(config, settings, redis_url, checkpoint, listener))
    except (FleetError, OSError) as error:
        print(f"fleet web: {error}", file=sys.stderr)
        raise SystemExit(1) from None


async def serve(
    config: FleetConfig, settings: EnvironmentSettings, redis_url: str, checkpoint: Path, listener: socket.socket
) -> None:
    tls = tls_files(config)
    frontend = load_frontend(config.graph_declaration().frontend, checkpoint, config.limits)
    client = await FleetClient.connect(redis_url, config)
    app = create_app(config, client, frontend, settings.api_key)
    await client.start()
    try:
        server = Server(uvicorn_config(app, config, tls, connection_bound(config.web)), app)
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, server.stop)
        freeze_gc()
        listener.listen(BACKLOG)
        _announce(config, listener)
        await server.serve([listener])
    finally:
        await client.stop()


def uvicorn_config(
    app: Starlette, config: FleetConfig, tls: TlsFiles | None = None, max_connections: int | None = None
) -> BoundedConfig:
    """`max_connections`: the limit of the process; None: that of the configuration."""
    bounds = Bounds.of(config.web, max_connections or config.web.max_connections)
    return BoundedConfig(
        app,
        ConnectionTable(bounds),
        _tls_context(tls) if tls is not None else None,
        http=BoundedHttp,
        ws=BoundedWebSocket,
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        # deflate costs time and gains nothing on sound
        ws_per_message_deflate=False,
        # a little more than an event may have, so that one that is too long is told so
        ws_max_size=MAX_EVENT_BYTES + 1024 * 1024,
        timeout_graceful_shutdown=math.ceil(GRACE_S + PARTING_S + ABORTING_S),
    )


def _tls_context(tls: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.cert, tls.key)
    return context


def _bound_socket(host: str, port: int) -> socket.socket:
    """Bound before anything is loaded, so that a port in use is told at once. Raises: OSError naming the fix."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise OSError(f"cannot listen on {host} port {port}: {reason}; choose another with --set web.port=N") from error
    return listener


def _announce(config: FleetConfig, listener: socket.socket) -> None:
    for line in how_to_reach(config.web, listener.getsockname()[1]):
        print(f"fleet web: {line}", flush=True)
