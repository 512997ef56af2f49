"""The conductor's part in `transition_source: conductor`: it decides at each boundary chunk to
which walk the chunk's consumer changes.

Boundaries wait in a stream of their own until they are decided, so a new leader continues where the
last one stopped.
"""

from typing import cast

from redis import Redis

from fleet.config import FleetConfig
from fleet.control import keys, scripts
from fleet.control.connect import Reply, exchange, first_text, stream_entries
from fleet.core.events import ChunkAppended, decode_event

BATCH = 256
"""Number of boundaries decided in one round trip."""


class WalkDriver:
    """Decides the walks of the stages that the configuration leaves to the conductor."""

    def __init__(self, config: FleetConfig, client: Redis) -> None:
        self._client = client
        self._graph = config.graph_declaration()

    def turn(self, leader: str, block_ms: int) -> bool:
        """Decide up to `BATCH` waiting boundaries and write the decisions; if none waits, wait up
        to `block_ms` for one. Return False if another conductor leads.
        """
        # Redis ends even the shortest wait only at its next tick, up to 100 ms later.
        block = ("BLOCK", block_ms) if block_ms > 0 else ()
        read = ("XREAD", "COUNT", BATCH, *block, "STREAMS", keys.BOUNDARIES, "0-0")
        (reply,) = exchange(self._client, (), read)
        calls = [
            self._decision(leader, entry, fields["e"])
            for _, entries in cast("list[tuple[bytes, Reply]]", reply or [])
            for entry, fields in stream_entries(entries)
        ]
        return all(first_text(reply) != "not_leader" for reply in exchange(self._client, calls))

    def _decision(self, leader: str, entry: str, event: bytes) -> scripts.Call:
        appended = decode_event(event)
        assert isinstance(appended, ChunkAppended), "a boundary is a chunk"
        edge = self._graph.edge(appended.edge)
        before = appended.producer_walk
        walk = None if before is None else edge.consumer_walk(before, appended.ordinal)
        return scripts.set_walk(
            leader, entry, appended.request, edge.target, edge.name, appended.index, walk
        )
