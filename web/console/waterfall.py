"""A request as lanes over time: the request, its stages, its edges, the owners of its KV cache.
Pure; knows no SVG.

Units: `*_us` are microseconds since 1970.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fleet.core.ids import CLIENT
from fleet.telemetry.trace import (
    BatchSizes,
    EdgeTrace,
    KVSpan,
    Receipt,
    RequestTrace,
    TaskTrace,
    TraceEvent,
)
from web.console import formats
from web.console.answer_facts import AnswerFacts
from web.console.lanes import SPAN_HEIGHT, Axis, Lane, LanePoint, LaneSpan
from web.console.stalls import Stall
from web.fleet_api.walk_spans import EdgeLogs, WalkSpan, find_walk_spans

MAX_TICKS = 300
MAX_HEIGHT = 16.0
LABEL_WIDTH = 18.0
"""Width of a letter of a span's label on a phone."""
OUTPUT, STRIKE = "output", ("lost", "failed", "aborted")
MARKED = ("lost", "failed", "parked", "handed_off")
ENDS = ("finished", "failed", "lost", "parked", "handed_off")


def build_lanes(
    facts: AnswerFacts, logs: EdgeLogs, axis: Axis, stalls: Mapping[str, Sequence[Stall]]
) -> tuple[Lane, ...]:
    """Build the lanes of a request's trace. `logs` holds the stored chunks by edge; an edge without
    chunks has no ticks. `stalls` are the pauses of the stages.
    """
    trace, graph = facts.trace, facts.graph
    ticks = {edge: [chunk.produced_us for chunk in chunks] for edge, chunks in logs.items()}
    lanes = [_request_lane(trace, axis)]
    for task in (task for task in trace.tasks if task.stage != CLIENT):
        lanes.append(_stage_lane(task, trace, axis, stalls.get(task.stage, ())))
        lanes += _walk_lane(find_walk_spans(trace, task, graph, logs), task.stage, axis)
        if task.hand_off is not None:
            lanes.append(_hand_off_lane(task, axis))
        lanes += [
            _delivery_lane(edge, facts, ticks, axis)
            for edge in trace.edges
            if edge.source == task.stage
        ]
        lanes += _kv_lane(task.stage, trace.kv, axis)
    return tuple(lanes)


def _walk_lane(spans: Sequence[WalkSpan], stage: str, axis: Axis) -> Iterator[Lane]:
    if not spans:
        return
    took: dict[str, int] = {}
    drawn: list[LaneSpan] = []
    for span in spans:
        took[span.walk] = took.get(span.walk, 0) + span.to_us - span.from_us
        length = formats.ms((span.to_us - span.from_us) / 1000)
        detail = f"{stage} in {span.walk} for {length}, {span.worker}, {axis.at(span.from_us)}"
        one = axis.span(span.from_us, span.to_us, "walk", detail)
        drawn.append(
            replace(one, label=span.walk if one.width >= LABEL_WIDTH * len(span.walk) else "")
        )
    note = ", ".join(f"{walk} {formats.ms(us / 1000)}" for walk, us in took.items())
    yield Lane(
        key=f"walks-{stage}",
        label=f"{stage} phases",
        kind="walk",
        stage=stage,
        note=note,
        spans=tuple(drawn),
    )


def _request_lane(trace: RequestTrace, axis: Axis) -> Lane:
    end_us = trace.ended_us or trace.now_us
    took = formats.ms((end_us - trace.created_us) / 1000)
    span = axis.span(trace.created_us, end_us, "whole", f"request {trace.state}, {took}")
    events = [
        event
        for event in trace.events
        if event.stage in ("", CLIENT) and event.what not in ("submitted", "restored", "ended")
    ]
    points = [event_point(event, axis) for event in events]
    if trace.state in STRIKE and trace.ended_us:
        points.append(
            LanePoint(
                x=axis.x(trace.ended_us),
                kind=trace.state,
                detail=f"{trace.state} {axis.at(trace.ended_us)}",
            )
        )
    return Lane(
        key="request",
        label="request",
        kind="request",
        stage="",
        note=took,
        spans=(span,),
        points=tuple(points),
    )


def event_point(event: TraceEvent, axis: Axis) -> LanePoint:
    """Return the mark of a trace event on a lane."""
    parts = [
        event.what.replace("_", " "),
        event.stage,
        event.worker,
        event.detail,
        axis.at(event.at_us),
    ]
    return LanePoint(
        x=axis.x(event.at_us), kind=event.what, detail=", ".join(part for part in parts if part)
    )


