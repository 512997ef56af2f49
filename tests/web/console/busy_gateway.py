"""Every page of the console over a busy fleet: what tests walk through, and what the screenshots show."""

from dataclasses import replace

import msgspec

from fleet.control.voice import HeldVoice
from fleet.core.chunk import Chunk
from fleet.core.clock import now_us
from fleet.core.request_trace import EdgeTrace, RequestTrace
from fleet.graphs import Graph
from tests.web.conftest import Gateway, Loaded
from tests.web.plausible import busy
from web.realtime.session_views import SessionView

LIVE_PAGES = ("overview", "requests", "workers", "queues", "transfers", "sessions", "jobs", "logs")
NUM_TICKS, NUM_PREFILL = 40, 6


def fill(gateway: Gateway) -> None:
    """Give the gateway's fake a busy fleet, with two people talking."""
    telemetry = busy(gateway.config.graph_declaration())
    for story in telemetry.traces.values():
        for told in story.edges:
            if not told.medium and told.first_us:
                telemetry.edge_logs[story.id, told.name] = chunks(story, told, gateway.config.graph_declaration())
    gateway.client.show(telemetry)
    for number, state in enumerate(("speaking", "listening")):
        view = session(number, state, telemetry.rows[-1 - number].id)
        gateway.client.held[view.id] = HeldVoice(epoch=1, fields={"view": msgspec.json.encode(view)})


def chunks(story: RequestTrace, told: EdgeTrace, graph: Graph) -> list[Chunk]:
    """As a producer marks them: some made in each of its walks, a boundary where its consumer comes into another."""
    edge, walks = graph.edge(told.name), graph.stage(told.source).walks
    step_us = max((told.last_us - told.first_us) // NUM_TICKS, 1)
    made: list[Chunk] = []
    known = None
    for number in range(NUM_TICKS):
        place = min(number // NUM_PREFILL, len(walks) - 1)
        ordinal = number - NUM_PREFILL * place
        walk = edge.consumer_walk(walks[place], ordinal)
        made.append(
            Chunk(request=story.id, edge=told.name, index=number, epoch=story.tasks[0].epoch, producer_walk=walks[place],
                  ordinal=ordinal, boundary=walk != known, walk=walk if walk != known else None,
                  made_us=told.first_us + number * step_us)
        )  # fmt: skip
        known = walk
    return made


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


def paths(gateway: Gateway) -> dict[str, str]:
    """Each page's address, by its name."""
    telemetry = gateway.client.telemetry
    failed = next(story for story in telemetry.traces.values() if story.state == "failed")
    worker = telemetry.worker_list[0]
    return {
        **{name: f"/{name}" for name in LIVE_PAGES},
        "request": f"/requests/{failed.id}",
        "worker": f"/workers/{worker.id}",
    }


def read_only(loaded: Loaded) -> Loaded:
    web = loaded.config.web.model_copy(update={"read_only": True})
    return replace(loaded, config=loaded.config.model_copy(update={"web": web}))
