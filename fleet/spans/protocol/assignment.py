"""Choice of the span worker for each span of a route. Pure."""

from collections.abc import Mapping, Sequence

from fleet.core.ids import WorkerId


def assign_spans(wanted: Sequence[str], hosted: Mapping[WorkerId, str]) -> list[WorkerId | None]:
    """Return a worker for each wanted span, None where there are too few.

    `hosted`: the span that each free worker has loaded, "" for none; of equal ones, the first is
    chosen. A worker keeps its span where that is wanted; then those without a span load one, and
    last those that have another one.
    """
    chosen: list[WorkerId | None] = [None] * len(wanted)
    free = dict(hosted)

    def choose(accepts: "dict[WorkerId, str]", number: int) -> None:
        worker = next(iter(accepts), None)
        if worker is not None:
            chosen[number] = worker
            del free[worker]

    for number, span in enumerate(wanted):
        choose({worker: its for worker, its in free.items() if its == span}, number)
    for number in [number for number, worker in enumerate(chosen) if worker is None]:
        choose({worker: its for worker, its in free.items() if not its} or free, number)
    return chosen
