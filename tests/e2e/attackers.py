"""Attackers of a gateway, as one process: `python -m tests.e2e.attackers PORT SECONDS MODEL`.

The process prints `attacking` once it begins. For SECONDS it attacks as fast as the gateway allows,
and replaces each connection that the gateway closes. Then it prints counts of what it sent, as
JSON, and keeps its connections open and idle until its input ends. Connections go to loopback only;
half of them come from 127.0.0.1, the others from ten other loopback addresses.
"""

import asyncio
import base64
import contextlib
import io
import itertools
import json
import os
import select
import socket
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

import numpy as np
import soundfile
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

NICENESS = 10
"""Niceness of the attackers. Real attackers would have their own machines, so here they yield the
processor to the fleet.
"""
NUM_IDLE, NUM_HALF_OPEN, NUM_UNREAD = 1000, 400, 8
NUM_FLOODS, NUM_VALIDATIONS, NUM_DECODERS, NUM_EVENTS = 4, 2, 2, 1
MAX_HEADER_BYTES = 64 * 1024 * 1024
"""Number of header bytes sent on one connection; a gateway without limits would read all of them.
"""
BOMB_BYTES = 1024 * 1024
HEADER_LINES = b"".join(b"x-%d: %s\r\n" % (number, b"a" * 1000) for number in range(64))
AUTOGROUP = Path("/proc/self/autogroup")
RETRY_S = 0.05
CHAT = "/v1/chat/completions"
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Attack:
    """All attackers of one run: their connections, and the number of attacks by kind."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._stopped = asyncio.Event()
        self._sources = itertools.cycle(
            ["127.0.0.1", *(f"127.0.{part}.{part}" for part in range(2, 12)), *["127.0.0.1"] * 9]
        )
        self.counts: Counter[str] = Counter()

    async def dial(self, kind: str, *, small: bool = False) -> socket.socket:
        """Return a socket connected from the next client address. Raises: OSError.

        `small`: use a small receive buffer and small segments. With loopback's large segments, the
        kernel's buffers would hold 3 MB of the gateway's output.
        """
        sock = socket.socket()
        sock.setblocking(False)
        if small:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        try:
            sock.bind((next(self._sources), 0))
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self._port))
        except BaseException:
            sock.close()
            raise
        self.counts[kind] += 1
        return sock

    @contextlib.asynccontextmanager
    async def open(self, kind: str) -> AsyncGenerator[Connection]:
        reader, writer = await asyncio.open_connection(sock=await self.dial(kind))
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def repeat(self, attack: Callable[[], Awaitable[None]]) -> None:
        """Start an attack again whenever the gateway has ended it, until `stop` is set."""
        while not self._stopped.is_set():
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, WebSocketException):
                await attack()
            await self.pause(RETRY_S)

    async def pause(self, seconds: float) -> None:
        """Wait for `seconds`, or until `stop` is set."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopped.wait(), seconds)

    def stop(self) -> None:
        self._stopped.set()

    async def hold(self, kind: str, sent: bytes) -> None:
        """Send `sent`, then nothing, until the gateway closes the connection."""
        async with self.open(kind) as (reader, writer):
            writer.write(sent)
            await reader.read()

    async def flood_headers(self) -> None:
        async with self.open("header_flood") as (_, writer):
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
            for _ in range(MAX_HEADER_BYTES // len(HEADER_LINES)):
                if self._stopped.is_set():
                    return
                writer.write(HEADER_LINES)
                await writer.drain()
                self.counts["header_bytes"] += len(HEADER_LINES)

    async def post(
        self, kind: str, path: str, body: bytes, content_type: str = "application/json"
    ) -> None:
        """Send one complete request and read its response."""
        async with self.open(kind) as (reader, writer):
            writer.write(head(path, len(body), content_type) + body)
            status = await reader.readline()
            self.counts[f"{kind} {status[9:12].decode()}"] += 1
            await reader.read()

    async def leave_unread(self, body: bytes) -> None:
        """Request a long stream and read nothing of it, until the gateway resets the connection."""
        with await self.dial("unread", small=True) as sock:
            await asyncio.get_running_loop().sock_sendall(sock, head(CHAT, len(body)) + body)
            closed = select.poll()
            closed.register(sock, select.POLLRDHUP)
            while not closed.poll(0) and not self._stopped.is_set():
                await self.pause(RETRY_S)
            if self._stopped.is_set():
                await asyncio.Event().wait()  # holds the connection until this process ends

    async def bomb_events(self) -> None:
        """Send invalid events of the largest allowed size over a voice session."""
        self.counts["event_bomb"] += 1
        metadata = {str(number): 0 for number in range(BOMB_BYTES // 10)}
        event = json.dumps({"type": "response.create", "response": {"metadata": metadata}})
        async with connect(f"ws://127.0.0.1:{self._port}/v1/realtime", max_size=None) as session:
            while not self._stopped.is_set():
                await session.send(event)
                await session.recv()


def head(path: str, length: int, content_type: str = "application/json") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: {content_type}\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


def clip(num_channels: int, rate_hz: int, seconds: int, container: str, subtype: str) -> bytes:
    """Return a silent audio file that is small compared with its decoded size."""
    file = io.BytesIO()
    with soundfile.SoundFile(
        file, "w", rate_hz, num_channels, format=container, subtype=subtype
    ) as written:
        for _ in range(seconds):
            written.write(np.zeros((rate_hz, num_channels), np.float32))
    return file.getvalue()


def spoken(model: str, file: bytes) -> bytes:
    """Return the JSON body of a chat request whose prompt is an audio file."""
    part = {
        "type": "input_audio",
        "input_audio": {"data": base64.b64encode(file).decode(), "format": "wav"},
    }
    return json.dumps(
        {"model": model, "messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
    ).encode()


async def run(port: int, seconds: float, model: str) -> None:
    attack = Attack(port)
    bomb = json.dumps({"model": model, "messages": [0] * (BOMB_BYTES // 3)}).encode()
    clips = itertools.cycle(
        [
            spoken(model, clip(255, 8000, 3, "OGG", "VORBIS")),
            spoken(model, clip(8, 48_000, 100, "FLAC", "PCM_16")),
        ]
    )
    endless = json.dumps(
        {
            "model": model,
            "stream": True,
            "max_tokens": 4000,
            "modalities": ["text", "audio"],
            "audio": {"voice": "chelsie", "format": "pcm16"},
            "messages": [{"role": "user", "content": "speak"}],
            "fleet": {"talker": {"max_tokens": 4000}},
        }
    ).encode()
    halves = itertools.cycle(
        [
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Le",
            head(CHAT, 100_000) + b'{"model": "any", ',
        ]
    )
    kinds: list[tuple[int, Callable[[], Awaitable[None]]]] = [
        (NUM_IDLE, lambda: attack.hold("idle", b"")),
        (NUM_HALF_OPEN, lambda: attack.hold("half_open", next(halves))),
        (NUM_UNREAD, lambda: attack.leave_unread(endless)),
        (NUM_FLOODS, attack.flood_headers),
        (NUM_VALIDATIONS, lambda: attack.post("validation_bomb", CHAT, bomb)),
        (NUM_DECODERS, lambda: attack.post("decoder_bomb", CHAT, next(clips))),
        (NUM_EVENTS, attack.bomb_events),
    ]
    attackers = [
        asyncio.ensure_future(attack.repeat(kind)) for number, kind in kinds for _ in range(number)
    ]
    print("attacking", flush=True)
    await attack.pause(seconds)
    attack.stop()
    print(json.dumps(attack.counts), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for attacker in attackers:
        attacker.cancel()
    await asyncio.wait(attackers)


def step_back() -> None:
    """Lower this process's priority to the fleet's advantage. Linux may schedule each session as a
    whole (autogroup); then niceness counts only within a session.
    """
    os.nice(NICENESS)
    if AUTOGROUP.exists():
        os.setsid()
        AUTOGROUP.write_text(str(NICENESS))


if __name__ == "__main__":
    step_back()
    asyncio.run(run(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]))
