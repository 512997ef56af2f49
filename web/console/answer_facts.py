"""Facts about one answer, computed from its trace: first outputs, sound, pace of the stages, losses
of workers. Pure; knows no stage by name and no page.

Units: `*_us` are microseconds since 1970, `*_ms` milliseconds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fleet.core.ids import CLIENT
from fleet.graphs import Graph
from fleet.telemetry.trace import EdgeTrace, RequestTrace, SoundGaps, TaskTrace
from web.gateway.sound_gaps import GapFinder

TEXT, AUDIO = "text", "audio"
LOSSES = {
    "died": "died",
    "lapsed": "stopped answering",
    "failed": "failed a step of its batch",
    "left": "left",
    "revoked": "had the task taken away by an operator",
    "suspected": "ran beside a task that ends workers",
}
"""What happened to a worker that lost a task, by the word with which the trace names the loss
(`Loss.how`).
"""
STARVED_STEPS = 1.5
"""A stage whose last output follows its last input within this many of its own steps had to wait
for that input; a stage that had inputs in reserve ends later.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A worker that lost the task of `stage` at `at_us`. `how` is a key of `LOSSES` or another word
    of the trace. `next_worker` took over at `resumed_us`; "" and 0 if none has.
    """

    stage: str
    worker: str
    how: str
    at_us: int
    next_worker: str = ""
    resumed_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A piece of an answer's sound: `samples` samples, which were produced at `at_us`."""

    at_us: int
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Speed of a stage against the sound: the stage took `took_ms` for each item, and an item lasts
    `item_ms`. Where the graph declares no duration, an item is a second of sound.
    """

    task: TaskTrace
    took_ms: float
    item_ms: float


@dataclass(frozen=True, slots=True)
class AnswerFacts:
    """Facts about the answer of `trace`. `rate_hz` is the sample rate of its sound, 0 without
    sound. `arrivals` are the stored chunks of sound in order, empty once they are deleted.
    """

    trace: RequestTrace
    graph: Graph
    rate_hz: int
    arrivals: Sequence[Arrival] = ()

    @property
    def end_us(self) -> int:
        return self.trace.ended_us or self.trace.now_us

    @property
    def origin_us(self) -> int:
        """Time from which the listener waits: the end of the user's speech, or the submission."""
        turn = self.trace.turn
        return turn.voiced_end_us if turn is not None else self.trace.created_us

    @property
    def num_samples(self) -> int:
        edge = self.edge(AUDIO)
        return edge.rows if edge is not None else 0

    @property
    def sound_s(self) -> float:
        return self.num_samples / self.rate_hz if self.rate_hz else 0.0

    @property
    def underruns(self) -> int | None:
        """Dropouts that the player reported, None without a report."""
        return self.trace.playback.underruns if self.trace.playback is not None else None

    def plain_name(self, edge: EdgeTrace) -> str:
        """Return what an edge carries, in words of the field; the edge's name where there is no
        better one.
        """
        item_ms = {declared.name: declared.item_ms for declared in self.graph.edges}
        return "audio codes" if item_ms.get(edge.name) and not edge.medium else edge.name

    def edge(self, medium: str) -> EdgeTrace | None:
        """Return the edge that brings text or sound to the client; None without output on it."""
        found = (edge for edge in self.trace.edges if edge.medium == medium and edge.first_us)
        return next(found, None)

    def first_ms(self, medium: str) -> float | None:
        """Return the listener's wait until the first output; None without output."""
        edge = self.edge(medium)
        return max(edge.first_us - self.origin_us, 0) / 1000 if edge is not None else None

    def losses(self) -> tuple[Loss, ...]:
        """Return the losses of workers in the order of time."""
        events = self.trace.events
        return tuple(
            self._loss_at(place) for place, event in enumerate(events) if event.what == "lost"
        )

    def _loss_at(self, place: int) -> Loss:
        lost = self.trace.events[place]
        again = "attached" if lost.stage == CLIENT else "claimed"
        later = (e for e in self.trace.events[place:] if (e.stage, e.what) == (lost.stage, again))
        found = next(later, None)
        return Loss(
            stage=lost.stage,
            worker=lost.worker,
            how=lost.detail,
            at_us=lost.at_us,
            next_worker=found.worker if found is not None else "",
            resumed_us=found.at_us if found is not None else 0,
        )

    def waited_for_client(self) -> bool:
        """Return True if a stage had to wait because the client read the answer too slowly."""
        names = {edge.name for edge in self.trace.edges if edge.target == CLIENT}
        parked = (event for event in self.trace.events if event.what == "parked")
        return any(
            event.detail.startswith("no credit on ") and names & set(_names_in(event.detail))
            for event in parked
        )

    def slow_stage(self) -> Pace | None:
        """Return the stage that made the sound slower than real time; None if the sound as a whole
        was made in time.

        The search begins at the stage that makes the sound. A stage whose output ends as soon as
        its input allows was waiting for that input, so the stage before it is examined.
        """
        out = self.edge(AUDIO)
        if out is None or out.last_us - out.first_us <= self.sound_s * 1e6:
            return None
        while (feed := self._last_input(out.source)) is not None and _waited_for(feed, out):
            out = feed
        task = next((task for task in self.trace.tasks if task.stage == out.source), None)
        return self._pace(task, out) if task is not None else None

    def _last_input(self, stage: str) -> EdgeTrace | None:
        inputs = [edge for edge in self.trace.edges if edge.target == stage and edge.last_us]
        return max(inputs, key=lambda edge: edge.last_us, default=None)

    def _pace(self, task: TaskTrace, out: EdgeTrace) -> Pace | None:
        item_ms = {edge.name: edge.item_ms for edge in self.graph.edges}.get(out.name, 0.0)
        took_ms = (out.last_us - out.first_us) / 1000
        if item_ms and out.items > 1:
            return Pace(task=task, took_ms=took_ms / (out.items - 1), item_ms=item_ms)
        return (
            Pace(task=task, took_ms=took_ms / self.sound_s, item_ms=1000.0)
            if self.sound_s
            else None
        )

    def first_steps(self, medium: str) -> dict[str, float]:
        """Return the parts of the wait for the first output in milliseconds, by their description.
        The part of a stage begins with its first input, so that waiting for the stage before it
        counts for that earlier stage.
        """
        turn = self.trace.turn
        steps: dict[str, float] = {}
        if turn is not None:
            steps["waiting for you to finish"] = (turn.decided_us - turn.voiced_end_us) / 1000
        for task in self._tasks_before(medium):
            if task.granted_us and task.claimed_us:
                waited_us = task.claimed_us - task.granted_us
                steps[f"{task.stage} waiting for a worker"] = waited_us / 1000
            fed = [edge.first_us for edge in self.trace.edges if edge.target == task.stage]
            begin_us = max([task.claimed_us, *fed])
            if task.claimed_us and task.first_us > begin_us:
                steps[f"{task.stage} to its first output"] = (task.first_us - begin_us) / 1000
        return steps

    def _tasks_before(self, medium: str) -> Iterator[TaskTrace]:
        """Yield the tasks of the stages that the first output on the edge to the client needs."""
        out = self.edge(medium)
        needed = {out.source} if out is not None else set[str]()
        for task in reversed(self.trace.tasks):
            if task.stage in needed:
                needed |= {edge.source for edge in self.trace.edges if edge.target == task.stage}
                yield task

    def dry_times(self) -> tuple[tuple[int, int], ...]:
        """Return the periods (from, to) in which a player that begins with the first sound has
        nothing to play, from the stored arrivals.
        """
        finder = GapFinder(self.rate_hz)
        found = (finder.add(arrival.at_us, arrival.samples) for arrival in self.arrivals)
        return tuple(gap for gap in found if gap is not None)

    @property
    def gaps(self) -> SoundGaps | None:
        """Gaps in the sound as it was made, from its stored chunks, or as the gateway noted them;
        None if neither is known.
        """
        finder = GapFinder(self.rate_hz)
        for arrival in self.arrivals:
            finder.add(arrival.at_us, arrival.samples)
        return finder.gaps or self.trace.gaps


def _waited_for(feed: EdgeTrace, out: EdgeTrace) -> bool:
    step_us = (out.last_us - out.first_us) / max(out.produced - 1, 1)
    return out.last_us - feed.last_us <= STARVED_STEPS * step_us


def _names_in(detail: str) -> list[str]:
    return detail.removeprefix("no credit on ").split(", ")
