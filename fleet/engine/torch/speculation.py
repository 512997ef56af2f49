"""Speculation in the batch loop: which drafts a pass verifies. It decides about speed only; answers do not depend on it.

A pass computes the known rows of its requests and those of their drafts. The number of drafts follows from measured times: a
draft is worth its row if the share of drafts that is accepted there outweighs the time that a row adds.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from fleet.core.errors import BadInput
from fleet.core.ids import RequestId
from fleet.core.speculation_figures import OFF, SpeculationFigures
from fleet.engine.torch.drafters import AskedDraft, ComputedRows, Drafter
from fleet.engine.torch.kv_pool import KVPool
from fleet.engine.torch.layout import Extent
from fleet.engine.torch.pass_queue import FAILURES, PassEntry
from fleet.engine.torch.passes import PassDone, is_due
from fleet.engine.torch.program import DraftedTask, TaskT

log = logging.getLogger(__name__)

WEIGHT, RARE_WEIGHT = 0.1, 0.5
"""Weight of a new measure in the averages, and of one that is taken now and then only."""
FIRST_SHARE = 0.7
"""Share of drafts that is assumed to be accepted, per position, before there are measures."""
FEWEST_MEASURES = 3
MAX_FAILURE_LEN = 200
FIRST_INTERVAL, LAST_INTERVAL = 32, 256
"""Passes after which the alternative is measured again; more each time that it confirms the choice."""


@dataclass(slots=True)
class _Average:
    value: float = 0.0
    num_measures: int = 0

    @property
    def is_known(self) -> bool:
        return self.num_measures >= FEWEST_MEASURES

    def add(self, value: float, weight: float) -> None:
        self.num_measures += 1
        self.value += (value - self.value) * max(weight, 1 / self.num_measures)


@dataclass(slots=True)
class PassCosts:
    """Times of decode passes of one number of requests: without drafts, and what one draft adds.

    `num_same`: passes since the alternative was measured; `interval`: after which it is measured again.
    """

    plain_s: _Average = field(default_factory=_Average)
    draft_s: _Average = field(default_factory=_Average)
    drafted: bool = False
    num_same: int = 0
    interval: int = FIRST_INTERVAL

    def add(self, num_drafts: int, seconds: float) -> None:
        weight = WEIGHT if (num_drafts > 0) == self.drafted else RARE_WEIGHT
        if not num_drafts:
            self.plain_s.add(seconds, weight)
        elif self.plain_s.is_known:
            self.draft_s.add((seconds - self.plain_s.value) / num_drafts, weight)

    def choice(self, tokens: Sequence[float], drafts: Sequence[int]) -> int:
        """Return the best number of drafts for each request.

        `tokens`: expected of a pass for each such number from 0 on; `drafts`: of all requests together.
        """
        if not self.plain_s.is_known:
            return 0
        if not self.draft_s.is_known:
            return len(drafts) - 1
        times = [self.plain_s.value + max(0.0, self.draft_s.value) * number for number in drafts]
        best = max(range(len(drafts)), key=lambda number: tokens[number] / times[number])
        return self._or_alternative(best, len(drafts) - 1)

    def _or_alternative(self, best: int, most: int) -> int:
        """Return now and then the alternative to the choice, so that its time stays known."""
        if (best > 0) != self.drafted:
            self.drafted, self.num_same, self.interval = best > 0, 0, FIRST_INTERVAL
        self.num_same += 1
        if self.num_same < self.interval:
            return best
        self.num_same, self.interval = 0, min(2 * self.interval, LAST_INTERVAL)
        return 0 if best else most


class Speculation:
    """The drafts of the requests of one batch loop. Not thread-safe.

    `drafters`: by name; `OFF` is none of them. `most`: drafts of one request in a pass. `follows_times`: False to verify every
    draft.
    """

    def __init__(self, drafters: Mapping[str, Drafter], name: str, most: int, *, follows_times: bool = True) -> None:
        self._drafters, self._most, self.follows_times = drafters, most, follows_times
        self._version = 0
        self.use(name)

    def use(self, name: str) -> None:
        """Draft with another drafter from the next pass on; its counts begin at 0. Raises: BadInput for an unknown name."""
        if name != OFF and name not in self._drafters:
            raise BadInput(f"drafter: {name!r} is none of {', '.join((OFF, *self._drafters))}", param="drafter")
        self._failed = self._failure = ""
        for drafter in self._drafters.values():
            drafter.forget_requests()
        self._name, self._drafter, most = name, self._drafters.get(name), self._most
        self._costs: dict[int, PassCosts] = {}
        self._shares = [FIRST_SHARE ** (number + 1) for number in range(most)]
        self._num_drafted, self._num_accepted = [0] * most, [0] * most
        self._num_draws, self._drafting_s = 0, 0.0

    def drafter_of(self, name: str) -> Drafter | None:
        return self._drafters.get(name)

    @property
    def reads_features(self) -> bool:
        """True if the drafter in use reads the rows of passes."""
        return self._drafter is not None and self._drafter.reads_features

    def on_new_head(self, version: int) -> None:
        """Begin to count again, for another version of the draft head. A drafter that failed is used again with it."""
        self._version = version
        self.use(self._failed or self._name)

    def _end_drafting(self, error: BaseException) -> None:
        """Draft no more: an error of a drafter must not fail the requests of a pass."""
        failed = self._name
        log.error("%s failed, and no drafts are made any more: %s", failed, error, exc_info=error)
        self.use(OFF)
        self._failed, self._failure = failed, f"{type(error).__name__}: {error}"[:MAX_FAILURE_LEN]

    def with_drafts(self, entries: Sequence[tuple[RequestId, PassEntry[TaskT]]], pool: KVPool) -> list[PassEntry[TaskT]]:
        """Return the entries of a pass, with drafts after the rows from which a token is drawn.

        Pages for drafts are allocated as far as they are free; none is taken from another request for them.
        """
        drafted = [entry for _, entry in entries]
        if self._drafter is None:
            return drafted
        due = [at for at, entry in enumerate(drafted) if is_due(entry.task, entry.extent)]
        asked = [self._asked(*entries[at]) for at in due]
        try:
            found = self._drafts(self._drafter, asked)
        except FAILURES as error:
            self._end_drafting(error)
            return drafted
        for at, drafts in zip(due, found, strict=True):
            extent = drafted[at].extent
            stop = extent.stop + len(drafts)
            if drafts and pool.grow(extent.table, stop):
                extent = Extent(table=extent.table, start=extent.start, stop=stop, drafts=tuple(drafts))
                drafted[at] = PassEntry(task=drafted[at].task, extent=extent)
        return drafted

    def _asked(self, request: RequestId, entry: PassEntry[TaskT]) -> AskedDraft:
        task = cast(DraftedTask, entry.task)
        return AskedDraft(request=request, task=task, table=entry.extent.table, most=min(task.most_drafts, self._most))

    def _drafts(self, drafter: Drafter, asked: Sequence[AskedDraft]) -> Sequence[Sequence[int]]:
        """Return the drafts of each request that are worth their time."""
        began_s = time.monotonic()
        most = [each.most for each in asked]
        if drafter.costs_time and self.follows_times:
            longest = self._choose(most) if any(most) else 0
            asked = [replace(each, most=min(each.most, longest)) for each in asked]
        found = drafter.propose(asked) if any(each.most for each in asked) else [()] * len(asked)
        if not drafter.costs_time and self.follows_times and any(found):
            longest = self._choose(list(map(len, found)))
            found = [drafts[:longest] for drafts in found]
        self._drafting_s = time.monotonic() - began_s if drafter.costs_time else 0.0
        return found

    def _choose(self, most: Sequence[int]) -> int:
        """Return the number of drafts of each request up to which they are worth their time."""
        lengths = [[min(length, number) for length in most] for number in range(max(most) + 1)]
        tokens = [len(most) + sum(sum(self._shares[:length]) for length in each) for each in lengths]
        return self._costs.setdefault(len(most), PassCosts()).choice(tokens, [sum(each) for each in lengths])

    def record(self, entries: Sequence[tuple[RequestId, PassEntry[TaskT]]], done: PassDone, seconds: float) -> None:
        """Count the results of a pass, and its time if it computed one known row of each request."""
        extents = [entry.extent for _, entry in entries]
        for extent in extents:
            if id(extent) in done.drawn:
                self._count(len(extent.drafts), len(extent.drafts) - done.num_rejected(extent))
        if all(extent.num_rows - len(extent.drafts) == 1 for extent in extents):
            num_drafts = sum(len(extent.drafts) for extent in extents)
            self._costs.setdefault(len(extents), PassCosts()).add(num_drafts, seconds + self._drafting_s)
        if self._drafter is not None and done.features:
            computed = [_computed(request, entry, done) for request, entry in entries if _has_features(entry, done)]
            try:
                self._drafter.on_computed(computed)
            except FAILURES as error:
                self._end_drafting(error)

    def _count(self, num_drafts: int, num_accepted: int) -> None:
        self._num_draws += 1
        for number in range(num_drafts):
            is_accepted = number < num_accepted
            self._num_drafted[number] += 1
            self._num_accepted[number] += is_accepted
            self._shares[number] += WEIGHT * (is_accepted - self._shares[number])

    def close(self, request: RequestId, task: DraftedTask, *, complete: bool) -> None:
        """Forget a request; an answer that is complete may serve for later drafts."""
        if self._drafter is not None:
            self._drafter.close(request, task, complete=complete)

    def figures(self) -> SpeculationFigures:
        return SpeculationFigures(
            drafter=self._name, num_draws=self._num_draws, drafted=tuple(self._num_drafted),
            accepted=tuple(self._num_accepted), version=self._version, failed=self._failed, failure=self._failure,
        )  # fmt: skip


def _has_features(entry: PassEntry[TaskT], done: PassDone) -> bool:
    """Return True for rows that are valid, and that no captured step computed."""
    return not entry.is_void and id(entry.extent) in done.features


def _computed(request: RequestId, entry: PassEntry[TaskT], done: PassDone) -> ComputedRows:
    extent, num_rejected = entry.extent, done.num_rejected(entry.extent)
    features_NT = done.features[id(extent)]
    return ComputedRows(
        request=request, task=cast(DraftedTask, entry.task), table=extent.table, start=extent.start,
        stop=extent.stop - num_rejected, features_NT=features_NT[: len(features_NT) - num_rejected],
    )  # fmt: skip
