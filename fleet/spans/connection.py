"""One open connection between two workers, and the queue into which all connections of a process put what arrives.

Knows no handshake, and nothing of the contents of headers and payloads.
"""

import logging
import queue
import select
import socket
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Final

from fleet.spans.frames import PREFIX, BadFrame, ByteSource, SpanFrame, frame_parts, read_frame

log = logging.getLogger(__name__)

MAX_PARTS = 1024
"""Buffers that the kernel accepts in one call (IOV_MAX of Linux and macOS)."""
READ_AHEAD_BYTES = 64 * 1024
"""A frame of at most this size is usually read by one call of the kernel; a larger payload is read into its own memory."""
SOCKET_BUFFER_BYTES = 4 * 2**20
CLOSE_S = 5.0
PEER_SILENT_S = 30
"""Time after which the kernel ends a connection whose peer answers neither data nor probes, since its host or network is gone, or
receives no data for as long, since its process is frozen."""
CLOSED_HERE = "closed by this process"
READER_FAILED = "the reader of the connection failed; the log has the stack"
CLOSED_BY_PEER = "the peer closed the connection"


@dataclass(frozen=True, slots=True)
class ConnectionOpened:
    """A connection was accepted after its handshake. `purpose`: the dialer's. The first arrival of the connection."""

    connection: "SpanConnection"
    purpose: str


@dataclass(frozen=True, slots=True)
class FrameReceived:
    """A frame arrived."""

    connection: "SpanConnection"
    frame: SpanFrame


@dataclass(frozen=True, slots=True)
class ConnectionClosed:
    """The connection is closed, by either side. The last arrival of each connection, exactly once."""

    connection: "SpanConnection"
    reason: str


Arrival = ConnectionOpened | FrameReceived | ConnectionClosed


