"""A relay of TCP connections that can stop forwarding without breaking connections, like a network
without a route. Does not interpret the bytes.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

READ_BYTES = 1 << 16


class Relay:
    """Forwards connections from `port` on loopback to the port returned by `target`, in its own
    thread.
    """

    def __init__(self, target: Callable[[], int]) -> None:
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._forwarding, self._done = asyncio.Event(), asyncio.Event()
        self._forwarding.set()
        self._listening = threading.Event()
        self.port = 0

    @staticmethod
    @contextmanager
    def to(target: Callable[[], int]) -> "Iterator[Relay]":
        """Run a relay to the port that `target` returns, until the end of the block."""
        relay = Relay(target)
        thread = threading.Thread(target=relay._run, daemon=True)
        thread.start()
        relay._listening.wait()
        try:
            yield relay
        finally:
            relay._loop.call_soon_threadsafe(relay._done.set)
            thread.join()

    def hold(self) -> None:
        """Stop forwarding. New connections are still accepted, but nothing is forwarded on them
        either.
        """
        self._loop.call_soon_threadsafe(self._forwarding.clear)

    def release(self) -> None:
        """Resume forwarding; bytes that arrived in between are forwarded first."""
        self._loop.call_soon_threadsafe(self._forwarding.set)

    @property
    def is_held(self) -> bool:
        return not self._forwarding.is_set()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._listening.set()
        await self._done.wait()
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._forwarding.wait()
        try:
            from_target, to_target = await asyncio.open_connection("127.0.0.1", self._target())
        except OSError:
            writer.transport.abort()
            return
        await asyncio.gather(self._pass(reader, to_target), self._pass(from_target, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError):
                while data := await reader.read(READ_BYTES):
                    await self._forwarding.wait()
                    writer.write(data)
                    await writer.drain()
            await self._forwarding.wait()
        finally:
            writer.close()
