"""Counts of the chunks that one owner of a task received, reported once, when its ownership ends. Pure; knows no Redis."""

from dataclasses import dataclass, field

import msgspec

from fleet.core.ids import EdgeName, WorkerId
from fleet.core.request_trace import Receipt


@dataclass(slots=True)
class _Arrivals:
    """See `fleet.core.request_trace.Receipt`."""

    num_chunks: int = 0
    first_us: int = 0
    last_us: int = 0
    hop_us: int = 0
    hop_max_us: int = 0
    num_pulls: int = 0
    pull_bytes: int = 0
    pull_us: int = 0
    pull_max_us: int = 0
    num_failed_pulls: int = 0


@dataclass(slots=True)
class Receipts:
    """Arrivals at one task, by input edge. Chunks read from the log when the task was opened have no arrival and do not count."""

    _arrivals: dict[EdgeName, _Arrivals] = field(default_factory=dict[EdgeName, _Arrivals])

    def arrived(self, edge: EdgeName, at_us: int, produced_us: int) -> None:
        arrivals, age_us = self._arrivals.setdefault(edge, _Arrivals()), max(0, at_us - produced_us)
        arrivals.num_chunks += 1
        arrivals.first_us = arrivals.first_us or at_us
        arrivals.last_us = at_us
        arrivals.hop_us += age_us
        arrivals.hop_max_us = max(arrivals.hop_max_us, age_us)

    def pulled(self, edge: EdgeName, num_bytes: int, took_us: int) -> None:
        arrivals = self._arrivals.setdefault(edge, _Arrivals())
        arrivals.num_pulls += 1
        arrivals.pull_bytes += num_bytes
        arrivals.pull_us += took_us
        arrivals.pull_max_us = max(arrivals.pull_max_us, took_us)

    def failed(self, edge: EdgeName) -> None:
        self._arrivals.setdefault(edge, _Arrivals()).num_failed_pulls += 1

    def line(self, worker: WorkerId) -> bytes | None:
        """Encode the receipts for the trace; None if there are none."""
        receipts = tuple(self._receipt(edge, arrivals, worker) for edge, arrivals in self._arrivals.items())
        return _encoder.encode(receipts) if receipts else None

    def _receipt(self, edge: EdgeName, arrivals: _Arrivals, worker: WorkerId) -> Receipt:
        return Receipt(
            edge=edge, worker=worker, num_chunks=arrivals.num_chunks, first_us=arrivals.first_us, last_us=arrivals.last_us,
            hop_mean_us=arrivals.hop_us // max(1, arrivals.num_chunks), hop_max_us=arrivals.hop_max_us,
            num_pulls=arrivals.num_pulls, pull_bytes=arrivals.pull_bytes, pull_us=arrivals.pull_us,
            pull_max_us=arrivals.pull_max_us, num_failed_pulls=arrivals.num_failed_pulls,
        )  # fmt: skip


RECEIVED = "received"
"""Metadata name of receipts in a task's hash; the epoch is appended, since a task may have several owners."""
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(tuple[Receipt, ...])


def decode_receipts(raw: bytes) -> tuple[Receipt, ...]:
    """Decode receipts; empty if another version wrote them in another form."""
    try:
        return _decoder.decode(raw)
    except msgspec.DecodeError:
        return ()
