"""Statistics that a process publishes in its Redis record with its lease, one field each."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from fleet.drafts.figures.head_holders import HeldHead
from fleet.drafts.figures.speculation import SpeculationFigures
from fleet.drafts.figures.training import TrainingFigures
from fleet.spans.protocol.figures import SpanFigures
from fleet.telemetry.counts import LatencyCounts, PullCounts, SentCounts

Fields = Mapping[str, bytes]


class Vitals(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of one worker. A field that is None is not published.

    `running`: number of tasks. `pages_kept`: pages of the KV pool, among `pages_used`, that are
    cached for later turns. `rows_reused`: positions whose KV was taken from that cache.
    `slots_used`, `used_bytes`: use of the transfer arena. `hops`: histogram of chunk latencies
    since the worker joined. `pulls`: statistics of reads from other workers' memory, by edge.
    `sent`: chunks sent since the worker joined, by edge.
    `stalled_agents`: number of NIXL agents that make no progress, each at the cost of a core.
    `held_head`: the draft head that the worker holds in memory for other workers to read; ""
    removes the published field. `cpu_percent`: percentage of one core. `gpu`: name of the GPU.
    """

    running: int | None = None
    pages_used: int | None = None
    pages_total: int | None = None
    pages_kept: int | None = None
    rows_reused: int | None = None
    slots_used: int | None = None
    hops: LatencyCounts | None = None
    pulls: dict[str, PullCounts] | None = None
    sent: dict[str, SentCounts] | None = None
    used_bytes: int | None = None
    stalled_agents: int | None = None
    memory_bytes: int | None = None
    speculation: SpeculationFigures | None = None
    held_head: HeldHead | Literal[""] | None = None
    training: TrainingFigures | None = None
    span_figures: SpanFigures | None = None
    cpu_percent: int | None = None
    gpu: str | None = None
    gpu_total_bytes: int | None = None
    gpu_used_bytes: int | None = None
    gpu_own_bytes: int | None = None
    gpu_percent: int | None = None

    def encode(self) -> dict[str, int | str]:
        """Return the Redis fields and their values."""
        values = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return {name: _encode(value) for name, value in values if value is not None}

    @classmethod
    def decode(cls, fields: Fields) -> "Vitals":
        """Read the statistics in a Redis record. A damaged value counts as not published."""
        found: dict[str, Any] = {}
        for name, decode in _DECODERS.items():
            if raw := fields.get(name):
                try:
                    found[name] = decode(raw)
                except (msgspec.DecodeError, ValueError):
                    continue
        return cls(**found)


def _encode(value: object) -> int | str:
    if isinstance(value, int | str):
        return value
    if isinstance(value, LatencyCounts):
        return value.encoded()
    return msgspec.json.encode(value, enc_hook=_encode_durations).decode()


def _encode_durations(counts: LatencyCounts) -> str:
    return counts.encoded() if counts.total else ""


def _decode_durations(_: type, text: str) -> LatencyCounts:
    return LatencyCounts.decode(text)


def _decoder_of(kind: Any) -> Callable[[bytes], Any]:
    if kind == LatencyCounts | None:
        return lambda raw: LatencyCounts.decode(raw.decode())
    if kind == str | None:
        return bytes.decode
    return msgspec.json.Decoder(kind, dec_hook=_decode_durations).decode


_DECODERS = {field.name: _decoder_of(field.type) for field in msgspec.structs.fields(Vitals)}