def _stage_lane(task: TaskTrace, trace: RequestTrace, axis: Axis, stalls: Sequence[Stall]) -> Lane:
    events = [event for event in trace.events if event.stage == task.stage]
    batches = {sizes.worker: sizes for sizes in task.batches}
    phases = _spans_of_events(events, axis, batches, trace.ended_us or trace.now_us)
    spans = tuple(phases) or tuple(_spans_of_task(task, axis))
    points = tuple(event_point(event, axis) for event in events if event.what in MARKED)
    return Lane(
        key=f"stage-{task.stage}",
        label=task.stage,
        kind="stage",
        stage=task.stage,
        note=task.state,
        spans=(*spans, *(_stall_span(stall, axis) for stall in stalls)),
        points=points,
    )


def _stall_span(stall: Stall, axis: Axis) -> LaneSpan:
    took = formats.ms((stall.to_us - stall.from_us) / 1000)
    usual = formats.us(stall.usual_us)
    detail = f"no output for {took}, {usual} are usual, {axis.at(stall.from_us)}"
    return replace(axis.span(stall.from_us, stall.to_us, "stall", detail), height=MAX_HEIGHT)


@dataclass(slots=True)
class _TaskPhases:
    """Builds the spans of a task (wait, work, output) from its trace events. `waiting_since_us`,
    `working_since_us` and `output_since_us` are the beginnings of the current periods, 0 outside of
    them. The thickness of work is the batch size, where its worker has reported it.
    """

    axis: Axis
    batches: Mapping[str, BatchSizes]
    waiting_since_us: int = 0
    working_since_us: int = 0
    output_since_us: int = 0
    worker: str = ""
    spans: list[LaneSpan] = field(default_factory=list[LaneSpan])

    def add(self, event: TraceEvent) -> None:
        if event.what == "granted":
            self.waiting_since_us = self.waiting_since_us or event.at_us
        elif event.what == "claimed":
            self._end_wait(event.at_us)
            self.working_since_us, self.worker = event.at_us, event.worker
        elif event.what == OUTPUT and self.working_since_us:
            self.output_since_us = event.at_us
        elif event.what in ENDS:
            self.close(event.at_us, event.what)
            self.waiting_since_us = event.at_us if event.what == "handed_off" else 0

    def _end_wait(self, at_us: int) -> None:
        if self.waiting_since_us:
            text = (
                f"waits for a worker {formats.ms((at_us - self.waiting_since_us) / 1000)}, "
                f"{self.axis.at(self.waiting_since_us)}"
            )
            self.spans.append(self.axis.span(self.waiting_since_us, at_us, "wait", text))
        self.waiting_since_us = 0

    def close(self, at_us: int, how: str) -> None:
        """End the current periods of the task at `at_us` and append their spans. `how` is the trace
        event that ends the work.
        """
        self._end_wait(at_us)
        if not self.working_since_us:
            return
        first_us = self.output_since_us or at_us
        sizes = self.batches.get(self.worker)
        height = SPAN_HEIGHT if sizes is None else thickness_of(sizes.mean)
        batch = "" if sizes is None else f", {formats.count(sizes.mean)} in its batch"
        begun = self.axis.at(self.working_since_us)
        kind = "first" if self.output_since_us or how != "finished" else OUTPUT
        took = formats.ms((first_us - self.working_since_us) / 1000)
        until = "to its first output" if self.output_since_us else how
        detail = f"{self.worker}: {took} {until}{batch}, {begun}"
        work = self.axis.span(self.working_since_us, first_us, kind, detail)
        self.spans.append(replace(work, height=height))
        if self.output_since_us:
            took = formats.ms((at_us - self.output_since_us) / 1000)
            begun = self.axis.at(self.output_since_us)
            detail = f"{self.worker}: output for {took}, {how}{batch}, {begun}"
            output = self.axis.span(self.output_since_us, at_us, OUTPUT, detail)
            self.spans.append(replace(output, height=height))
        self.working_since_us = self.output_since_us = 0


def thickness_of(batch: float) -> float:
    """Return the thickness of the work on a batch: thin for a single request, full at six."""
    return min(4 + 2 * batch, MAX_HEIGHT)


def _spans_of_events(
    events: Sequence[TraceEvent], axis: Axis, batches: Mapping[str, BatchSizes], end_us: int
) -> list[LaneSpan]:
    phases = _TaskPhases(axis, batches)
    for event in events:
        phases.add(event)
    phases.close(end_us, "in progress")
    return phases.spans


