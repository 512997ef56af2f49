"""Connection between two workers, and the queue into which all connections of a process put what
arrives.

Knows no handshake, and nothing of the contents of headers and payloads.
"""

import logging
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader
from typing import Final

from fleet.core.errors import SpanUnreachable, TransferError
from fleet.spans.net import frames
from fleet.spans.net.addresses import PEER_SILENT_S, SOCKET_BUFFER_BYTES, set_options
from fleet.spans.net.frames import (
    MAGIC,
    PREFIX,
    BadFrame,
    ByteSource,
    SpanFrame,
    flat_view,
    frame_parts,
    read_frame,
)
from fleet.spans.net.ring import BlockPort, BlockReads
from fleet.spans.net.send_queue import SendQueue

log = logging.getLogger(__name__)

READ_AHEAD_BYTES = 64 * 1024
"""Size of the read buffer: a frame up to this size usually takes one system call; a larger payload
is read directly into its own memory.
"""
CLOSE_S = 5.0
STALLED_S = PEER_SILENT_S + 1
"""Time without progress in sending after which a connection is closed. Also covers peers on this
host, which the kernel does not watch.
"""
HANG_UP_S = 0.5
"""Time to wait for a peer's connection to close after its memory could not be read, which tells a
peer that is ending from a live one.
"""
CLOSED_HERE = "closed by this process"
READER_FAILED = "the reader of the connection failed; the log has the stack"
CLOSED_BY_PEER = "the peer closed the connection"


@dataclass(frozen=True, slots=True)
class ConnectionOpened:
    """Arrival that reports a connection accepted after its handshake; the first arrival of the
    connection. `purpose`: text that the dialer announced.
    """

    connection: "SpanConnection"
    purpose: str


@dataclass(frozen=True, slots=True)
class FrameReceived:
    """Arrival of a whole frame. `at_s`: time at which its last byte had arrived, by
    `time.monotonic`.
    """

    connection: "SpanConnection"
    frame: SpanFrame
    at_s: float


@dataclass(frozen=True, slots=True)
class ConnectionClosed:
    """Arrival that reports the end of a connection, closed by either side; the last arrival of the
    connection, exactly once.
    """

    connection: "SpanConnection"
    reason: str


Arrival = ConnectionOpened | FrameReceived | ConnectionClosed


