"""The trace of one request, from its hashes and the trace lines that the scripts wrote. Decodes
neither text nor audio.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import cast

from redis.asyncio import Redis

from fleet.control import keys
from fleet.control.connect import number, pairs, stream_entries, text
from fleet.core.chunk import decode_chunk
from fleet.core.hand_off import decode_hand_off
from fleet.core.ids import CLIENT, EdgeName, Epoch, RequestId, StageName
from fleet.core.request import RequestSpec, decode_request
from fleet.graphs import Graph, get_graph
from fleet.telemetry.counts import BATCHED, RECEIVED, decode_batch_sizes, decode_receipts
from fleet.telemetry.trace import (
    AudioIn,
    EdgeTrace,
    FirstOutputs,
    KVSpan,
    PlaybackReport,
    Receipt,
    RequestTrace,
    SoundGaps,
    SpokenTurn,
    TaskTrace,
    TraceEvent,
)

Fields = Mapping[str, bytes]
TURN, GAPS = "turn", "gaps"
"""Fields of a request's hash that only its trace reads: numbers, separated by commas."""
OWNED_UNTIL = ("lost", "parked", "handed_off", "finished", "failed", "claimed")


async def read_trace(client: Redis, request: RequestId) -> RequestTrace | None:
    """Read the trace of a request in two round trips; None if it is no longer retained."""
    pipe = client.pipeline(transaction=False)
    pipe.hgetall(keys.request(request))
    pipe.lrange(keys.trace(request), 0, -1)
    pipe.time()
    raw, lines, (seconds, micros) = cast(
        "tuple[dict[bytes, bytes], list[bytes], tuple[int, int]]", tuple(await pipe.execute())
    )
    head = pairs(raw)
    if "spec" not in head:
        return None
    spec = decode_request(head["spec"])
    stages = [StageName(name) for name in text(head["stages"]).split(",")]
    for stage in stages:
        pipe.hgetall(keys.task(request, stage))
    hashes = dict(zip(stages, map(pairs, cast("list[object]", await pipe.execute())), strict=True))
    events = [_event(text(line)) for line in lines]
    return _build_trace(spec, head, hashes, events, seconds * 1_000_000 + micros)


async def read_first_outputs(client: Redis, graph: Graph, request: RequestId) -> FirstOutputs:
    """Read the time of each stage's first chunk, on the stage's edge to the client or, without such
    an edge, on its first edge. A stage whose log is empty or deleted has no entry.
    """
    main = next(stage.name for stage in graph.stages if stage.main)
    outputs = {
        stage.name: sorted(graph.edges_from(stage.name), key=lambda edge: edge.target != CLIENT)
        for stage in graph.all_stages
    }
    stages: list[StageName] = [stage for stage, edges in outputs.items() if edges]
    pipe = client.pipeline(transaction=False)
    pipe.hget(keys.task(request, main), "claimed_us")
    for stage in stages:
        pipe.xrange(keys.edge(request, outputs[stage][0].name), count=1)
    claimed, *firsts = cast("list[object]", await pipe.execute())
    first = {
        stage: fields
        for stage, reply in zip(stages, firsts, strict=True)
        for _, fields in stream_entries(reply)
    }
    first_us: dict[str, int] = {
        stage: decode_chunk(fields["h"]).produced_us for stage, fields in first.items()
    }
    return FirstOutputs(claimed_us=int(text(claimed)) if claimed else None, first_us=first_us)


def _build_trace(
    spec: RequestSpec,
    head: Fields,
    hashes: Mapping[StageName, Fields],
    events: Sequence[TraceEvent],
    now_us: int,
) -> RequestTrace:
    graph, state = get_graph(spec.graph), text(head.get("state"))
    ended_us = number(head, "ended_us")
    edges = tuple(_edges(graph, spec, hashes))
    failed = text(head.get("failed_stage"))
    return RequestTrace(
        id=spec.id,
        graph=spec.graph,
        state=state,
        kind=text(head.get("kind")),
        model=spec.model,
        code=text(head.get("code")),
        error=text(head.get("message")) or None,
        param=text(head.get("param")),
        created_us=number(head, "created_us"),
        ended_us=ended_us,
        now_us=now_us,
        session=spec.session,
        retry_of=spec.retry_of,
        traceparent=spec.traceparent,
        key=spec.key,
        body=spec.body,
        outputs=spec.outputs,
        params=spec.params,
        sampling=spec.sampling,
        prompt_ids=spec.prompt_ids,
        audio=tuple(
            AudioIn(duration_s=round(clip.num_samples / clip.rate_hz, 3)) for clip in spec.audio
        ),
        tasks=tuple(
            _task(stage, fields, failed=stage == failed) for stage, fields in hashes.items()
        ),
        edges=edges,
        events=tuple(events),
        kv=tuple(_kv(events, list(hashes), ended_us)),
        playback=next(_playback_reports(text(head.get("playback"))), None),
        earlier_playback=tuple(_playback_reports(text(head.get("earlier_playback")))),
        turn=_turn(text(head.get(TURN))),
        gaps=_gaps(text(head.get(GAPS))),
    )


