"""One request as lanes over time: itself, each stage, each hop, who owned its keys and values. Pure; knows no SVG.

Units: coordinates are thousandths of the request's time, `*_us` microseconds since 1970.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fleet.core.ids import CLIENT
from fleet.core.request_trace import EdgeTrace, KVSpan, Receipt, RequestTrace, TaskTrace, TraceEvent
from fleet.graphs import Graph
from web.console import formats
from web.console.charts import find_top
from web.fleet_api.walk_spans import EdgeLogs, WalkSpan, find_walk_spans

SCALE = 1000
MIN_WIDTH = 2.0
"""So narrow a span can still be seen, and pointed at."""
MAX_TICKS = 300
NUM_LABELS, LAST_LABEL = 5, 930
LABEL_WIDTH = 18.0
"""Of a letter, on the lanes of a phone; a desk has room for more."""
OUTPUT, STRIKE = "output", ("lost", "failed", "aborted")
ENDS = ("finished", "failed", "lost", "handed_off")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSpan:
    """`kind` chooses how it is drawn: wait, first, output, walk, hop, pull, kv, whole. `detail` says all of it in words; `label`
    stands on it where it is wide enough.
    """

    x: float
    width: float
    kind: str
    detail: str
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LanePoint:
    """A moment: `kind` is tick (a chunk), lost, failed, aborted, handed_off or another mark."""

    x: float
    kind: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """`colour` -1 has no stage. `note` stands beside the lane: bytes, owner."""

    key: str
    label: str
    kind: str
    colour: int
    note: str
    spans: tuple[LaneSpan, ...]
    points: tuple[LanePoint, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Waterfall:
    """`labels` are round times, and where they stand."""

    lanes: tuple[Lane, ...]
    labels: tuple[tuple[float, str], ...]
    num_spans: int


@dataclass(frozen=True, slots=True)
class Axis:
    start_us: int
    end_us: int

    def x(self, at_us: int) -> float:
        length = max(self.end_us - self.start_us, 1)
        return round(min(max((at_us - self.start_us) / length, 0.0), 1.0) * SCALE, 1)

    def span(self, begin_us: int, end_us: int, kind: str, detail: str) -> LaneSpan:
        x = self.x(begin_us)
        width = max(self.x(end_us) - x, MIN_WIDTH)
        return LaneSpan(x=min(x, SCALE - width), width=round(width, 1), kind=kind, detail=detail)

    def at(self, us: int) -> str:
        """When, from the request's beginning."""
        return f"at {formats.ms((us - self.start_us) / 1000)}"


def build_waterfall(story: RequestTrace, graph: Graph, logs: EdgeLogs, colour_of: Mapping[str, int]) -> Waterfall:
    """`logs`: the chunks of edges; one that is not given shows no ticks."""
    ticks = {edge: [chunk.made_us for chunk in chunks] for edge, chunks in logs.items()}
    axis = Axis(story.created_us, max(story.ended_us or story.now_us, story.created_us + 1))
    lanes = [_request_lane(story, axis)]
    for task in (task for task in story.tasks if task.stage != CLIENT):
        lanes.append(_stage_lane(task, story, axis, colour_of.get(task.stage, -1)))
        lanes += _walk_lane(find_walk_spans(story, task, graph, logs), task.stage, axis, colour_of)
        if task.hand_off is not None:
            lanes.append(_hand_off_lane(task, axis, colour_of.get(task.stage, -1)))
        lanes += [_hop_lane(edge, story, ticks, axis, colour_of) for edge in story.edges if edge.source == task.stage]
        lanes += _kv_lane(task, story.kv, axis, colour_of)
    labels = tuple(_labels((axis.end_us - axis.start_us) / 1000))
    return Waterfall(lanes=tuple(lanes), labels=labels, num_spans=sum(len(lane.spans) for lane in lanes))


def _labels(total_ms: float) -> Iterator[tuple[float, str]]:
    """Round times in one unit along the axis; the last leaves room for itself."""
    step = find_top([total_ms / NUM_LABELS])
    yield 0.0, "0"
    for number in range(1, NUM_LABELS + 1):
        at, x = number * step, round(SCALE * number * step / total_ms, 1)
        if x <= LAST_LABEL:
            yield x, f"{at / 1000:g} s" if total_ms >= 2000 else f"{at:g} ms"