def _spans_of_task(task: TaskTrace, axis: Axis) -> Iterator[LaneSpan]:
    """Build the spans from the task's own times, for a trace without events."""
    steps = (
        ("wait", "waits for a worker", task.granted_us, task.claimed_us),
        ("first", "to its first output", task.claimed_us, task.first_us),
        (OUTPUT, "output", task.first_us, task.finished_us),
    )
    for kind, text, begin_us, end_us in steps:
        if begin_us:
            took = formats.ms(((end_us or axis.end_us) - begin_us) / 1000)
            yield axis.span(
                begin_us, end_us or axis.end_us, kind, f"{task.owner or task.stage}: {text}, {took}"
            )


def _hand_off_lane(task: TaskTrace, axis: Axis) -> Lane:
    times = task.hand_off
    assert times is not None
    steps = (
        ("handed off", times.prefilled_us, times.handed_us),
        ("waits for the next worker", times.handed_us, times.claimed_us),
        ("logs are read", times.claimed_us, times.opened_us),
        ("pages are pulled", times.opened_us, times.pulled_us),
        ("pages are imported", times.pulled_us, times.confirmed_us),
        ("first step", times.confirmed_us, times.resumed_us),
    )
    spans = [
        axis.span(
            begin,
            end,
            "pull" if "pulled" in text else "hop",
            f"{text}, {formats.ms((end - begin) / 1000)}",
        )
        for text, begin, end in steps
        if begin and end and end >= begin
    ]
    last = times.resumed_us or times.opened_us
    note = f"{formats.ms((last - times.prefilled_us) / 1000)} in all"
    label = f"{task.stage} hand-off"
    return Lane(
        key=f"hand-off-{task.stage}",
        label=label,
        kind="hand-off",
        stage=task.stage,
        note=note,
        spans=tuple(spans),
    )


def _delivery_lane(
    edge: EdgeTrace, facts: AnswerFacts, ticks: Mapping[str, Sequence[int]], axis: Axis
) -> Lane:
    receipts = [
        receipt
        for task in facts.trace.tasks
        for receipt in task.receipts
        if receipt.edge == edge.name
    ]
    parts = [
        f"{edge.produced} chunks of {edge.items} items, {formats.size(edge.num_bytes)} through "
        "the log"
    ]
    parts += [_describe_receipt(receipt) for receipt in receipts]
    spans = (
        (axis.span(edge.first_us, edge.last_us, "hop", "; ".join(parts)),) if edge.first_us else ()
    )
    target = "listener" if edge.target == CLIENT else edge.target
    return Lane(
        key=f"hop-{edge.name}",
        label=f"{facts.plain_name(edge)} → {target}",
        kind="hop",
        stage=edge.source,
        note=_volume(edge, receipts),
        spans=spans,
        points=_ticks(ticks.get(edge.name, ()), axis),
    )


def _volume(edge: EdgeTrace, receipts: Sequence[Receipt]) -> str:
    pulled, took_us = (
        sum(receipt.pull_bytes for receipt in receipts),
        sum(receipt.pull_us for receipt in receipts),
    )
    volume = formats.size(edge.num_bytes + max(edge.remote_bytes, pulled))
    return f"{volume} at {pulled / took_us / 1000:.2f} GB/s" if pulled and took_us else volume


def _describe_receipt(receipt: Receipt) -> str:
    mean, most = formats.ms(receipt.hop_mean_us / 1000), formats.ms(receipt.hop_max_us / 1000)
    text = f"{receipt.num_chunks} arrived at {receipt.worker}, {mean} old, at most {most}"
    if receipt.num_pulls:
        text += (
            f"; {receipt.num_pulls} transfers of {formats.size(receipt.pull_bytes)} in "
            f"{formats.ms(receipt.pull_us / 1000)}"
        )
    if receipt.num_failed_pulls:
        text += f", {receipt.num_failed_pulls} of them failed"
    return text


def _ticks(produced_us: Sequence[int], axis: Axis) -> tuple[LanePoint, ...]:
    """Return a point for each chunk, at the time at which it was produced; of very many chunks,
    only as many points as can be distinguished.
    """
    every = max(1, -(-len(produced_us) // MAX_TICKS))
    return tuple(
        LanePoint(x=axis.x(at), kind="tick", detail="") for at in produced_us[::every] if at
    )


def _kv_lane(stage: str, owned: Sequence[KVSpan], axis: Axis) -> Iterator[Lane]:
    spans = [
        axis.span(
            span.from_us,
            span.to_us or axis.end_us,
            "kv",
            f"{span.worker} owns the KV cache, {span.how}, {axis.at(span.from_us)}",
        )
        for span in owned
        if span.stage == stage
    ]
    if spans:
        note = f"{len(spans)} owner{'' if len(spans) == 1 else 's'}"
        yield Lane(
            key=f"kv-{stage}",
            label=f"{stage} KV owner",
            kind="kv",
            stage=stage,
            note=note,
            spans=tuple(spans),
        )