class SpanArrivals:
    """Arrivals of any number of connections of one process, in order for each of them.

    Unbounded: a connection always reads, so that its peer never waits; the protocol above it limits what is under way.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Arrival | None] = queue.SimpleQueue()

    def put(self, arrival: Arrival) -> None:
        self._queue.put(arrival)

    def wake(self) -> None:
        """End the current `take` of another thread, or the next one if none waits."""
        self._queue.put(None)

    def take(self, timeout_s: float) -> list[Arrival]:
        """Wait for at most `timeout_s` until something arrives, and return all that has arrived; 0 does not wait."""
        taken: list[Arrival | None] = []
        with suppress(queue.Empty):
            taken.append(self._queue.get(timeout=timeout_s) if timeout_s > 0 else self._queue.get_nowait())
            # The number is fixed here: a fast sender does not extend the call.
            for _ in range(self._queue.qsize()):
                taken.append(self._queue.get_nowait())
        return [arrival for arrival in taken if arrival is not None]


class SpanConnection:
    """A connection to one peer, with a thread that reads frames and one that sends what the kernel does not take immediately.

    Invariants: the reader thread alone closes the socket, after the writer has ended, so no call uses the number of another file.
    `_backlog` holds the unsent bytes in order, and only the writer sends while it is not empty. `_lock` covers `_backlog`, the
    counts of sent bytes and `_reason`, and is never held during a call that can block.
    """

    def __init__(self, sock: socket.socket, peer: str, arrivals: SpanArrivals, *, accepted_for: str | None = None) -> None:
        """Take over a socket after its handshake. `accepted_for`: the dialer's purpose, if this side accepted it."""
        _set_options(sock)
        self.peer: Final = peer
        self._socket, self._arrivals = sock, arrivals
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._backlog: deque[memoryview] = deque()
        self._backlog_bytes = self._num_bytes_sent = self._num_bytes_received = 0
        self._reason: str | None = None
        self._writer = threading.Thread(target=self._write, name=f"span-writer-{peer}", daemon=True)
        self._reader = threading.Thread(target=self._read, args=(accepted_for,), name=f"span-reader-{peer}", daemon=True)
        self._writer.start()
        self._reader.start()

    def __repr__(self) -> str:
        return f"SpanConnection({self.peer!r})"

    @property
    def is_closed(self) -> bool:
        """True once either side has closed the connection; what arrived before may not have been taken yet."""
        return self._reason is not None

    @property
    def num_bytes_sent(self) -> int:
        """Bytes of frames given to the kernel."""
        return self._num_bytes_sent

    @property
    def num_bytes_received(self) -> int:
        """Bytes of the frames that arrived."""
        return self._num_bytes_received

    @property
    def backlog_bytes(self) -> int:
        """Bytes of frames not yet given to the kernel."""
        return self._backlog_bytes

    def send(self, header: bytes, *buffers: ByteSource) -> None:
        """Send a frame whose payload is the bytes of `buffers`, in order. Never waits for the peer; any thread may call this.

        The buffers are C-contiguous, and are not modified while `backlog_bytes` counts them. On a closed connection this does
        nothing: its `ConnectionClosed` arrives. Raises: TypeError if a buffer is not C-contiguous.
        """
        parts, num_bytes = frame_parts(header, buffers)
        with self._lock:
            if self._reason is not None:
                return
            num_sent = 0 if self._backlog else self._send_some(parts[:MAX_PARTS])
            self._num_bytes_sent += num_sent
            if num_sent < num_bytes and self._reason is None:
                self._backlog.extend(parts)
                _drop_sent(self._backlog, num_sent)
                self._backlog_bytes += num_bytes - num_sent
                self._changed.notify()

    def close(self) -> None:
        """Close the connection and wait until its threads have ended; `ConnectionClosed` has then arrived.

        The peer may lose what it has not read yet: send a last frame and wait for an answer where that matters.
        """
        with self._lock:
            self._stop(CLOSED_HERE)
        self._reader.join(CLOSE_S)
        if self._reader.is_alive():
            log.warning("the threads of the span connection to %s have not ended within %g s", self.peer, CLOSE_S)

    def _send_some(self, parts: Sequence[memoryview]) -> int:
        """Give the kernel what it takes without waiting. A failure stops the connection. Needs `_lock`."""
        try:
            return self._socket.sendmsg(parts, (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._stop(_text_of(error))
            return 0

    def _stop(self, reason: str) -> None:
        """End both threads and drop the backlog. The first reason is the one that is reported. Needs `_lock`."""
        if self._reason is not None:
            return
        self._reason = reason
        self._backlog.clear()
        self._backlog_bytes = 0
        self._changed.notify_all()
        # Bytes that have arrived can still be read; then reading ends.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _write(self) -> None:
        writable = select.poll()
        writable.register(self._socket, select.POLLOUT)
        while parts := self._next_parts():
            writable.poll()
            try:
                num_sent = self._socket.sendmsg(parts, (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            except OSError as error:
                with self._lock:
                    self._stop(_text_of(error))
                return
            parts.clear()  # the sender's buffers are free from here on, also while this waits
            self._count_sent(num_sent)

    def _next_parts(self) -> list[memoryview]:
        """Wait for a backlog and return its beginning, or nothing once the connection is stopped."""
        with self._changed:
            while not self._backlog and self._reason is None:
                self._changed.wait()
            return list(islice(self._backlog, MAX_PARTS))

    def _count_sent(self, num_sent: int) -> None:
        with self._lock:
            self._num_bytes_sent += num_sent
            if self._reason is None:
                _drop_sent(self._backlog, num_sent)
                self._backlog_bytes -= num_sent

    def _read(self, accepted_for: str | None) -> None:
        # Not before this thread runs: the receiver may close the connection immediately, which joins it.
        if accepted_for is not None:
            self._arrivals.put(ConnectionOpened(self, accepted_for))
        reason = READER_FAILED
        try:
            reason = self._read_frames()
        finally:
            with self._lock:
                self._stop(reason)
            self._writer.join()
            self._socket.close()
            self._arrivals.put(ConnectionClosed(self, self._reason or reason))

    def _read_frames(self) -> str:
        """Read to the end of the connection, and return the reason of its end."""
        try:
            with BufferedReader(self._socket.makefile("rb", buffering=0), READ_AHEAD_BYTES) as stream:
                while (frame := read_frame(stream)) is not None:
                    self._num_bytes_received += PREFIX.size + len(frame.header) + frame.payload.nbytes
                    self._arrivals.put(FrameReceived(self, frame))
                    del frame  # its memory ends with its receiver's use, not with the next frame
        except OSError as error:
            return _text_of(error)
        except BadFrame as error:
            return error.message
        return CLOSED_BY_PEER


def _drop_sent(backlog: deque[memoryview], num_sent: int) -> None:
    """Drop the first `num_sent` bytes of the backlog."""
    while num_sent and num_sent >= backlog[0].nbytes:
        num_sent -= backlog.popleft().nbytes
    if num_sent:
        backlog[0] = backlog[0][num_sent:]


def _text_of(error: OSError) -> str:
    return f"the connection failed: {error.strerror or error}"


def _set_options(sock: socket.socket) -> None:
    sock.settimeout(None)
    options = [
        (socket.IPPROTO_TCP, "TCP_NODELAY", 1), (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE", PEER_SILENT_S // 3), (socket.IPPROTO_TCP, "TCP_KEEPINTVL", PEER_SILENT_S // 6),
        (socket.IPPROTO_TCP, "TCP_KEEPCNT", 4),
        # For data under way, during which the kernel sends no probes.
        (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", PEER_SILENT_S * 1000),
    ]  # fmt: skip
    for name, limit in (("SO_SNDBUF", "wmem_max"), ("SO_RCVBUF", "rmem_max")):
        if _kernel_limit_bytes(limit) >= SOCKET_BUFFER_BYTES:
            options.append((socket.SOL_SOCKET, name, SOCKET_BUFFER_BYTES))
    for level, name, value in options:
        # Not every system has every option, and the connection works without.
        with suppress(OSError, AttributeError):
            sock.setsockopt(level, getattr(socket, name), value)


@cache
def _kernel_limit_bytes(name: str) -> int:
    """Return a limit of socket buffers. Below it, a set size would be smaller than the one that the kernel finds itself."""
    with suppress(OSError, ValueError):
        return int(Path("/proc/sys/net/core", name).read_text())
    return 0