def _task(stage: StageName, fields: Fields, *, failed: bool) -> TaskTrace:
    first = [int(value) for name, value in fields.items() if name.startswith("first_us:")]
    return TaskTrace(
        stage=stage,
        state="failed" if failed else text(fields.get("state")),
        role=text(fields.get("role")),
        owner=text(fields.get("holder")),
        walk=text(fields.get("walk")),
        epoch=Epoch(number(fields, "epoch")),
        granted_us=number(fields, "granted_us"),
        claimed_us=number(fields, "claimed_us"),
        first_us=min(first, default=0),
        finished_us=number(fields, "finished_us"),
        deaths=number(fields, "deaths"),
        cached_rows=number(fields, "cached_rows"),
        hand_off=decode_hand_off(fields["meta:hand_off"]) if "meta:hand_off" in fields else None,
        receipts=_receipts(fields),
        batches=tuple(map(decode_batch_sizes, _reports(fields, BATCHED))),
    )


def _receipts(fields: Fields) -> tuple[Receipt, ...]:
    """Return the chunk arrival statistics in a task's hash, in the order of its owners."""
    return tuple(receipt for raw in _reports(fields, RECEIVED) for receipt in decode_receipts(raw))


def _reports(fields: Fields, kind: str) -> list[bytes]:
    """Return the statistics of one kind in a task's hash, in the order of its owners."""
    prefix = f"meta:{kind}:"
    return [raw for name, raw in sorted(fields.items()) if name.startswith(prefix)]


def _edges(
    graph: Graph, spec: RequestSpec, hashes: Mapping[StageName, Fields]
) -> Iterator[EdgeTrace]:
    for edge in graph.edges_of(spec):
        source, target = hashes[edge.source], hashes[edge.target]
        items, num_bytes, rows, last_us = map(
            int, text(source.get(f"written:{edge.name}") or b"0|0|0|0").split("|")
        )
        yield EdgeTrace(
            name=edge.name,
            source=edge.source,
            target=edge.target,
            produced=number(source, f"produced:{edge.name}"),
            consumed=number(target, f"consumed:{edge.name}"),
            items=items,
            rows=rows,
            num_bytes=num_bytes,
            remote_bytes=sum(
                receipt.pull_bytes for receipt in _receipts(target) if receipt.edge == edge.name
            ),
            first_us=number(source, f"first_us:{edge.name}"),
            last_us=last_us,
            medium=graph.media.get(EdgeName(edge.name), ""),
        )


def _event(line: str) -> TraceEvent:
    """Parse `at|what|stage|epoch|worker|detail`, as `lua/common` writes it."""
    at_us, what, stage, epoch, worker, detail = line.split("|", 5)
    at = Epoch(int(epoch or 0))
    return TraceEvent(
        at_us=int(at_us), what=what, stage=stage, epoch=at, worker=worker, detail=detail
    )


def _kv(
    events: Sequence[TraceEvent], stages: Sequence[StageName], ended_us: int
) -> Iterator[KVSpan]:
    """Yield one period of ownership of a KV cache for each claim of a task. The period ends when
    the owner loses or gives up the task, or when the task ends. `to_us` is 0 until then.
    """
    for stage in stages:
        if stage == CLIENT:
            continue
        own = [event for event in events if event.stage == stage and event.what in OWNED_UNTIL]
        imported = {
            event.epoch for event in events if event.stage == stage and event.what == "confirmed"
        }
        for event, following in pairwise([*own, None]):
            if event is None or event.what != "claimed":
                continue
            how = "taken over" if event.epoch in imported else "computed"
            until = following.at_us if following is not None else ended_us
            yield KVSpan(
                stage=stage, worker=event.worker, from_us=event.at_us, to_us=until, how=how
            )


def _playback_reports(line: str) -> Iterator[PlaybackReport]:
    """Parse reports `played,underruns,at`, separated by semicolons, as `record_playback` writes
    them.
    """
    for report in line.split(";") if line else ():
        played, underruns, at_us = (int(part) for part in report.split(","))
        yield PlaybackReport(played_samples=played, underruns=underruns, at_us=at_us)


def _gaps(line: str) -> SoundGaps | None:
    if not line:
        return None
    num, longest_us = (int(part) for part in line.split(","))
    return SoundGaps(num=num, longest_us=longest_us)


def _turn(line: str) -> SpokenTurn | None:
    if not line:
        return None
    voiced_end_us, decided_us = (int(part) for part in line.split(","))
    return SpokenTurn(voiced_end_us=voiced_end_us, decided_us=decided_us)
