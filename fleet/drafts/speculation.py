"""Speculation in the batch loop: decides which drafts a step verifies. Affects speed only; answers
do not depend on it.

A step computes the known rows of its requests and the rows of their drafts. The number of drafts
follows from measured times: a draft is worth its row if the share of drafts accepted at its
position outweighs the time that a row adds.
"""

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul
from typing import cast

import msgspec

from fleet.core.errors import BadInput
from fleet.core.ids import RequestId
from fleet.drafts.choice import DrafterChoice, Gain
from fleet.drafts.drafters import AskedDraft, ComputedRows, Drafter
from fleet.drafts.figures.speculation import AUTO, EAGLE3, OFF, SUFFIX, SpeculationFigures
from fleet.drafts.figures.training import DraftVersion
from fleet.drafts.pass_costs import WEIGHT, Average, PassCosts, bucket_of
from fleet.engine.torch.drafting import Drafting
from fleet.engine.torch.kv_pool import KVPool
from fleet.engine.torch.pass_queue import FAILURES, PassEntry
from fleet.engine.torch.passes import PassDone, is_due
from fleet.engine.torch.program import DraftedTask, TaskT

log = logging.getLogger(__name__)

FIRST_RATE, FIRST_WEIGHT = 0.7, 10
"""Assumed acceptance rate of a draft whose predecessors were accepted, and the number of
measurements that this assumption counts as.
"""
RATE_WEIGHT = 0.02
"""Weight of a new measurement in an acceptance rate: low, since a single draft is either accepted
or not.
"""
MAX_FAILURE_LEN = 200
COMPARED = (SUFFIX, EAGLE3)
"""Drafters that `auto` compares."""
REST = 8
"""If the guesses of `REST` steps in a row, with a similar number of requests, were not worth their
time, the drafter is used only in every `REST`-th step from then on.
"""
LEAST_LEFT = 0.25
"""Fewest tokens that an answer is assumed to have left, as a share of the average answer length."""
MOST_EARLY_PASSES = 512
"""Steps after which a drafter is measured even if it has not read the first rows of some requests.
"""


@dataclass(slots=True)
class _Measured:
    """Measurements of the steps with one drafter. Lists are indexed by a draft's position.

    `rates`: acceptance rates of drafts whose predecessors were accepted, so that the expectation
    for a position that is not drafted at present follows the rates before it. `num_draws`: sampled
    tokens without the accepted drafts, at most one per request and step.
    """

    rates: list[Average]
    num_drafted: list[int]
    num_accepted: list[int]
    costs: PassCosts
    num_draws: int = 0
    gain: Gain = field(default_factory=Gain)

    @classmethod
    def nothing(cls, rates: list[Average], costs: PassCosts) -> "_Measured":
        return cls(rates, [0] * len(rates), [0] * len(rates), costs)

    def count(self, num_drafts: int, num_accepted: int) -> None:
        self.num_draws += 1
        for number in range(num_drafts):
            is_accepted = number < num_accepted
            self.num_drafted[number] += 1
            self.num_accepted[number] += is_accepted
            if number <= num_accepted:
                self.rates[number].add(is_accepted, RATE_WEIGHT)

    def num_expected(self, length: int) -> float:
        """Return the number of accepted drafts that is expected of `length` drafts."""
        return sum(accumulate((rate.value for rate in self.rates[:length]), mul))


