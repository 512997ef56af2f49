"""Admission to the places of one gateway: how many voice sessions are open, and in which order those in line enter.

Client secrets may take a share of the places only; the rest is kept for the API key and the console. Knows no session, no Redis.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from fleet.config.schema import VoiceConfig
from fleet.core.errors import Overloaded


@dataclass(slots=True, eq=False)
class QueuedClient:
    """A client in line. `by_secret`: it has a client secret, and not the API key."""

    by_secret: bool
    on_position: Callable[[int], None]
    position: int = 0
    turn: asyncio.Event = field(default_factory=asyncio.Event)


class Admission:
    """Invariant: no waiter is in line for whom there is a place."""

    def __init__(self, voice: VoiceConfig) -> None:
        self._voice = voice
        self._max_by_secret = max(1, _share_of(voice.max_sessions, voice.secret_share))
        self._max_waiting_by_secret = _share_of(voice.max_waiting, voice.secret_share)
        self._num_by_key = self._num_by_secret = 0
        self._line: list[QueuedClient] = []

    def join(self, *, by_secret: bool, on_position: Callable[[int], None]) -> QueuedClient:
        """Take a place (then `turn` is set already), or join the line. Raises: Overloaded if there is no room in line either."""
        waiter = QueuedClient(by_secret, on_position)
        if self._has_place(by_secret=by_secret):
            self.take(by_secret=by_secret)
            waiter.turn.set()
            return waiter
        waiting_by_secret = sum(other.by_secret for other in self._line)
        if len(self._line) >= self._voice.max_waiting or (by_secret and waiting_by_secret >= self._max_waiting_by_secret):
            raise self._full(by_secret)
        self._line.append(waiter)
        self._report_positions()
        return waiter

    async def wait(self, waiter: QueuedClient) -> None:
        """Wait until the client has a place. One that is cancelled leaves the line, or gives its place back."""
        try:
            await waiter.turn.wait()
        except asyncio.CancelledError:
            if waiter in self._line:
                self._line.remove(waiter)
                self._report_positions()
            else:
                self.release(by_secret=waiter.by_secret)
            raise

    def take(self, *, by_secret: bool) -> None:
        """Take a place, even beyond the bound: a session that comes from another gateway is not refused."""
        if by_secret:
            self._num_by_secret += 1
        else:
            self._num_by_key += 1

    def release(self, *, by_secret: bool) -> None:
        if by_secret:
            self._num_by_secret -= 1
        else:
            self._num_by_key -= 1
        self._call_next()

    def _has_place(self, *, by_secret: bool) -> bool:
        has_room = self._num_by_key + self._num_by_secret < self._voice.max_sessions
        if by_secret:
            return has_room and self._num_by_secret < self._max_by_secret
        # Sessions of secrets may have come from other gateways in any number; the places of the API key are kept even then.
        return has_room or self._num_by_key < self._voice.max_sessions - self._max_by_secret

    def _call_next(self) -> None:
        """Give free places to the first in line that may have them; a secret that may not enter blocks none of the others."""
        for waiter in tuple(self._line):
            if self._has_place(by_secret=waiter.by_secret):
                self._line.remove(waiter)
                self.take(by_secret=waiter.by_secret)
                waiter.turn.set()
        self._report_positions()

    def _report_positions(self) -> None:
        """Secrets whose share is taken are not counted before those with the API key, who enter earlier."""
        blocked = self._num_by_secret >= self._max_by_secret
        for number, waiter in enumerate(self._line, 1):
            passed = sum(other.by_secret for other in self._line[: number - 1]) if blocked and not waiter.by_secret else 0
            if waiter.position != number - passed:
                waiter.position = number - passed
                waiter.on_position(waiter.position)

    def _full(self, by_secret: bool) -> Overloaded:
        if by_secret:
            most = self._max_by_secret + self._max_waiting_by_secret
            whose, setting = f"{most} voice sessions of client secrets", " (voice.secret_share)"
        else:
            whose, setting = f"{self._voice.max_sessions + self._voice.max_waiting} voice sessions", ""
        return Overloaded(f"{whose} are open or waiting on this gateway{setting}; try again shortly")


def _share_of(places: int, share: float) -> int:
    """Round down; but 0.7 of 10 is 7, whatever binary fractions make of it."""
    return int(places * share + 1e-9)
