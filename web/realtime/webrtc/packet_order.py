"""Order of the packets of a call, some of which are late, doubled or lost.

Speech is recognised, not played, so nothing is delayed to even out the intervals: a packet that
arrives in order is passed on at once. Pure.
"""

MAX_WAITING = 3
"""Number of later packets (of 20 ms) that wait for a missing one before it counts as lost."""
MAX_LOST = 5
"""Number of lost packets in a row for which a replacement is made."""
RESTART = 100
"""Distance from the expected packet number beyond which the sender must have begun to count anew.
"""
_MODULO = 1 << 16


class PacketOrder:
    """Puts packets in the order of their numbers, which count modulo 2**16."""

    def __init__(self) -> None:
        self._next: int | None = None
        self._waiting: dict[int, bytes] = {}
        """Packets by their distance from `_next`; none has the distance 0."""

    def add(self, number: int, payload: bytes) -> list[bytes | None]:
        """Add a packet. Returns the payloads that can be passed on now, in order, with None for
        each lost packet; empty if the packet is late, or must wait for a missing packet.
        """
        if self._next is None:
            self._next = number
        distance = (number - self._next) % _MODULO
        is_late = distance >= _MODULO // 2
        if min(distance, _MODULO - distance) > RESTART:
            self._next, distance, is_late = number, 0, False
            self._waiting.clear()
        if is_late:
            return []
        self._waiting[distance] = payload
        ready = self._take()
        if not ready and len(self._waiting) > MAX_WAITING:
            num_lost = min(self._waiting)
            self._skip(num_lost)
            return [*[None] * min(num_lost, MAX_LOST), *self._take()]
        return ready

    def _take(self) -> list[bytes | None]:
        ready: list[bytes | None] = []
        while (payload := self._waiting.pop(len(ready), None)) is not None:
            ready.append(payload)
        self._skip(len(ready))
        return ready

    def _skip(self, count: int) -> None:
        assert self._next is not None
        self._next = (self._next + count) % _MODULO
        self._waiting = {at - count: payload for at, payload in self._waiting.items()}
