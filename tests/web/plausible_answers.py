"""Spoken answers with known times: one that is fine, one that is slow, one that is interrupted by a
death, one that failed. For the tests of the page of an answer, and for its screenshots.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from fleet.core.chunk import Chunk, WireTensor
from fleet.core.clock import now_us
from fleet.core.ids import EdgeName, RequestId, StageName, Walk
from fleet.graphs import get_graph
from fleet.telemetry.trace import (
    AudioIn,
    BatchSizes,
    EdgeTrace,
    PlaybackReport,
    RequestTrace,
    SpokenTurn,
    TaskTrace,
    TraceEvent,
)
from fleet.telemetry.views import LogLine
from tests.web.build import build, build_rows, tensor_chunk
from tests.web.fake_telemetry import FakeTelemetry, row_of

GRAPH = get_graph("qwen3_omni")
THINKER, TALKER, CODE2WAV = (stage.name for stage in GRAPH.stages)
RATE = 24_000
START = now_us() - 120_000_000
"""Submission of every answer: two minutes before the tests."""
FRAMES, SAMPLES = 155, 155 * 1920
"""12.4 s of sound, in frames of 80 ms."""
WORDS = "The opposite of hot is cold, and between them lies everything that is merely warm."
OTHER = "talker@a:2:0b"
"""Worker that dies."""
NAMES = ("fine", "slow", "interrupted", "failed")


def at(ms: float) -> int:
    return START + round(ms * 1000)


def task(
    stage: StageName, claimed: float, first: float, finished: float, mean: float = 5.0
) -> TaskTrace:
    owner = f"{stage}@a:1:0a"
    return build(
        TaskTrace,
        stage=stage,
        state="finished",
        owner=owner,
        granted_us=at(1),
        claimed_us=at(claimed),
        first_us=at(first),
        finished_us=at(finished),
        batches=(BatchSizes(worker=owner, num_steps=155, mean=mean, most=6),),
    )


def edge(name: str, first: float, last: float, **fields: object) -> EdgeTrace:
    declared = GRAPH.edge(EdgeName(name))
    counts = {"produced": 20, "consumed": 20, "items": 20, "rows": 20, **fields}
    return build(
        EdgeTrace,
        name=name,
        source=declared.source,
        target=declared.target,
        first_us=at(first),
        last_us=at(last),
        medium=GRAPH.media.get(declared.name, ""),
        **counts,
    )


def spoken(codes_end: float = 5000, sound_end: float = 5020, **fields: object) -> RequestTrace:
    """Build the trace of a spoken answer of 12.4 s whose first sound came after 310 ms."""
    given: dict[str, object] = {
        "id": "req-1",
        "graph": GRAPH.name,
        "model": "omni",
        "state": "finished",
        "kind": "voice",
        "created_us": START,
        "ended_us": at(sound_end + 10),
        "now_us": at(60_000),
        "outputs": tuple(GRAPH.media),
        "tasks": (
            task(THINKER, 2, 90, 900),
            task(TALKER, 3, 200, codes_end),
            task(CODE2WAV, 3, 310, sound_end),
        ),
        "edges": (
            edge("text", 90, 900),
            edge("thought", 90, 900),
            edge("codes", 200, codes_end, items=FRAMES),
            edge("audio", 310, sound_end, rows=SAMPLES),
        ),
        "playback": PlaybackReport(played_samples=SAMPLES, underruns=0, at_us=at(13_000)),
    }
    return build(RequestTrace, **{**given, **fields})


def reports(begin_ms: float, *underruns: int, last: int = SAMPLES) -> dict[str, Any]:
    """Return playback reports at intervals of 1.1 s, with these numbers of dropouts so far."""
    made = [
        PlaybackReport(
            played_samples=round(last * (n + 1) / len(underruns)),
            underruns=count,
            at_us=at(begin_ms + 1100 * (n + 1)),
        )
        for n, count in enumerate(underruns)
    ]
    return {"playback": made[-1], "earlier_playback": tuple(made[:-1])}


def events_of(*rows: tuple[float, str, str, str, str]) -> tuple[TraceEvent, ...]:
    timed = [(at(ms), *rest) for ms, *rest in rows]
    return tuple(build_rows(TraceEvent, "at_us what stage worker detail", *timed))


def work(codes_end: float, *, until_ms: float = 0) -> list[tuple[float, str, str, str, str]]:
    """Return the events of all stages; those after `until_ms` are left out, 0 for none."""
    rows: list[tuple[float, str, str, str, str]] = [(0, "submitted", "", "", "30 prompt tokens")]
    ends = {THINKER: 900.0, TALKER: codes_end, CODE2WAV: codes_end + 20}
    firsts = {THINKER: 90.0, TALKER: 200.0, CODE2WAV: 310.0}
    for stage, end in ends.items():
        owner = f"{stage}@a:1:0a"
        rows += [
            (1, "granted", stage, "", ""),
            (3, "claimed", stage, owner, ""),
            (firsts[stage], "output", stage, owner, ""),
            (end, "finished", stage, owner, ""),
        ]
    return sorted(row for row in rows if not until_ms or row[0] <= until_ms)


def build_answers() -> Mapping[str, RequestTrace]:
    """Return the answers by name."""
    turn = SpokenTurn(voiced_end_us=at(-350), decided_us=at(-5))
    given: dict[str, Any] = {
        "turn": turn,
        "audio": (AudioIn(duration_s=2.4),),
        "session": "5f0c" * 8,
    }
    death = [
        *(row for row in work(5400) if row[2] != TALKER),
        (1, "granted", TALKER, "", ""),
        (3, "claimed", TALKER, OTHER, ""),
        (200, "output", TALKER, OTHER, ""),
        (1200, "lost", TALKER, OTHER, "died"),
        (1201, "granted", TALKER, "", ""),
        (1600, "claimed", TALKER, f"{TALKER}@a:1:0a", ""),
        (1720, "output", TALKER, f"{TALKER}@a:1:0a", ""),
        (5400, "finished", TALKER, f"{TALKER}@a:1:0a", ""),
    ]
    failure = [*work(5000, until_ms=700), (700, "failed", TALKER, f"{TALKER}@a:1:0a", "no")]
    return {
        "fine": spoken(events=events_of(*work(5000)), **given, **reports(310, *(0,) * 11)),
        "slow": spoken(
            17_140,
            17_200,
            events=events_of(*work(17_140)),
            **given,
            **reports(310, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 3, 3, 3, 3, 3),
        ),
        "interrupted": spoken(
            5400, 5420, events=events_of(*sorted(death)), **given, **reports(310, *(0,) * 11)
        ),
        "failed": spoken(
            700,
            690,
            state="failed",
            code="engine_error",
            error="the engine failed the request: CUDA error: an illegal memory access",
            ended_us=at(702),
            tasks=tuple(
                msgspec.structs.replace(task(stage, 3, first, 0), state=state, batches=())
                for stage, first, state in (
                    (THINKER, 90, "aborted"),
                    (TALKER, 200, "failed"),
                    (CODE2WAV, 310, "aborted"),
                )
            ),
            events=events_of(*sorted(failure)),
            **{**given, **reports(310, 0, last=9_600)},
            edges=(
                edge("text", 90, 650),
                edge("thought", 90, 650),
                edge("codes", 200, 690, items=10),
                edge("audio", 310, 690, rows=19_200),
            ),
        ),
    }


def sound_chunks(trace: RequestTrace, num_chunks: int = 30) -> list[Chunk]:
    """Return the sound of an answer in chunks: syllables of falling level, with the times of the
    words. The chunks are spread evenly over the time in which the sound was made, but in an answer
    that lost a worker none comes meanwhile.
    """
    made = next(edge for edge in trace.edges if edge.medium == "audio")
    seconds = np.arange(made.rows) / RATE
    level = 9000 * np.abs(np.sin(seconds * 7)) * (0.4 + 0.6 * np.abs(np.sin(seconds * 0.9)))
    pcm = (level * np.sin(seconds * 2 * np.pi * 180)).astype("<i2")
    ends = [round(made.rows * (n + 1) / len(WORDS.split())) for n in range(len(WORDS.split()))]
    lost = next((event.at_us for event in trace.events if event.what == "lost"), 0)
    chunks: list[Chunk] = []
    for number, part in enumerate(np.array_split(pcm, num_chunks)):
        produced = made.first_us + (made.last_us - made.first_us) * number // (num_chunks - 1)
        if lost and lost < produced < lost + 520_000:
            produced = lost + 520_000
        begin = sum(chunk.num_rows for chunk in chunks)
        spoken_ends = [(n, end) for n, end in enumerate(ends) if begin < end <= begin + len(part)]
        tensors = {
            "pcm": WireTensor(dtype="int16", shape=part.shape, data=part.tobytes()),
            **_words(spoken_ends),
        }
        chunks.append(
            tensor_chunk(
                trace.id,
                "audio",
                "pcm",
                part,
                index=number,
                tensors=tensors,
                produced_us=produced,
                final=number + 1 == num_chunks,
            )
        )
    return chunks


def _words(ends: Sequence[tuple[int, int]]) -> dict[str, WireTensor]:
    words = WORDS.split()
    positions = np.array([end for _, end in ends], "<i4")
    text = b"".join(
        f"{words[n]}{' ' if n + 1 < len(words) else ''}".encode() + b"\0" for n, _ in ends
    )
    return {
        "word_ends": WireTensor(dtype="int32", shape=positions.shape, data=positions.tobytes()),
        "words": WireTensor(dtype="uint8", shape=(len(text),), data=text),
    }


def code_chunks(trace: RequestTrace) -> list[Chunk]:
    """Return chunks of codes, one per frame, with a pause of 0.9 s in an answer that is slow."""
    made = next(edge for edge in trace.edges if edge.name == "codes")
    step = (made.last_us - made.first_us) // max(made.items, 1)
    pause = 900_000 if trace.playback is not None and trace.playback.underruns else 0
    return [
        tensor_chunk(
            trace.id,
            "codes",
            "codes",
            np.zeros((1, 4), "<i4"),
            index=number,
            final=False,
            producer_walk=Walk("decode"),
            produced_us=made.first_us + number * step + (pause if number > made.items // 3 else 0),
        )
        for number in range(made.items)
    ]


def add_answers(fake: FakeTelemetry, token_ids: Sequence[int]) -> dict[str, RequestTrace]:
    """Add the answers to a fake fleet and return them by name. `token_ids`: text of the answers."""
    added: dict[str, RequestTrace] = {}
    for number, (name, trace) in enumerate(build_answers().items()):
        request = RequestId(f"req-{START // 1000:012x}{number:010x}")
        named = msgspec.structs.replace(trace, id=request)
        added[name] = fake.traces[request] = named
        fake.rows.append(row_of(named))
        ids = np.asarray(token_ids, "<i4")
        text = tensor_chunk(request, "text", "ids", ids, produced_us=named.edges[0].first_us)
        fake.edge_logs[request, "text"] = [text]
        fake.edge_logs[request, "codes"] = code_chunks(named)
        fake.edge_logs[request, "audio"] = sound_chunks(named)
        fake.lines.append(
            LogLine(
                id=f"{named.ended_us // 1000}-{number}",
                at_us=named.ended_us,
                level="info",
                logger="fleet.web",
                message=f"request {request} of a client ended, from 192.0.2.7:4711",
                process="web",
                request=request,
            )
        )
    return added
