"""Listener for span connections: one thread runs all handshakes, without waiting for any single
client. Knows no frames.

A client that has not proved the key costs a socket and at most a few KB, for a limited time. The
number of such clients is also limited: a new one takes the place of the oldest, since a worker's
handshake takes milliseconds.
"""

import logging
import selectors
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

from fleet.core.errors import SpanUnreachable
from fleet.spans.net.addresses import address_text, listen
from fleet.spans.net.connection import SpanArrivals, SpanConnection
from fleet.spans.net.handshake import (
    KEY_ADVICE,
    AcceptHandshake,
    HandshakeRefused,
    MessageBuffer,
    ProvenPeer,
)

log = logging.getLogger(__name__)

MAX_HANDSHAKES = 64
ACCEPT_BACKLOG = 1024
"""Most connections that the kernel holds until they are accepted; beyond this number, a dialer
tries again after a second.
"""
HANDSHAKE_TIMEOUT_S = 5.0
CLOSE_S = 5.0
NO_FILES_S = 0.2
"""Pause after a failed accept, usually because the process has too many open files."""
LOG_S = 1.0
"""Minimum interval between log lines about refused clients, of which there may be many."""


class PendingHandshake:
    """An accepted socket whose client has not proved the key."""

    def __init__(
        self, sock: socket.socket, client: str, handshake: AcceptHandshake, deadline_s: float
    ) -> None:
        self.socket = sock
        self.client = client
        self.deadline_s = deadline_s
        self._handshake, self._buffer = handshake, MessageBuffer()

    def advance(self) -> ProvenPeer | None:
        """Read what has arrived and answer it; return the peer once it has given its proof, else
        None.

        Raises: HandshakeRefused, OSError.
        """
        try:
            received = self.socket.recv(self._buffer.num_missing())
        except BlockingIOError:
            return None
        if not received:
            cause = (
                f"; the client probably has another key: {KEY_ADVICE}"
                if self._handshake.awaits_proof
                else ""
            )
            raise HandshakeRefused(f"the client closed the connection before its proof{cause}")
        message = self._buffer.append(received)
        if message is None:
            return None
        answer = self._handshake.receive(message)
        if isinstance(answer, ProvenPeer):
            return answer
        # A new socket has room for these few bytes; without it, the client does not get a valid
        # challenge.
        self.socket.send(answer)
        return None


class SpanListener:
    """Socket and thread that accept a process's span connections. Accepted connections appear in
    `arrivals` as `ConnectionOpened`; the receiver must close them.

    `place`: an address of this host, for TCP at `port` (0 for any free port), or a folder for a
    Unix socket, which `close` removes. `key`: key that clients must prove to have. `own_name`: name
    of this worker.
    Raises: SpanUnreachable if the address cannot be bound.
    """

    def __init__(
        self,
        place: str | Path,
        *,
        arrivals: SpanArrivals,
        key: bytes,
        own_name: str,
        port: int = 0,
        handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
    ) -> None:
        AcceptHandshake(key, own_name)  # checks both before the first client does
        self._arrivals = arrivals
        self._key = key
        self._own_name = own_name
        self._timeout_s = handshake_timeout_s
        self._socket, self.address = listen(place, port, backlog=ACCEPT_BACKLOG)
        self._socket.setblocking(False)
        self._pending: dict[socket.socket, PendingHandshake] = {}  # oldest first
        self._next_log_s = 0.0
        self._closing = threading.Event()
        self._waker, self._wakes = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._selector.register(self._wakes, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="span-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and end unfinished handshakes; accepted connections remain open."""
        self._closing.set()
        with suppress(OSError):
            self._waker.send(b"\0")
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning(
                "the thread of the span listener at %s has not ended within %g s",
                address_text(self.address),
                CLOSE_S,
            )

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._serve()
        finally:
            for pending in [*self._pending.values()]:
                self._drop(pending)
            self._selector.close()
            for sock in (self._socket, self._waker, self._wakes):
                sock.close()
            if isinstance(self.address, Path):
                self.address.unlink(missing_ok=True)

    def _serve(self) -> None:
        """Wait for socket events and handle them, then refuse handshakes that have timed out."""
        for ready, _ in self._selector.select(self._remaining_s()):
            if ready.fileobj is self._socket:
                self._accept()
            elif isinstance(ready.data, PendingHandshake):
                self._advance(ready.data)
        while self._remaining_s() == 0:
            self._refuse(
                next(iter(self._pending.values())), f"no proof within {self._timeout_s:g} s"
            )

    def _remaining_s(self) -> float | None:
        """Return the time until the oldest handshake times out; None if there is no handshake."""
        for pending in self._pending.values():
            return max(0.0, pending.deadline_s - time.monotonic())
        return None

    def _accept(self) -> None:
        try:
            sock, address = self._socket.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            where = address_text(self.address)
            self._log(
                "the span listener at %s cannot accept a connection: %s", where, error.strerror
            )
            self._closing.wait(NO_FILES_S)
            return
        if len(self._pending) >= MAX_HANDSHAKES:
            self._refuse(
                next(iter(self._pending.values())),
                f"{MAX_HANDSHAKES} newer clients have not proved the key either",
            )
        sock.setblocking(False)
        client = (
            "a process of this host"
            if isinstance(self.address, Path)
            else f"{address[0]}:{address[1]}"
        )
        handshake = AcceptHandshake(self._key, self._own_name)
        pending = PendingHandshake(sock, client, handshake, time.monotonic() + self._timeout_s)
        self._pending[sock] = pending
        self._selector.register(sock, selectors.EVENT_READ, pending)

    def _advance(self, pending: PendingHandshake) -> None:
        if pending.socket not in self._pending:
            return  # refused since the selector returned
        try:
            peer = pending.advance()
        except HandshakeRefused as refused:
            with suppress(OSError):
                pending.socket.send(refused.reply)
            self._refuse(pending, refused.message)
        except OSError as error:
            self._refuse(pending, f"the connection failed: {error.strerror}")
        else:
            if peer is not None:
                self._forget(pending)
                self._open(pending.socket, peer)

    def _open(self, sock: socket.socket, peer: ProvenPeer) -> None:
        try:
            SpanConnection(sock, peer.name, self._arrivals, accepted_for=peer.purpose)
        except SpanUnreachable as error:
            self._log("%s", error.message)

    def _refuse(self, pending: PendingHandshake, cause: str) -> None:
        self._log("refused the span connection from %s: %s", pending.client, cause)
        self._drop(pending)

    def _log(self, text: str, *values: object) -> None:
        if time.monotonic() >= self._next_log_s:
            self._next_log_s = time.monotonic() + LOG_S
            log.warning(text, *values)

    def _drop(self, pending: PendingHandshake) -> None:
        self._forget(pending)
        pending.socket.close()

    def _forget(self, pending: PendingHandshake) -> None:
        del self._pending[pending.socket]
        self._selector.unregister(pending.socket)
