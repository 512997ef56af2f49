"""What one owner of a task knows of how its inputs came: told once, when it gives the task up. Pure; knows no Redis."""

from dataclasses import dataclass, field

import msgspec

from fleet.core.ids import EdgeName, WorkerId
from fleet.core.request_trace import Receipt


@dataclass(slots=True)
class _Came:
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
    """Of one task, by input edge. What was in the log when the task was opened was not on its way, and is not counted."""

    _came: dict[EdgeName, _Came] = field(default_factory=dict[EdgeName, _Came])

    def arrived(self, edge: EdgeName, at_us: int, made_us: int) -> None:
        came, age_us = self._came.setdefault(edge, _Came()), max(0, at_us - made_us)
        came.num_chunks += 1
        came.first_us = came.first_us or at_us
        came.last_us = at_us
        came.hop_us += age_us
        came.hop_max_us = max(came.hop_max_us, age_us)

    def pulled(self, edge: EdgeName, num_bytes: int, took_us: int) -> None:
        came = self._came.setdefault(edge, _Came())
        came.num_pulls += 1
        came.pull_bytes += num_bytes
        came.pull_us += took_us
        came.pull_max_us = max(came.pull_max_us, took_us)

    def failed(self, edge: EdgeName) -> None:
        self._came.setdefault(edge, _Came()).num_failed_pulls += 1

    def line(self, worker: WorkerId) -> bytes | None:
        """As the story keeps it; None where nothing came."""
        told = tuple(self._receipt(edge, came, worker) for edge, came in self._came.items())
        return _encoder.encode(told) if told else None

    def _receipt(self, edge: EdgeName, came: _Came, worker: WorkerId) -> Receipt:
        return Receipt(
            edge=edge, worker=worker, num_chunks=came.num_chunks, first_us=came.first_us, last_us=came.last_us,
            hop_mean_us=came.hop_us // max(1, came.num_chunks), hop_max_us=came.hop_max_us, num_pulls=came.num_pulls,
            pull_bytes=came.pull_bytes, pull_us=came.pull_us, pull_max_us=came.pull_max_us,
            num_failed_pulls=came.num_failed_pulls,
        )  # fmt: skip


TOLD = "received"
"""The name under which a task's story keeps it; its epoch follows, since several owners may tell."""
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(tuple[Receipt, ...])


def decode_receipts(raw: bytes) -> tuple[Receipt, ...]:
    """Empty where another version wrote it otherwise."""
    try:
        return _decoder.decode(raw)
    except msgspec.DecodeError:
        return ()