def _walk_lane(spans: Sequence[WalkSpan], stage: str, axis: Axis, colour_of: Mapping[str, int]) -> Iterator[Lane]:
    if not spans:
        return
    took: dict[str, int] = {}
    drawn: list[LaneSpan] = []
    for span in spans:
        took[span.walk] = took.get(span.walk, 0) + span.to_us - span.from_us
        length = formats.ms((span.to_us - span.from_us) / 1000)
        detail = f"{stage} in {span.walk} for {length}, {span.worker}, {axis.at(span.from_us)}"
        one = axis.span(span.from_us, span.to_us, "walk", detail)
        drawn.append(replace(one, label=span.walk if one.width >= LABEL_WIDTH * len(span.walk) else ""))
    note = ", ".join(f"{walk} {formats.ms(us / 1000)}" for walk, us in took.items())
    colour = colour_of.get(stage, -1)
    yield Lane(key=f"walks-{stage}", label=f"{stage} walks", kind="walk", colour=colour, note=note, spans=tuple(drawn))


def _request_lane(story: RequestTrace, axis: Axis) -> Lane:
    took = formats.ms((axis.end_us - axis.start_us) / 1000)
    span = axis.span(axis.start_us, axis.end_us, "whole", f"request {story.state}, {took}")
    marks = [mark for mark in story.marks if mark.stage in ("", CLIENT) and mark.what not in ("submitted", "ended")]
    points = [_point(mark, axis) for mark in marks]
    if story.state in STRIKE and story.ended_us:
        points.append(LanePoint(x=axis.x(story.ended_us), kind=story.state, detail=f"{story.state} {axis.at(story.ended_us)}"))
    return Lane(key="request", label="request", kind="request", colour=-1, note=took, spans=(span,), points=tuple(points))


def _point(mark: TraceEvent, axis: Axis) -> LanePoint:
    words = [mark.what.replace("_", " "), mark.stage, mark.worker, mark.detail, axis.at(mark.at_us)]
    return LanePoint(x=axis.x(mark.at_us), kind=mark.what, detail=", ".join(word for word in words if word))


def _stage_lane(task: TaskTrace, story: RequestTrace, axis: Axis, colour: int) -> Lane:
    marks = [mark for mark in story.marks if mark.stage == task.stage]
    spans = tuple(_turns(marks, axis)) or tuple(_brief(task, axis))
    points = tuple(_point(mark, axis) for mark in marks if mark.what in ("lost", "failed", "handed_off"))
    return Lane(
        key=f"stage-{task.stage}", label=task.stage, kind="stage", colour=colour, note=task.state, spans=spans, points=points
    )


@dataclass(slots=True)
class _TaskOwnership:
    """What is known of the task so far, mark after mark: since when it waits, is worked on, gives output, and by whom."""

    axis: Axis
    waits_us: int = 0
    works_us: int = 0
    gives_us: int = 0
    worker: str = ""
    spans: list[LaneSpan] = field(default_factory=list[LaneSpan])

    def take(self, mark: TraceEvent) -> None:
        if mark.what == "granted":
            self.waits_us = self.waits_us or mark.at_us
        elif mark.what == "claimed":
            self._wait_is_over(mark.at_us)
            self.works_us, self.worker = mark.at_us, mark.worker
        elif mark.what == OUTPUT and self.works_us:
            self.gives_us = mark.at_us
        elif mark.what in ENDS:
            self.close(mark.at_us, mark.what)
            self.waits_us = mark.at_us if mark.what == "handed_off" else 0

    def _wait_is_over(self, at_us: int) -> None:
        if self.waits_us:
            words = f"waits for a worker {formats.ms((at_us - self.waits_us) / 1000)}, {self.axis.at(self.waits_us)}"
            self.spans.append(self.axis.span(self.waits_us, at_us, "wait", words))
        self.waits_us = 0

    def close(self, at_us: int, how: str) -> None:
        """End what is open: the wait, or the work up to its first output and after it."""
        self._wait_is_over(at_us)
        if not self.works_us:
            return
        first_us = self.gives_us or at_us
        begun = self.axis.at(self.works_us)
        kind = "first" if self.gives_us or how != "finished" else OUTPUT
        took = formats.ms((first_us - self.works_us) / 1000)
        until = "to its first output" if self.gives_us else how
        self.spans.append(self.axis.span(self.works_us, first_us, kind, f"{self.worker}: {took} {until}, {begun}"))
        if self.gives_us:
            took = formats.ms((at_us - self.gives_us) / 1000)
            detail = f"{self.worker}: output for {took}, {how}, {self.axis.at(self.gives_us)}"
            self.spans.append(self.axis.span(self.gives_us, at_us, OUTPUT, detail))
        self.works_us = self.gives_us = 0


def _turns(marks: Sequence[TraceEvent], axis: Axis) -> list[LaneSpan]:
    turn = _TaskOwnership(axis)
    for mark in marks:
        turn.take(mark)
    turn.close(axis.end_us, "under way")
    return turn.spans


