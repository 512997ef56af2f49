"""A gateway with a busy fleet, and the paths of its pages: for tests and screenshots."""

import msgspec

from fleet.control.voice import HeldVoice
from fleet.core.chunk import Chunk
from fleet.core.clock import now_us
from fleet.core.request_trace import EdgeTrace, RequestTrace
from fleet.graphs import Graph
from tests.web.conftest import ServedGateway
from tests.web.plausible import busy
from web.realtime.session_views import SessionView

LIVE_PAGES = ("overview", "requests", "workers", "queues", "transfers", "sessions", "jobs", "logs")
NUM_TICKS, NUM_PREFILL = 40, 6


def fill(gateway: ServedGateway) -> None:
    """Fill the gateway's fake client with a busy fleet and two voice sessions."""
    telemetry = busy(gateway.config.graph_declaration())
    for trace in telemetry.traces.values():
        for edge in trace.edges:
            if not edge.medium and edge.first_us:
                telemetry.edge_logs[trace.id, edge.name] = build_chunks(trace, edge, gateway.config.graph_declaration())
    gateway.client.show(telemetry)
    for number, state in enumerate(("speaking", "listening")):
        view = session(number, state, telemetry.rows[-1 - number].id)
        gateway.client.held[view.id] = HeldVoice(epoch=1, fields={"view": msgspec.json.encode(view)})


def build_chunks(trace: RequestTrace, edge_trace: EdgeTrace, graph: Graph) -> list[Chunk]:
    """Build an edge's chunks from each walk of its producer, with a boundary where the consumer enters another walk."""
    edge, walks = graph.edge(edge_trace.name), graph.stage(edge_trace.source).walks
    step_us = max((edge_trace.last_us - edge_trace.first_us) // NUM_TICKS, 1)
    chunks: list[Chunk] = []
    last_walk = None
    for number in range(NUM_TICKS):
        position = min(number // NUM_PREFILL, len(walks) - 1)
        ordinal = number - NUM_PREFILL * position
        walk = edge.consumer_walk(walks[position], ordinal)
        chunk = Chunk(
            request=trace.id,
            edge=edge_trace.name,
            index=number,
            epoch=trace.tasks[0].epoch,
            producer_walk=walks[position],
            ordinal=ordinal,
            boundary=walk != last_walk,
            walk=walk if walk != last_walk else None,
            produced_us=edge_trace.first_us + number * step_us,
        )
        chunks.append(chunk)
        last_walk = walk
    return chunks


def session(number: int, state: str, request: str) -> SessionView:
    return SessionView(
        id=f"sess_{number:032x}",
        gateway="gateway@machine:4120:000014",
        state=state,
        turns=4 + number,
        voice_to_voice_last_ms=612.0 + number,
        voice_to_voice_median_ms=655.0,
        interruptions=1,
        underruns=number,
        input_rate_hz=48_000,
        voice="chelsie",
        request_id=request if state == "speaking" else None,
        client_secret="1a2b3c4d" if state == "speaking" else None,
        created_us=now_us() - 90_000_000,
        seen_us=now_us() - 300_000,
    )


def paths(gateway: ServedGateway) -> dict[str, str]:
    """Return the path of each page by its name."""
    telemetry = gateway.client.telemetry
    failed = next(trace for trace in telemetry.traces.values() if trace.state == "failed")
    worker = telemetry.worker_list[0]
    return {
        **{name: f"/{name}" for name in LIVE_PAGES},
        "request": f"/requests/{failed.id}",
        "worker": f"/workers/{worker.id}",
    }