class SpanArrivals:
    """Queue of what arrives on all span connections of a process, in order for each connection.

    Unbounded: a connection always reads, so that its peer never waits; the protocol above limits
    how much is in flight. Counts the bytes of all its connections. Thread-safe.
    """

    def __init__(
        self, blocks: BlockReads | None = None, *, max_payload_bytes: int = frames.MAX_PAYLOAD_BYTES
    ) -> None:
        """Create the queue, with settings for all its connections.

        `blocks`: settings for reading large payloads by NIXL, used if the peer has them too; None
        sends all payloads through the sockets. `max_payload_bytes`: a connection whose peer
        announces a larger payload is closed.
        """
        self.blocks: Final = blocks
        self.max_payload_bytes: Final = max_payload_bytes
        self._queue: queue.SimpleQueue[Arrival | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open: set[SpanConnection] = set()
        self._closed_received = self._closed_sent = 0

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Bytes received, and bytes sent, by all connections, open and closed. A frame counts as
        sent once the kernel has taken it; a block that the peer reads through NIXL, once it is
        ready to be read.
        """
        with self._lock:
            received = self._closed_received + sum(
                connection.num_bytes_received for connection in self._open
            )
            return received, self._closed_sent + sum(
                connection.num_bytes_sent for connection in self._open
            )

    def add(self, connection: "SpanConnection") -> None:
        """Register a new connection, whose bytes are counted from now on."""
        with self._lock:
            self._open.add(connection)

    def end(self, connection: "SpanConnection", reason: str) -> None:
        """Unregister a closed connection, and put its last arrival, `ConnectionClosed`, into the
        queue.
        """
        with self._lock:
            self._open.discard(connection)
            self._closed_received += connection.num_bytes_received
            self._closed_sent += connection.num_bytes_sent
        self.put(ConnectionClosed(connection, reason))

    def close_connections(self) -> None:
        """Close every open connection, even if no arrival was taken from it yet, since its peer
        waits for answers.
        """
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            connection.close()

    def put(self, arrival: Arrival) -> None:
        self._queue.put(arrival)

    def wake(self) -> None:
        """End the current `take` of another thread, or the next `take` if no thread waits."""
        self._queue.put(None)

    def take(self, timeout_s: float) -> list[Arrival]:
        """Return all arrivals so far; if there are none, wait up to `timeout_s`, which may be 0."""
        taken: list[Arrival | None] = []
        with suppress(queue.Empty):
            taken.append(
                self._queue.get(timeout=timeout_s) if timeout_s > 0 else self._queue.get_nowait()
            )
            # The number is fixed here: a fast sender does not extend the call.
            for _ in range(self._queue.qsize()):
                taken.append(self._queue.get_nowait())
        return [arrival for arrival in taken if arrival is not None]


class SpanConnection:
    """A connection to one peer, with a reader thread, and a writer thread that sends what the
    kernel does not take immediately.

    Invariants: the reader thread alone closes the socket, after the writer has ended, so no call
    uses a reused file descriptor. Only the writer sends while `_unsent` is not empty. `_lock`
    covers `_unsent` and `_reason`, and is never held during a call that can block.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        arrivals: SpanArrivals,
        *,
        accepted_for: str | None = None,
    ) -> None:
        """Take over a socket after its handshake.

        `peer`: proven name of the peer. `arrivals`: queue for what arrives. `accepted_for`: purpose
        that the dialer announced; None if this side dialed. Raises: SpanUnreachable, after closing
        the socket, if the process can start no more threads.
        """
        set_options(sock)
        self.peer: Final = peer
        self._socket, self._arrivals = sock, arrivals
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._unsent = SendQueue()
        self._num_bytes_received = 0
        self._num_block_bytes_sent = self._num_block_bytes_received = 0
        self._reason: str | None = None
        options = arrivals.blocks
        self._blocks = (
            BlockPort(options, self._has_hung_up)
            if options is not None and options.is_usable
            else None
        )
        self._writer = threading.Thread(target=self._write, name=f"span-writer-{peer}", daemon=True)
        self._reader = threading.Thread(
            target=self._read, args=(accepted_for,), name=f"span-reader-{peer}", daemon=True
        )
        arrivals.add(self)
        if self._blocks is not None:
            # the first frame: what follows may depend on it
            self._send(frames.READS_BLOCKS, b"", (), None)
        try:
            self._writer.start()
            self._reader.start()
        except RuntimeError as error:
            self._end_unstarted()
            raise SpanUnreachable(
                f"no span connection to {peer}: {error}; raise the limit of threads (ulimit -u)"
            ) from error

    def _end_unstarted(self) -> None:
        with self._lock:
            self._stop(CLOSED_HERE)
        if self._writer.is_alive():
            self._writer.join()
        self._socket.close()
        self._arrivals.end(self, CLOSED_HERE)

    def __repr__(self) -> str:
        return f"SpanConnection({self.peer!r})"

    @property
    def is_closed(self) -> bool:
        """True once either side has closed the connection, even if earlier arrivals are still in
        the queue.
        """
        return self._reason is not None

    def _has_hung_up(self) -> bool:
        """Return True if either side has closed the connection, even if received frames are not
        read yet.
        """
        closed = select.poll()
        closed.register(self._socket, getattr(select, "POLLRDHUP", select.POLLHUP))
        return self.is_closed or bool(closed.poll(0))

    def _ends_soon(self) -> bool:
        """Wait up to `HANG_UP_S` for the connection to close; return True if it does. Received data
        is dropped.
        """
        readable, until_s = select.poll(), time.monotonic() + HANG_UP_S
        readable.register(self._socket, select.POLLIN)
        while not self.is_closed and (left_s := until_s - time.monotonic()) > 0:
            try:
                if readable.poll(1e3 * left_s) and not self._socket.recv(
                    SOCKET_BUFFER_BYTES, socket.MSG_DONTWAIT
                ):
                    return True
            except OSError:
                return True
        return self.is_closed

    @property
    def num_bytes_sent(self) -> int:
        """Total bytes of frames that the kernel has taken, and of blocks written for the peer."""
        return self._unsent.num_bytes_sent + self._num_block_bytes_sent

    @property
    def num_bytes_received(self) -> int:
        """Total bytes of the frames that arrived, and of the blocks that were read."""
        return self._num_bytes_received + self._num_block_bytes_received

    @property
    def num_blocks(self) -> tuple[int, int]:
        """Number of the peer's blocks that were read, and number of blocks that were written for
        it.
        """
        return (0, 0) if self._blocks is None else (self._blocks.num_read, self._blocks.num_written)

    @property
    def backlog_bytes(self) -> int:
        """Bytes of frames that the kernel has not taken yet."""
        return self._unsent.num_bytes

    def send(
        self, header: bytes, *buffers: ByteSource, when_sent: Callable[[], None] | None = None
    ) -> None:
        """Send a frame: `header`, then the bytes of `buffers` as its payload. Never waits for the
        peer; any thread may call this.

        The buffers are C-contiguous, and must not change while `backlog_bytes` counts them. On a
        closed connection the frame is dropped without an error. `when_sent` is called once the
        kernel has taken all bytes, by this thread or the writer, and must not block; never called
        for a dropped frame. Raises: TypeError if a buffer is not C-contiguous.
        """
        blocks, views = self._blocks, [flat_view(buffer) for buffer in buffers]
        num_bytes = sum(view.nbytes for view in views)
        if blocks is None or not blocks.fits(num_bytes):
            self._send(MAGIC, header, views, when_sent)
            return
        with blocks.writing:
            written = blocks.write(views, num_bytes)
            if written is None:
                self._send(MAGIC, header, views, when_sent)
                return
            block, metadata = written
            if metadata is not None:
                self._send(frames.RING, blocks.name.encode(), [memoryview(metadata)], None)
            self._send(frames.BLOCK_AT, header, [memoryview(block)], when_sent)
            self._num_block_bytes_sent += num_bytes

    def _send(
        self,
        kind: bytes,
        header: bytes,
        buffers: Sequence[memoryview],
        when_sent: Callable[[], None] | None,
    ) -> None:
        parts, num_bytes = frame_parts(header, buffers, kind)
        with self._lock:
            if self._reason is not None:
                return
            was_empty = not self._unsent
            self._unsent.add(parts, num_bytes, when_sent)
            ended = self._unsent.drop_sent(self._send_some()) if was_empty else []
            if self._unsent:
                self._changed.notify()
        for each in ended:
            each()

    def close(self) -> None:
        """Close the connection and wait until its threads have ended; `ConnectionClosed` has then
        arrived.

        Frames that the peer has not read yet may be lost. To be certain of delivery, wait for the
        peer's reply before closing.
        """
        with self._lock:
            self._stop(CLOSED_HERE)
        self._reader.join(CLOSE_S)
        if self._reader.is_alive():
            log.warning(
                "the threads of the span connection to %s have not ended within %g s",
                self.peer,
                CLOSE_S,
            )

    def _send_some(self) -> int:
        """Send as many unsent bytes as the kernel takes without waiting; return their number. A
        failure stops the connection. Needs `_lock`.
        """
        try:
            return self._socket.sendmsg(self._unsent.first(), (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._stop(_text_of(error))
            return 0

    def _stop(self, reason: str) -> None:
        """Stop both threads and drop unsent bytes. The first `reason` is the one that is reported.
        Needs `_lock`.
        """
        if self._reason is not None:
            return
        self._reason = reason
        self._unsent.clear()
        self._changed.notify_all()
        # Bytes that have arrived can still be read; then reading ends.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _write(self) -> None:
        writable = select.poll()
        writable.register(self._socket, select.POLLOUT)
        while parts := self._next_parts():
            if not writable.poll(1e3 * STALLED_S):
                with self._lock:
                    self._stop(f"the peer has received nothing for {STALLED_S:g} s")
                return
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
        """Wait for unsent bytes and return the first of them; empty if the connection stops."""
        with self._changed:
            while not self._unsent and self._reason is None:
                self._changed.wait()
            return self._unsent.first()

    def _count_sent(self, num_sent: int) -> None:
        with self._lock:
            ended = self._unsent.drop_sent(num_sent)
        for when_sent in ended:
            when_sent()

    def _read(self, accepted_for: str | None) -> None:
        # Not before this thread runs: the receiver may close the connection immediately, which
        # joins it.
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
            if self._blocks is not None:
                self._blocks.close()
                if any(self.num_blocks):
                    log.info(
                        "NIXL read %d blocks from %s and %d for it",
                        self.num_blocks[0],
                        self.peer,
                        self.num_blocks[1],
                    )
            self._arrivals.end(self, self._reason or reason)

    def _read_frames(self) -> str:
        """Read frames until the connection ends; return the reason of its end."""
        try:
            with BufferedReader(
                self._socket.makefile("rb", buffering=0), READ_AHEAD_BYTES
            ) as stream:
                while (frame := read_frame(stream, self._arrivals.max_payload_bytes)) is not None:
                    self._take(frame)
                    del frame  # its memory ends with its receiver's use, not with the next frame
        except OSError as error:
            return _text_of(error)
        except BadFrame as error:
            return error.message
        except TransferError as error:
            # The memory of a process that ends is gone before its sockets are.
            if self._arrivals.blocks is not None and not self._ends_soon():
                self._arrivals.blocks.pause()
                log.warning(
                    "the memory of %s cannot be read; its rows travel on connections for a "
                    "while: %s",
                    self.peer,
                    error,
                )
            return error.message
        return CLOSED_BY_PEER

    def _take(self, frame: SpanFrame) -> None:
        """Count a received frame, and put it into the queue, unless it only concerns blocks.
        Raises: BadFrame, TransferError.
        """
        self._num_bytes_received += PREFIX.size + len(frame.header) + frame.payload.nbytes
        whole = frame if frame.kind == MAGIC else self._take_control(frame)
        if whole is not None:
            self._arrivals.put(FrameReceived(self, whole, time.monotonic()))

    def _take_control(self, frame: SpanFrame) -> SpanFrame | None:
        """Handle a frame that concerns blocks. If it announces a block, read the block and return a
        frame with it as the payload, else None.

        Raises: BadFrame, TransferError; the connection cannot be used further.
        """
        blocks = self._blocks
        if blocks is None:
            if frame.kind != frames.READS_BLOCKS:
                raise BadFrame("the peer sent a block, and this process reads none")
            return None
        match frame.kind:
            case frames.READS_BLOCKS:
                blocks.peer_reads = True
            case frames.RING:
                blocks.load_peer(frame.header, frame.payload)
            case frames.BLOCK_READ:
                blocks.free_first()
            case _:
                payload = blocks.read(frame.payload)
                self._num_block_bytes_received += len(payload)
                self._send(frames.BLOCK_READ, b"", (), None)
                return SpanFrame(frame.header, payload)
        return None


def _text_of(error: OSError) -> str:
    return f"the connection failed: {error.strerror or error}"
