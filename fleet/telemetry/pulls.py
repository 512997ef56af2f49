"""Counts of the pulls (reads of another worker's memory) of each edge: number, bytes, durations.
They add up over workers.

Pure. Knows no transport.
"""

import msgspec

from fleet.telemetry.hops import HopCounts, decode_hops

KV = "kv"
"""Name under which pages of a split stage are counted; they belong to no edge."""


class PullCounts(msgspec.Struct, kw_only=True):
    """Pulls of one edge since the worker joined. `durations`: encoded `HopCounts`; "" before the
    first.
    """

    num_pulls: int = 0
    num_bytes: int = 0
    num_failed: int = 0
    in_flight: int = 0
    durations: str = ""

    def __add__(self, other: "PullCounts") -> "PullCounts":
        return PullCounts(
            num_pulls=self.num_pulls + other.num_pulls,
            num_bytes=self.num_bytes + other.num_bytes,
            num_failed=self.num_failed + other.num_failed,
            in_flight=self.in_flight + other.in_flight,
            durations=(decode_hops(self.durations) + decode_hops(other.durations)).encoded(),
        )


_decoder = msgspec.json.Decoder(dict[str, PullCounts])


def encode_pulls(counts: dict[str, PullCounts]) -> str:
    return msgspec.json.encode(counts).decode()


def decode_pulls(text: str) -> dict[str, PullCounts]:
    """Decode counts; empty if none were written yet, or another version wrote them in another
    form.
    """
    try:
        return _decoder.decode(text) if text else {}
    except msgspec.DecodeError:
        return {}


class PullTally:
    """Counts of one worker, by edge."""

    def __init__(self) -> None:
        self._durations: dict[str, HopCounts] = {}
        self._counts: dict[str, PullCounts] = {}

    def ended(self, edge: str, num_bytes: int, took_us: int) -> None:
        counts = self._of(edge)
        counts.num_pulls += 1
        counts.num_bytes += num_bytes
        self._durations.setdefault(edge, HopCounts()).add(took_us)

    def failed(self, edge: str) -> None:
        self._of(edge).num_failed += 1

    def encoded(self, in_flight: dict[str, int]) -> str:
        for edge, counts in self._counts.items():
            counts.durations = self._durations[edge].encoded() if edge in self._durations else ""
            counts.in_flight = 0
        for edge, number in in_flight.items():
            self._of(edge).in_flight = number
        return encode_pulls(self._counts)

    def _of(self, edge: str) -> PullCounts:
        return self._counts.setdefault(edge, PullCounts())
