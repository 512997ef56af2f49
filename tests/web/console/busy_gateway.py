"""A gateway over a busy fake fleet, and the paths of its console pages, for tests and
screenshots.
"""

from collections.abc import Sequence

from fleet.control.voice import HeldVoice
from fleet.core.chunk import Chunk
from fleet.core.clock import now_us
from fleet.core.ids import WorkerId
from fleet.drafts.figures.training import DraftVersion, TrainingFigures, TrainingState
from fleet.graphs import Graph
from fleet.telemetry.incidents import id_of
from fleet.telemetry.journal import JournalEntry
from fleet.telemetry.trace import EdgeTrace, RequestTrace
from tests.web.conftest import ServedGateway
from tests.web.divided import divided_workers
from tests.web.plausible import busy
from tests.web.plausible_sessions import build_turns, fields_of
from web.realtime.session_views import SessionView, shown_id

LIVE_PAGES = (
    "now",
    "incidents",
    "orders",
    "requests",
    "fleet",
    "workers",
    "queues",
    "transfers",
    "training",
    "sessions",
    "jobs",
    "logs",
)
NUM_TICKS, NUM_PREFILL = 40, 6


def fill(gateway: ServedGateway) -> None:
    """Fill the gateway's fake client with a busy fleet and two voice sessions."""
    telemetry = busy(gateway.config.graph_declaration())
    for trace in telemetry.traces.values():
        for edge in trace.edges:
            if not edge.medium and edge.first_us:
                telemetry.edge_logs[trace.id, edge.name] = build_chunks(
                    trace, edge, gateway.config.graph_declaration()
                )
    telemetry.worker_list[-2:-2] = divided_workers(
        gateway.config.graph_declaration().stages[0].name
    )
    gateway.client.show(telemetry)
    gateway.client.training.known, gateway.client.training.shown = training()
    for number, state in enumerate(("speaking", "listening")):
        view = session(number, state, telemetry.rows[-1 - number].id)
        turns = build_turns(gateway.client.graph, telemetry.rows[-1].id) if not number else []
        gateway.client.voice.held[view.id] = HeldVoice(epoch=1, fields=fields_of(view, turns))


def training() -> tuple[list[DraftVersion], TrainingState]:
    """Return facts of draft-head training to show: two head versions, and the state of the trainer
    that made them.
    """
    versions = [
        DraftVersion(
            number=number,
            sha256=64 * str(number),
            target="ab" * 32,
            num_bytes=24_000_000,
            windows=60 * number,
            samples=480 * number,
            acceptance=1.1 + 0.4 * number,
            source=f"weekly {number}",
            created_us=now_us() - 10**9 // number,
        )
        for number in (2, 1)
    ]
    losses = tuple(9 / (1 + 0.1 * window) + 0.3 * (window % 3) for window in range(60))
    figures = TrainingFigures(
        windows=131,
        loss=losses[-1],
        accepted=1010,
        refused=3,
        waiting=5,
        held_out=64,
        replay_samples=940,
        replay_bytes=310_000_000,
        checkpoint=128,
        acceptance=1.9,
        losses=losses,
        shares=(0.81, 0.66, 0.52, 0.4, 0.31),
    )
    return versions, TrainingState(
        enabled=True,
        trainer=WorkerId("trainer@a:31:77aa01"),
        figures=figures,
        checkpoint="00000128-9f31aa02",
        saved_us=now_us() - 40_000_000,
        acknowledged=1005,
        shed=212,
        failed=3,
        version=2,
        last_version=1,
    )


def build_chunks(trace: RequestTrace, edge_trace: EdgeTrace, graph: Graph) -> list[Chunk]:
    """Build the chunks of an edge: some for each walk of its producer, with a boundary flag where
    the consumer enters another walk.
    """
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


def incident_of(entries: Sequence[JournalEntry]) -> str:
    """Return the id of the incident that the entries end with."""
    began = next(entry for entry in entries if entry.what == "died")
    return id_of(began.at_us)


def paths(gateway: ServedGateway) -> dict[str, str]:
    """Return the paths of the console's pages by page name."""
    telemetry = gateway.client.telemetry
    failed = next(trace for trace in telemetry.traces.values() if trace.state == "failed")
    worker = telemetry.worker_list[0]
    session_id = next(iter(gateway.client.voice.held))
    shown = shown_id(session_id) if gateway.config.web.read_only else session_id
    return {
        **{name: f"/{name}" for name in LIVE_PAGES},
        "request": f"/requests/{failed.id}",
        "worker": f"/workers/{worker.id}",
        "incident": f"/incidents/{incident_of(telemetry.entries)}",
        "session": f"/sessions/{shown}",
        "kept": "/kept",
    }