def _brief(task: TaskTrace, axis: Axis) -> Iterator[LaneSpan]:
    """The same without marks, from what the task itself keeps."""
    steps = (
        ("wait", "waits for a worker", task.granted_us, task.claimed_us),
        ("first", "to its first output", task.claimed_us, task.first_us),
        (OUTPUT, "output", task.first_us, task.finished_us),
    )
    for kind, words, begin_us, end_us in steps:
        if begin_us:
            took = formats.ms(((end_us or axis.end_us) - begin_us) / 1000)
            yield axis.span(begin_us, end_us or axis.end_us, kind, f"{task.owner or task.stage}: {words}, {took}")


def _hand_off_lane(task: TaskTrace, axis: Axis, colour: int) -> Lane:
    told = task.hand_off
    assert told is not None
    steps = (
        ("given up", told.prefilled_us, told.handed_us),
        ("waits for the next worker", told.handed_us, told.claimed_us),
        ("logs are read", told.claimed_us, told.opened_us),
        ("pages are pulled", told.opened_us, told.pulled_us),
        ("pages are adopted", told.pulled_us, told.confirmed_us),
        ("first step", told.confirmed_us, told.resumed_us),
    )
    spans = [
        axis.span(begin, end, "pull" if "pulled" in words else "hop", f"{words}, {formats.ms((end - begin) / 1000)}")
        for words, begin, end in steps
        if begin and end and end >= begin
    ]
    last = told.resumed_us or told.opened_us
    note = f"{formats.ms((last - told.prefilled_us) / 1000)} in all"
    label = f"{task.stage} hand-off"
    return Lane(key=f"hand-off-{task.stage}", label=label, kind="hand-off", colour=colour, note=note, spans=tuple(spans))


def _hop_lane(
    edge: EdgeTrace, story: RequestTrace, ticks: Mapping[str, Sequence[int]], axis: Axis, colour_of: Mapping[str, int]
) -> Lane:
    receipts = [receipt for task in story.tasks for receipt in task.receipts if receipt.edge == edge.name]
    words = [f"{edge.produced} chunks of {edge.items} items, {formats.size(edge.num_bytes)} through the log"]
    words += [_received(receipt) for receipt in receipts]
    spans = (axis.span(edge.first_us, edge.last_us, "hop", "; ".join(words)),) if edge.first_us else ()
    target = "listener" if edge.target == CLIENT else edge.target
    return Lane(
        key=f"hop-{edge.name}",
        label=f"{edge.name} → {target}",
        kind="hop",
        colour=colour_of.get(edge.source, -1),
        note=_volume(edge, receipts),
        spans=spans,
        points=_ticks(ticks.get(edge.name, ()), axis),
    )


def _volume(edge: EdgeTrace, receipts: Sequence[Receipt]) -> str:
    pulled, took_us = sum(receipt.pull_bytes for receipt in receipts), sum(receipt.pull_us for receipt in receipts)
    volume = formats.size(edge.num_bytes + max(edge.remote_bytes, pulled))
    return f"{volume} at {pulled / took_us / 1000:.2f} GB/s" if pulled and took_us else volume


def _received(receipt: Receipt) -> str:
    mean, most = formats.ms(receipt.hop_mean_us / 1000), formats.ms(receipt.hop_max_us / 1000)
    words = f"{receipt.num_chunks} arrived at {receipt.worker}, {mean} old, at most {most}"
    if receipt.num_pulls:
        words += f"; {receipt.num_pulls} pulls of {formats.size(receipt.pull_bytes)} in {formats.ms(receipt.pull_us / 1000)}"
    if receipt.num_failed_pulls:
        words += f", {receipt.num_failed_pulls} of them failed"
    return words


def _ticks(made_us: Sequence[int], axis: Axis) -> tuple[LanePoint, ...]:
    """A tick a chunk; of very many, as many as can be told apart."""
    every = max(1, -(-len(made_us) // MAX_TICKS))
    return tuple(LanePoint(x=axis.x(at), kind="tick", detail="") for at in made_us[::every] if at)


def _kv_lane(task: TaskTrace, owned: Sequence[KVSpan], axis: Axis, colour_of: Mapping[str, int]) -> list[Lane]:
    mine = [span for span in owned if span.stage == task.stage]
    if not mine:
        return []
    spans = tuple(
        axis.span(
            span.from_us,
            span.to_us or axis.end_us,
            "kv",
            f"{span.worker} owns the keys and values, {span.how}, {axis.at(span.from_us)}",
        )
        for span in mine
    )
    note = f"{len(mine)} owner{'' if len(mine) == 1 else 's'}"
    colour = colour_of.get(task.stage, -1)
    return [Lane(key=f"kv-{task.stage}", label=f"{task.stage} KV owner", kind="kv", colour=colour, note=note, spans=spans)]
