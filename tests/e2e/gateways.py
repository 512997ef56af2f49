"""A second gateway of a running fleet, and a TCP proxy whose target can be changed."""

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from tests.e2e.fleets import START_S, ProcessFleet
from tests.support import Running, set_options, start_cli, wait_until


@contextmanager
def another_gateway(fleet: ProcessFleet) -> Iterator[tuple[Running, int]]:
    """Start a second gateway of the fleet, without a keeper; yield its process and port once it is
    ready.
    """
    with start_cli("web", *set_options("web.port=0"), cwd=fleet.folder, env=fleet.env) as running:
        port = int(running.wait_for(r"API http://localhost:(\d+)/v1", timeout_s=START_S)[1])
        wait_until(
            lambda: _is_ready(port), f"the gateway at port {port} to be ready", timeout_s=START_S
        )
        yield running, port


def _is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


class Switch:
    """A TCP proxy that forwards new connections to one gateway, until the test sets another.

    `tls`: whether the proxy itself accepts TLS, for a server built without TLS.
    """

    def __init__(self, target: int, tls: ssl.SSLContext | None = None) -> None:
        self._home = self._target = target
        self._tls = tls
        self.port = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._done = asyncio.Event()

    @staticmethod
    @contextmanager
    def to(target: int, tls: ssl.SSLContext | None = None) -> "Iterator[Switch]":
        switch = Switch(target, tls)
        thread = threading.Thread(target=switch._run, daemon=True)
        thread.start()
        wait_until(lambda: switch.port, "the switch to listen")
        yield switch
        switch._loop.call_soon_threadsafe(switch._done.set)
        thread.join(timeout=10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextmanager
    def leading_to(self, target: int) -> Iterator[None]:
        self._target = target
        try:
            yield
        finally:
            self.lead_home()

    def lead_home(self) -> None:
        self._target = self._home

    def cut(self) -> None:
        """Abort every connection, as a network failure does."""
        self._loop.call_soon_threadsafe(self._abort)

    def _abort(self) -> None:
        for writer in tuple(self._writers):
            writer.transport.abort()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0, ssl=self._tls)
        self.port = server.sockets[0].getsockname()[1]
        await self._done.wait()
        server.close()
        self._abort()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, onwards = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        await asyncio.gather(self._pass(reader, onwards), self._pass(there, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            with contextlib.suppress(OSError):
                while data := await reader.read(65536):
                    writer.write(data)
                    await writer.drain()
        finally:
            self._writers.discard(writer)
            writer.close()
