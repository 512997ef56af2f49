"""Counts of the chunks that one owner of a task received, reported once, when its ownership ends.
Pure; knows no Redis.
"""

from collections import Counter
from dataclasses import dataclass, field

import msgspec

from fleet.core.ids import EdgeName, WorkerId
from fleet.telemetry.trace import Receipt


@dataclass(slots=True)
class Receipts:
    """Arrivals at one task, by input edge. Chunks read from the log when the task was opened have
    no arrival and do not count.
    """

    _receipts: dict[EdgeName, Receipt] = field(default_factory=dict[EdgeName, Receipt])
    _hops_us: Counter[EdgeName] = field(default_factory=Counter[EdgeName])

    def arrived(self, edge: EdgeName, at_us: int, produced_us: int) -> None:
        receipt, age_us = self._of(edge), max(0, at_us - produced_us)
        receipt.num_chunks += 1
        receipt.first_us = receipt.first_us or at_us
        receipt.last_us = at_us
        receipt.hop_max_us = max(receipt.hop_max_us, age_us)
        self._hops_us[edge] += age_us

    def pulled(self, edge: EdgeName, num_bytes: int, took_us: int) -> None:
        receipt = self._of(edge)
        receipt.num_pulls += 1
        receipt.pull_bytes += num_bytes
        receipt.pull_us += took_us
        receipt.pull_max_us = max(receipt.pull_max_us, took_us)

    def failed(self, edge: EdgeName) -> None:
        self._of(edge).num_failed_pulls += 1

    def line(self, worker: WorkerId) -> bytes | None:
        """Encode the receipts for the trace; None if there are none."""
        for edge, receipt in self._receipts.items():
            receipt.worker, receipt.hop_mean_us = (
                worker,
                self._hops_us[edge] // max(1, receipt.num_chunks),
            )
        return _encoder.encode(tuple(self._receipts.values())) if self._receipts else None

    def _of(self, edge: EdgeName) -> Receipt:
        if edge not in self._receipts:
            zeros = Receipt(
                edge=edge,
                worker="",
                num_chunks=0,
                first_us=0,
                last_us=0,
                hop_mean_us=0,
                hop_max_us=0,
            )
            self._receipts[edge] = zeros
        return self._receipts[edge]


RECEIVED = "received"
"""Metadata name of receipts in a task's hash; the epoch is appended, since a task may have several
owners.
"""
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(tuple[Receipt, ...])


def decode_receipts(raw: bytes) -> tuple[Receipt, ...]:
    """Decode receipts; empty if another version wrote them in another form."""
    try:
        return _decoder.decode(raw)
    except msgspec.DecodeError:
        return ()
