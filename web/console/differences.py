"""Differences between two answers: what the listener got, and the times of each stage. Pure.

Units: `*_ms` are milliseconds.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fleet.core.ids import CLIENT
from fleet.telemetry.trace import TaskTrace
from web.console import formats
from web.console.answer_facts import AUDIO, TEXT, AnswerFacts

SAME = "same"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedValue:
    """A row: the values of both answers and the change from the first to the second, "" if the
    values are no numbers. `weight_ms` is the size of a change in time, 0 for other values.
    """

    name: str
    first: str
    second: str
    change: str = ""
    weight_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferenceGroup:
    """Rows about one stage, or about the whole answer if `stage` is ""."""

    stage: str
    rows: tuple[ComparedValue, ...]

    @property
    def weight_ms(self) -> float:
        return max(row.weight_ms for row in self.rows)


def find_differences(first: AnswerFacts, second: AnswerFacts) -> tuple[DifferenceGroup, ...]:
    """Return the rows about the answers as wholes, then about each stage, the stage with the
    largest change in time first.
    """
    whole = DifferenceGroup(stage="", rows=tuple(_whole(first, second)))
    stages = dict.fromkeys(
        task.stage
        for facts in (first, second)
        for task in facts.trace.tasks
        if task.stage != CLIENT
    )
    groups = [_stage_group(stage, first, second) for stage in stages]
    return (whole, *sorted(groups, key=lambda group: -group.weight_ms))


def _whole(first: AnswerFacts, second: AnswerFacts) -> Iterator[ComparedValue]:
    yield _times("First text", first.first_ms(TEXT), second.first_ms(TEXT))
    yield _times("First sound", first.first_ms(AUDIO), second.first_ms(AUDIO))
    took = [(facts.end_us - facts.trace.created_us) / 1000 for facts in (first, second)]
    yield _times("Whole answer", *took)
    yield _counts("Samples", first.num_samples, second.num_samples)
    yield _counts("Dropouts", first.underruns, second.underruns)


def _times(name: str, first: float | None, second: float | None) -> ComparedValue:
    change, weight = "", 0.0
    if first is not None and second is not None:
        weight = abs(second - first)
        change = f"{'+' if second > first else '−'}{formats.ms(weight)}" if weight else SAME
    return ComparedValue(
        name=name,
        first=formats.ms(first),
        second=formats.ms(second),
        change=change,
        weight_ms=weight,
    )


def _counts(name: str, first: int | None, second: int | None) -> ComparedValue:
    change = ""
    if first is not None and second is not None:
        by = formats.count(abs(second - first))
        change = SAME if second == first else f"{'+' if second > first else '−'}{by}"
    return ComparedValue(
        name=name, first=formats.count(first), second=formats.count(second), change=change
    )


def _stage_group(stage: str, first: AnswerFacts, second: AnswerFacts) -> DifferenceGroup:
    tasks = [
        next((task for task in facts.trace.tasks if task.stage == stage), None)
        for facts in (first, second)
    ]
    ends = (first.end_us, second.end_us)
    rows = [
        _times(
            name,
            *(read(task, end) if task else None for task, end in zip(tasks, ends, strict=True)),
        )
        for name, read in _TIMES.items()
    ]
    batches = [task.batches[-1].mean if task and task.batches else None for task in tasks]
    owners = [task.owner or formats.NOTHING if task else formats.NOTHING for task in tasks]
    rows += [
        ComparedValue(
            name="Batch", first=formats.count(batches[0]), second=formats.count(batches[1])
        ),
        ComparedValue(name="Worker", first=owners[0], second=owners[1]),
    ]
    return DifferenceGroup(stage=stage, rows=tuple(rows))


def _waited_ms(task: TaskTrace, _end_us: int) -> float | None:
    if not task.granted_us or task.claimed_us < task.granted_us:
        return None
    return (task.claimed_us - task.granted_us) / 1000


def _first_ms(task: TaskTrace, _end_us: int) -> float | None:
    if not task.claimed_us or task.first_us < task.claimed_us:
        return None
    return (task.first_us - task.claimed_us) / 1000


def _then_ms(task: TaskTrace, end_us: int) -> float | None:
    return ((task.finished_us or end_us) - task.first_us) / 1000 if task.first_us else None


_TIMES: dict[str, Callable[[TaskTrace, int], float | None]] = {
    "Waited for a worker": _waited_ms,
    "To first output": _first_ms,
    "Then": _then_ms,
}
