"""What the slow answers of a list have in common, which the others do not have. Pure."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fleet.core.ids import WorkerId, role_of
from fleet.telemetry.trace import RequestRow

MIN_SLOW, MIN_OTHERS = 5, 5
"""Least numbers of slow and of other answers from which a common cause is concluded."""
MIN_SHARE, MAX_OTHER_SHARE = 0.7, 0.35
"""Least share of the slow answers that have something in common, and largest share of the others
that have it too.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cohort:
    """Something that slow answers have in common: `what` is worker, role or code, `name` its value.
    `num_sharing` of `num_slow` slow answers have it, and `num_others_sharing` of `num_others`
    others.
    """

    what: str
    name: str
    num_sharing: int
    num_slow: int
    num_others_sharing: int
    num_others: int


Trait = tuple[str, str]


def find_cohort(slow: Sequence[RequestRow], others: Sequence[RequestRow]) -> Cohort | None:
    """Return what most of the slow answers and few of the others have in common; None if there is
    no such thing, or too few answers to tell. Of several, the one that the fewest others have.
    """
    if len(slow) < MIN_SLOW or len(others) < MIN_OTHERS:
        return None
    ours, theirs = _count(slow), _count(others)
    common = [
        trait
        for trait, count in ours.items()
        if count >= MIN_SHARE * len(slow) and theirs[trait] <= MAX_OTHER_SHARE * len(others)
    ]
    if not common:
        return None
    what, name = min(common, key=lambda trait: (theirs[trait], -ours[trait], trait[0] != "worker"))
    return Cohort(
        what=what,
        name=name,
        num_sharing=ours[what, name],
        num_slow=len(slow),
        num_others_sharing=theirs[what, name],
        num_others=len(others),
    )


def _count(rows: Iterable[RequestRow]) -> Counter[Trait]:
    return Counter(trait for row in rows for trait in set(_traits_of(row)))


def _traits_of(row: RequestRow) -> Iterator[Trait]:
    for task in row.tasks:
        if task.worker:
            yield "worker", task.worker
            yield "role", role_of(WorkerId(task.worker))
    if row.code:
        yield "code", row.code