class Speculation(Drafting):
    """Speculative decoding for one batch loop: adds drafts to steps, and measures their use. Not
    thread-safe.

    `drafters`: drafters by name. `name`: the drafter to use, `OFF` for none, `AUTO` for the fastest
    at present. `most`: most drafts of one request in a step. `follows_times`: False to verify every
    draft, whatever it costs.
    """

    def __init__(
        self, drafters: Mapping[str, Drafter], name: str, most: int, *, follows_times: bool = True
    ) -> None:
        self._drafters = drafters
        self._most = most
        self.follows_times = follows_times
        self._costs = {each: PassCosts() for each in (OFF, *drafters)}
        self._answer_tokens = Average()
        self._rates = {each: self._first_rates() for each in (OFF, *drafters)}
        self._useless = {each: Counter[int]() for each in (OFF, *drafters)}
        """By drafter and number of requests: steps in a row whose guesses were not worth their
        time; see `REST`.
        """
        self._version: DraftVersion | None = None
        self.use(name)

    def _first_rates(self) -> list[Average]:
        return [Average(FIRST_RATE, FIRST_WEIGHT) for _ in range(self._most)]

    def use(self, name: str) -> None:
        """Use another drafter from the next step on. Counts restart at 0; step times, acceptance
        rates and useless steps stay known.

        Raises: BadInput if the name is unknown.
        """
        known = (OFF, *self._drafters, AUTO)
        if name not in known:
            raise BadInput(f"drafter: {name!r} is none of {', '.join(known)}", param="drafter")
        self._failed = self._failure = ""
        self._measured = {
            each: _Measured.nothing(self._rates[each], costs) for each, costs in self._costs.items()
        }
        self._drafting_s = 0.0
        self._choice: DrafterChoice | None = None
        if name == AUTO:
            self._compare()
        else:
            self._switch(name)

    def _compare(self) -> None:
        """Start a comparison of the drafters that can draft and have not failed."""
        able = [
            each
            for each in COMPARED
            if each in self._drafters and each != self._failed and self._drafters[each].can_draft
        ]
        self._choice = DrafterChoice(able)
        self._switch(self._choice.name)

    def _switch(self, name: str) -> None:
        """Use another drafter from now on, whose earlier counts continue. All drafters forget their
        requests.
        """
        for drafter in self._drafters.values():
            drafter.forget_requests()
        self._name = name
        self._drafter = self._drafters.get(name)
        self._own = self._measured[name]
        self._early: set[RequestId] | None = None
        self._num_early_passes = 0

    def drafter_of(self, name: str) -> Drafter | None:
        return self._drafters.get(name)

    @property
    def reads_features(self) -> bool:
        """True if the drafter in use reads hidden states of steps."""
        return self._drafter is not None and self._drafter.reads_features

    def on_new_head(self, version: DraftVersion | None) -> None:
        """Restart the counts and the draft head's acceptance rates, for another version of the
        head; None is the head with which the stage started. A drafter that had failed is used
        again.
        """
        self._version = version
        self._rates[EAGLE3] = self._first_rates()
        self.use(AUTO if self._choice is not None else self._failed or self._name)

    def _end_drafting(self, error: BaseException) -> None:
        """Stop using the present drafter after an error, so that requests continue: without drafts
        or, with `AUTO`, with the fastest of the other drafters.
        """
        failed = self._name
        log.error("%s failed, and makes no drafts any more: %s", failed, error, exc_info=error)
        self._failed, self._failure = failed, f"{type(error).__name__}: {error}"[:MAX_FAILURE_LEN]
        if self._choice is not None:
            self._compare()
        else:
            self._switch(OFF)

    def with_drafts(
        self, entries: Sequence[tuple[RequestId, PassEntry[TaskT]]], pool: KVPool
    ) -> list[PassEntry[TaskT]]:
        """Return the entries of a step, with drafts appended to each entry after which a token is
        sampled.

        Drafts get only pages that are free; no other request loses pages for them.
        """
        drafted = [entry for _, entry in entries]
        if self._drafter is None:
            return drafted
        due = [at for at, entry in enumerate(drafted) if is_due(entry.task, entry.extent)]
        asked = [self._asked(*entries[at]) for at in due]
        try:
            found = self._drafts(
                self._drafter, asked, is_timed=all(entry.extent.num_rows == 1 for entry in drafted)
            )
        except FAILURES as error:
            self._end_drafting(error)
            return drafted
        for at, drafts in zip(due, found, strict=True):
            extent = drafted[at].extent
            stop = extent.stop + len(drafts)
            if drafts and pool.grow(extent.table, stop):
                extent = msgspec.structs.replace(extent, stop=stop, drafts=tuple(drafts))
                drafted[at] = PassEntry(task=drafted[at].task, extent=extent)
        return drafted

    def _asked(self, request: RequestId, entry: PassEntry[TaskT]) -> AskedDraft:
        task = cast(DraftedTask, entry.task)
        return AskedDraft(
            request=request,
            task=task,
            table=entry.extent.table,
            most=min(task.most_drafts, self._most),
        )

    def _drafts(
        self, drafter: Drafter, asked: Sequence[AskedDraft], *, is_timed: bool
    ) -> Sequence[Sequence[int]]:
        """Return, for each request, the drafts that are worth their time. `is_timed`: True if the
        time of the step will be counted.
        """
        began_s = time.monotonic()
        most = [each.most for each in asked]
        if drafter.costs_time and self.follows_times:
            longest = (
                self._choose(most, self._backlog_s_of_token(drafter, asked), is_timed=is_timed)
                if any(most)
                else 0
            )
            asked = [replace(each, most=min(each.most, longest)) for each in asked]
        proposes = any(each.most for each in asked) and not self._rests(len(asked))
        found = drafter.propose(asked) if proposes else [()] * len(asked)
        if not drafter.costs_time and self.follows_times and any(found):
            longest = self._choose(list(map(len, found)), is_timed=is_timed)
            found = [drafts[:longest] for drafts in found]
            self._note_guesses(bucket_of(len(asked)), are_useful=longest > 0)
        self._drafting_s = time.monotonic() - began_s
        return found

    def _rests(self, num_requests: int) -> bool:
        """Return True if the drafter is not used in this step, since its guesses are not worth
        their time at present; see `REST`. Called once per step, since such steps are counted.
        """
        size, useless = bucket_of(num_requests), self._useless[self._name]
        num_useless = useless[size]
        if num_useless < REST:
            return False
        useless[size] += 1
        if num_useless % REST == 0:
            return False
        self._own.costs.count_plain(num_requests)
        return True

    def _note_guesses(self, size: int, *, are_useful: bool) -> None:
        useless = self._useless[self._name]
        if are_useful:
            useless[size] = 0
        elif useless[size] < REST:
            useless[size] += 1

    def _choose(self, most: Sequence[int], token_s: float = 0.0, *, is_timed: bool) -> int:
        """Return the number of drafts per request that is worth its time.

        `most`: most drafts of each request. `token_s`: additional time per token if drafts are
        made.
        """
        lengths = [[min(length, number) for length in most] for number in range(max(most) + 1)]
        expected = [self._own.num_expected(length) for length in range(max(most) + 1)]
        tokens = [len(most) + sum(expected[length] for length in each) for each in lengths]
        return self._own.costs.choice(
            len(most), tokens, [sum(each) for each in lengths], token_s, is_timed=is_timed
        )

    def _backlog_s_of_token(self, drafter: Drafter, asked: Sequence[AskedDraft]) -> float:
        """Return the time to read the drafter's backlog, divided by the tokens that the requests
        are expected to have left.
        """
        if not asked or not self._answer_tokens.is_known:
            return 0.0
        average = self._answer_tokens.value
        num_left = sum(
            max(average - len(each.task.answer_ids), average * LEAST_LEFT) for each in asked
        )
        return drafter.expected_backlog_s(asked) / num_left

    def record(
        self, entries: Sequence[tuple[RequestId, PassEntry[TaskT]]], done: PassDone, seconds: float
    ) -> None:
        """Count the drafts that a step accepted, and the step's time if it computed one known row
        for each request (a decode step).
        """
        extents = [entry.extent for _, entry in entries]
        num_tokens = 0
        for extent in extents:
            if id(extent) in done.drawn:
                num_accepted = len(extent.drafts) - done.num_rejected(extent)
                num_tokens += 1 + num_accepted
                self._own.count(len(extent.drafts), num_accepted)
        own, took_s = self._own, seconds + self._drafting_s + self._read(entries, done)
        self._drafting_s = 0.0
        if own is self._own and all(
            extent.num_rows - len(extent.drafts) == 1 for extent in extents
        ):
            num_drafts = sum(len(extent.drafts) for extent in extents)
            self._add_time([request for request, _ in entries], num_tokens, num_drafts, took_s)

    def _read(self, entries: Sequence[tuple[RequestId, PassEntry[TaskT]]], done: PassDone) -> float:
        """Let the drafter read the rows of a step; return how long that took, in seconds."""
        if self._drafter is None or not self._drafter.reads_features or not done.features:
            return 0.0
        began_s = time.monotonic()
        computed = [
            _computed(request, entry, done)
            for request, entry in entries
            if _has_features(entry, done)
        ]
        try:
            self._drafter.on_computed(computed)
        except FAILURES as error:
            self._end_drafting(error)
        return time.monotonic() - began_s

    def _add_time(
        self, requests: Sequence[RequestId], num_tokens: int, num_drafts: int, seconds: float
    ) -> None:
        """Count the time of a decode step; with `AUTO`, switch to another drafter if the choice
        changes.
        """
        backlog_s = self._drafter.backlog_s if self._drafter is not None and num_drafts else 0.0
        self._own.costs.add(len(requests), num_drafts, seconds - backlog_s, backlog_s)
        plain_s = self._own.costs.plain_s(len(requests))
        if self._choice is None and plain_s is not None:
            self._own.gain.add(plain_s * num_tokens / len(requests), seconds)
        elif self._choice is not None and self._is_measurable(requests):
            self._choice.add(len(requests), num_tokens, seconds)
            if self._choice.name != self._name:
                log.info(
                    "drafts by %s from now on; measured gains: %s",
                    self._choice.name,
                    self._choice.gains or "none yet",
                )
                self._switch(self._choice.name)

    def _is_measurable(self, requests: Sequence[RequestId]) -> bool:
        """Return False while the drafter in use reads hidden states and a request runs that began
        earlier, for which its drafts are worse; True after `MOST_EARLY_PASSES` steps at the latest.
        """
        if not self.reads_features:
            return True
        if self._early is None:
            self._early = set(requests)
        self._num_early_passes += 1
        return self._num_early_passes > MOST_EARLY_PASSES or self._early.isdisjoint(requests)

    def close(self, request: RequestId, task: DraftedTask, *, complete: bool) -> None:
        """Forget a request. If its answer is `complete`, the drafter in use learns from it; with
        `AUTO`, all drafters do.
        """
        if self._early is not None:
            self._early.discard(request)
        if complete and task.answer_ids:
            self._answer_tokens.add(len(task.answer_ids), WEIGHT)
        compared = self._drafters.values() if self._choice is not None else ()
        for drafter in compared or filter(None, [self._drafter]):
            drafter.close(request)
            if complete:
                drafter.learn(task.prompt_ids, task.answer_ids)

    def figures(self) -> SpeculationFigures:
        own = self._own
        gains = {self._name: own.gain.value} if own.gain.num_passes else {}
        if self._choice is not None:
            gains = self._choice.gains
        return SpeculationFigures(
            drafter=self._name,
            automatic=self._choice is not None,
            num_draws=own.num_draws,
            drafted=tuple(own.num_drafted),
            accepted=tuple(own.num_accepted),
            gains={name: gain for name, gain in gains.items() if name != OFF},
            version=self._version.number if self._version is not None else 0,
            head_sha256=self._version.sha256 if self._version is not None else "",
            failed=self._failed,
            failure=self._failure,
        )


def _has_features(entry: PassEntry[TaskT], done: PassDone) -> bool:
    """Return True if an entry is valid and its hidden states are available (not from a captured
    CUDA graph).
    """
    return not entry.is_void and id(entry.extent) in done.features


def _computed(request: RequestId, entry: PassEntry[TaskT], done: PassDone) -> ComputedRows:
    extent, num_rejected = entry.extent, done.num_rejected(entry.extent)
    features_NT = done.features[id(extent)]
    return ComputedRows(
        request=request,
        task=cast(DraftedTask, entry.task),
        table=extent.table,
        start=extent.start,
        stop=extent.stop - num_rejected,
        features_NT=features_NT[: len(features_NT) - num_rejected],
    )
