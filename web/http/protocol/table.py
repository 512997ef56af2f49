"""The open connections of a gateway: limits, the choice of an idle connection to close, and
periodic time-out checks.
"""

import asyncio
import math
from collections import OrderedDict
from itertools import islice

from fleet.config.schema import WebConfig
from web.http.protocol.abuse import AbuseLog
from web.http.protocol.connection import Connection

MAX_SWEEP_S, MIN_SWEEP_S = 1.0, 0.02
SWEEPS_PER_TIMEOUT = 5
"""Number of checks of a connection within the shortest time-out, so that a time-out is detected
late by at most a fifth of its length, and by at most a second.
"""
SLICES, MIN_SLICE_S = 20, 0.005
"""Number of event-loop steps in which all connections are checked, and the shortest time between
two steps in seconds.
"""
MAX_SCANNED = 32
"""Number of the longest idle connections from which the one to close is chosen."""


class ConnectionTable:
    """The open connections of a gateway.

    Invariants: `_idle`, and `_idle_of` for each client address, hold the connections without a
    request, the longest idle first.
    """

    def __init__(self, web: WebConfig) -> None:
        self.web = web
        shortest_s = min(web.header_timeout_s, web.body_timeout_s, web.send_timeout_s)
        self._sweep_s = min(MAX_SWEEP_S, max(MIN_SWEEP_S, shortest_s / SWEEPS_PER_TIMEOUT))
        """Seconds between two checks of a connection."""
        self.abuse = AbuseLog()
        self.max_unfinished_bytes = web.body_memory_mib * 1024 * 1024
        """Upper limit of `num_unfinished`."""
        self.num_unfinished = 0
        """Bytes of all unfinished WebSocket messages."""
        self._open: dict[Connection, None] = {}
        self._num_of: dict[str, int] = {}
        self._idle: OrderedDict[Connection, None] = OrderedDict()
        self._idle_of: dict[str, OrderedDict[Connection, None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._unchecked: list[Connection] = []
        """Connections that the current sweep has not checked yet."""
        self._slice = 1
        self._due = math.inf
        """Time at which the next slice of connections is to be checked."""
        self._was_late = False

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: Connection) -> bool:
        """Add a new connection. If the gateway has too many connections, close an idle one; if the
        client's address has too many, close an idle one of that address. The longest idle
        connection is closed, preferably one with nothing left to send.

        Return False if no such connection is idle; the caller must refuse the new connection.
        """
        address, web = connection.address, self.web
        if address is not None and self._num_of.get(address, 0) >= web.max_connections_per_address:
            if not self._close_longest_idle(
                self._idle_of.get(address), "max_connections_per_address"
            ):
                return False
        if len(self._open) >= web.max_connections and not self._close_longest_idle(
            self._idle, "max_connections"
        ):
            return False
        self._open[connection] = None
        if address is not None:
            self._num_of[address] = self._num_of.get(address, 0) + 1
        self._add_idle(connection)
        return True

    def set_busy(self, connection: Connection) -> None:
        if connection in self._open and not connection.busy:
            connection.busy = True
            self._remove_idle(connection)

    def set_idle(self, connection: Connection) -> None:
        if connection in self._open and connection.busy:
            connection.busy = False
            self._add_idle(connection)

    def remove(self, connection: Connection) -> None:
        """Remove a closed connection. Idempotent."""
        if connection not in self._open:
            return
        del self._open[connection]
        if not connection.busy:
            self._remove_idle(connection)
        if connection.address is not None:
            self._num_of[connection.address] -= 1
            if not self._num_of[connection.address]:
                del self._num_of[connection.address]

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the periodic checks: every connection is checked once in `_sweep_s`."""
        self._due = loop.time() + max(self._sweep_s / SLICES, MIN_SLICE_S)
        self._timer = loop.call_at(self._due, self._sweep, loop)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def abort_all(self) -> None:
        """Abort all connections, without waiting for peers that do not read."""
        for connection in list(self._open):
            connection.raw.abort()

    def note(self, connection: Connection, kind: str, message: str) -> None:
        """Log or count an event of a connection, as `AbuseLog.note` does."""
        self.abuse.note(kind, connection.address, message, asyncio.get_running_loop().time())

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Check the time-outs of one slice of the connections: closing a thousand in one step would
        stall the event loop.

        If the call is late because the event loop was stalled, the slice is checked at the next
        call, so that input which arrived during the stall is read first.
        """
        now = loop.time()
        late, before = now - self._due > self._sweep_s, self._was_late
        self._was_late = late
        self.start(loop)
        if late and not before:
            return
        if not self._unchecked:
            self._unchecked = list(self._open)
            self._slice = math.ceil(len(self._unchecked) / SLICES)
            self.abuse.sweep(now)
        part, self._unchecked = self._unchecked[: self._slice], self._unchecked[self._slice :]
        for connection in part:
            if connection in self._open:
                connection.handler.close_if_overdue(now)

    def _close_longest_idle(self, idle: OrderedDict[Connection, None] | None, setting: str) -> bool:
        if not idle:
            return False
        candidates = list(islice(idle, MAX_SCANNED))
        # the last answer of an idle connection may not have left yet, if its client reads slowly
        longest = next(
            (connection for connection in candidates if not connection.num_buffered()),
            candidates[0],
        )
        self.remove(longest)
        message = (
            f"a connection without a request was closed to make room for another (web.{setting})"
        )
        self.note(longest, "connections closed to make room", message)
        longest.raw.abort()
        return True

    def _add_idle(self, connection: Connection) -> None:
        self._idle[connection] = None
        if connection.address is not None:
            self._idle_of.setdefault(connection.address, OrderedDict())[connection] = None

    def _remove_idle(self, connection: Connection) -> None:
        del self._idle[connection]
        if connection.address is not None:
            of_address = self._idle_of[connection.address]
            del of_address[connection]
            if not of_address:
                del self._idle_of[connection.address]
