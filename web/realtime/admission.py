"""Admission to one gateway: number of open voice sessions, or of calls, and order in which queued
clients enter.

Clients with a client secret may use only a share of the places; the rest is reserved for the API
key and the console. Knows no session.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from fleet.core.errors import Overloaded


@dataclass(slots=True, eq=False)
class QueuedClient:
    """A client in the queue for a session. `by_secret` is True for a client with a client secret,
    False for a client with the API key; `on_position` is called with each new position in the
    queue, where 1 is the next to enter. `admitted` is set once the client has a session.
    """

    by_secret: bool
    on_position: Callable[[int], None]
    position: int = 0
    admitted: asyncio.Event = field(default_factory=asyncio.Event)


class Admission:
    """Counter of the gateway's open sessions, and the queue of clients that wait for a session.

    `most`: limit of open sessions. `max_waiting`: limit of queued clients. `secret_share`: fraction
    of each limit that clients with a client secret may use. `what`: plural noun for the sessions in
    error messages.

    Invariants: no client is queued that could be admitted.
    """

    def __init__(
        self, most: int, max_waiting: int, secret_share: float, *, what: str = "voice sessions"
    ) -> None:
        self._most, self._max_waiting = most, max_waiting
        self._what = what
        self._max_by_secret = max(1, _share_of(most, secret_share))
        self._max_queued_by_secret = _share_of(max_waiting, secret_share)
        self._num_open = {False: 0, True: 0}
        """Number of open sessions opened with the API key (False) and with a client secret (True).
        """
        self._queue: list[QueuedClient] = []

    def join(self, *, by_secret: bool, on_position: Callable[[int], None]) -> QueuedClient:
        """Admit a client, whose `admitted` is then set, or append the client to the queue. An
        admitted client counts as an open session until `release` is called.

        Raises: Overloaded if the queue is full.
        """
        client = QueuedClient(by_secret, on_position)
        if self._has_place(by_secret=by_secret):
            self.add(by_secret=by_secret)
            client.admitted.set()
            return client
        queued_by_secret = sum(other.by_secret for other in self._queue)
        if len(self._queue) >= self._max_waiting or (
            by_secret and queued_by_secret >= self._max_queued_by_secret
        ):
            raise self._full(by_secret)
        self._queue.append(client)
        self._report_positions()
        return client

    async def wait(self, client: QueuedClient) -> None:
        """Wait until the client is admitted. Cancelling the wait removes the client from the queue,
        or releases the session if the client was admitted meanwhile.
        """
        try:
            await client.admitted.wait()
        except asyncio.CancelledError:
            if client in self._queue:
                self._queue.remove(client)
                self._report_positions()
            else:
                self.release(by_secret=client.by_secret)
            raise

    def add(self, *, by_secret: bool) -> None:
        """Count a session as open, even beyond the limit: a session that comes from another gateway
        is never refused.
        """
        self._num_open[by_secret] += 1

    def release(self, *, by_secret: bool) -> None:
        self._num_open[by_secret] -= 1
        self._admit_next()

    def _has_place(self, *, by_secret: bool) -> bool:
        has_room = sum(self._num_open.values()) < self._most
        if by_secret:
            return has_room and self._num_open[True] < self._max_by_secret
        # Any number of sessions by secret may come from other gateways; the API key's places stay
        # reserved even then.
        return has_room or self._num_open[False] < self._most - self._max_by_secret

    def _admit_next(self) -> None:
        """Admit queued clients in order while sessions are available. A client secret whose share
        is used up does not block the clients behind it.
        """
        for client in tuple(self._queue):
            if self._has_place(by_secret=client.by_secret):
                self._queue.remove(client)
                self.add(by_secret=client.by_secret)
                client.admitted.set()
        self._report_positions()

    def _report_positions(self) -> None:
        """Report changed positions to queued clients. While the client secrets' share is used up,
        clients with the API key enter before them, and their positions count only other clients
        with the key.
        """
        is_blocked = self._num_open[True] >= self._max_by_secret
        for number, client in enumerate(self._queue, 1):
            passed = (
                sum(other.by_secret for other in self._queue[: number - 1])
                if is_blocked and not client.by_secret
                else 0
            )
            if client.position != number - passed:
                client.position = number - passed
                client.on_position(client.position)

    def _full(self, by_secret: bool) -> Overloaded:
        if by_secret:
            most = self._max_by_secret + self._max_queued_by_secret
            sessions, setting = f"{most} {self._what} of client secrets", " (voice.secret_share)"
        else:
            sessions, setting = f"{self._most + self._max_waiting} {self._what}", ""
        return Overloaded(
            f"{sessions} are open or waiting on this gateway{setting}; try again shortly"
        )


def _share_of(places: int, share: float) -> int:
    """Return `share` of `places`, rounded down; 0.7 of 10 is 7 in spite of binary fractions."""
    return int(places * share + 1e-9)
