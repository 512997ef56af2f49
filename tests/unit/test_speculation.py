"""Choice of the number of draft tokens per step by measured times; a function gives the simulated
steps' times, and drafting takes none.
"""

import random
from collections.abc import Callable, Sequence
from itertools import takewhile
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fleet.core.errors import BadInput
from fleet.core.ids import RequestId
from fleet.drafts.drafters import AskedDraft, Drafter, NgramDrafter
from fleet.drafts.figures.speculation import (
    EAGLE3,
    OFF,
    SpeculationFigures,
)
from fleet.drafts.pass_costs import (
    BUCKETS,
    FEWEST_BETWEEN,
    FEWEST_MEASURES,
    PassCosts,
    PassTimes,
    bucket_of,
)
from fleet.drafts.speculation import REST, Speculation
from fleet.engine.torch.kv_pool import KVPool, PageTable
from fleet.engine.torch.layout import Extent
from fleet.engine.torch.pass_queue import PassEntry
from fleet.engine.torch.passes import PassDone
from fleet.telemetry.vitals import Vitals

NUM_PASSES, MOSTLY = 4000, 0.96
"""Number of simulated steps, and the share that must use the best number of drafts: every 32nd step
may measure another number, where that wastes little time.
"""


@pytest.fixture(autouse=True)
def no_time_for_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let drafting take no time: a busy machine would decide which number is best."""
    monkeypatch.setattr("fleet.drafts.speculation.time", SimpleNamespace(monotonic=lambda: 0.0))


def chosen(
    seconds: Callable[[int], float], share: float, most: int = 3, token_s: float = 0.0
) -> list[int]:
    """Return the number of draft tokens in each simulated step of one request, where each draft
    token is accepted with probability `share`.

    `token_s`: prompt time for each token of the answer.
    """
    costs, numbers = PassCosts(), list[int]()
    tokens = [sum(share**number for number in range(count + 1)) for count in range(most + 1)]
    for _ in range(NUM_PASSES):
        numbers.append(costs.choice(1, tokens, list(range(most + 1)), token_s))
        costs.add(1, numbers[-1], seconds(numbers[-1]))
    return numbers


def test_drafts_are_verified_where_rows_cost_little() -> None:
    numbers = chosen(lambda drafts: 1.0 + 0.05 * drafts, share=0.6)
    assert numbers[:FEWEST_MEASURES] == [0] * FEWEST_MEASURES
    assert sum(number == 3 for number in numbers) > MOSTLY * NUM_PASSES


def test_no_drafts_are_verified_where_rows_cost_as_much_as_passes() -> None:
    numbers = chosen(lambda drafts: 1.0 + drafts, share=0.6)
    assert sum(number > 0 for number in numbers) < 0.02 * NUM_PASSES


@pytest.mark.parametrize(("token_s", "best"), [(0.1, 3), (0.6, 0)])
def test_time_for_prompts_counts_where_drafts_are_made(token_s: float, best: int) -> None:
    numbers = chosen(lambda drafts: 1.0 + 0.05 * drafts, share=0.6, token_s=token_s)
    assert sum(number == best for number in numbers) > MOSTLY * NUM_PASSES


def test_fewer_drafts_are_verified_where_later_ones_are_rarely_right() -> None:
    numbers = chosen(lambda drafts: 1.0 + 0.3 * drafts, share=0.5)
    assert numbers[-1] == 1


def test_choice_follows_times_that_change() -> None:
    costs, tokens = PassCosts(), [1.0, 1.6, 1.96, 2.2]
    per_draft, last = 1.0, list[int]()
    for number in range(2 * NUM_PASSES):
        if number == NUM_PASSES:
            per_draft = 0.05
        count = costs.choice(1, tokens, [0, 1, 2, 3])
        costs.add(1, count, 1.0 + per_draft * count)
        last.append(count)
    assert max(last[NUM_PASSES - 20 : NUM_PASSES - 10]) <= 3 and last[-1] == 3
    assert (
        next(at for at in range(NUM_PASSES, len(last)) if last[at : at + 10] == [3] * 10)
        < NUM_PASSES + 40 * FEWEST_BETWEEN
    )


def test_measures_that_take_longer_than_estimated_are_rarer() -> None:
    """Measurements that take longer than estimated become rarer. Drafts are not worthwhile here: a
    step with drafts after many without takes long, since the head first reads its backlog, and the
    estimates of several batch sizes do not know that.
    """
    costs, without, lost_s, best_s = PassCosts(), 0, 0.0, 0.0
    for number in range(NUM_PASSES):
        size = 9 + number % 8
        tokens, drafts = (
            [size * each for each in (1.0, 1.3, 1.4, 1.45)],
            [size * count for count in range(4)],
        )
        count = costs.choice(size, tokens, drafts)
        rows, plain_s = size + drafts[count], 0.014
        seconds = 0.008 + 0.006 * -(-rows // 16) + (0.06 if count and without > 8 else 0.0)
        without = 0 if count else without + 1
        costs.add(size, drafts[count], seconds)
        best_s += plain_s
        lost_s += seconds - plain_s * tokens[count] / size
    assert 0 < lost_s < 0.016 * best_s


def test_rows_that_a_head_reads_late_do_not_hide_that_drafts_are_worth_their_time() -> None:
    """A head's backlog does not hide that drafts are worth their time: only the first of several
    steps with drafts reads it.
    """
    costs, numbers = PassCosts(), [0]
    for _ in range(FEWEST_MEASURES):
        costs.add(1, 3, 4.0)
    for _ in range(NUM_PASSES):
        number = costs.choice(1, [1.0, 1.8, 2.44, 2.95], [0, 1, 2, 3])
        costs.add(1, number, 1 + 0.05 * number, 5.0 if number and not numbers[-1] else 0.0)
        numbers.append(number)
    assert numbers[-NUM_PASSES // 4 :].count(3) >= MOSTLY * NUM_PASSES / 4


def test_other_numbers_are_tried_only_in_timed_passes() -> None:
    costs = PassCosts()
    for _ in range(FEWEST_MEASURES):
        costs.add(1, 0, 1.0)
        costs.add(1, 1, 1.1)
    tokens = [1.0, 1.05]
    assert not any(costs.choice(1, tokens, [0, 1], is_timed=False) for _ in range(NUM_PASSES))
    assert any(costs.choice(1, tokens, [0, 1]) for _ in range(NUM_PASSES))


def test_all_drafts_are_verified_where_only_the_first_one_costs_time() -> None:
    """All drafts are verified if only the first costs time: a step with drafts takes longer by a
    constant, so that a step that verifies few drafts never seems worthwhile.
    """
    numbers = chosen(lambda drafts: 1.0 + 0.5 * (drafts > 0), share=0.8)
    assert sum(number == 3 for number in numbers) > MOSTLY * NUM_PASSES


def test_times_of_one_number_of_requests_serve_for_another() -> None:
    """Times measured with one number of requests serve for another: the time of a step with many
    rows is known from many requests, and need not be measured again for few.
    """
    costs = PassCosts()
    for number in range(60):
        drafts = costs.choice(16, [16.0, 25.6, 31.4], [0, 16, 32])
        costs.add(16, 16 * drafts, 1.0 + 0.1 * 16 * drafts)
        assert drafts == 0 or number < 2 * FEWEST_MEASURES
    costs.add(1, 0, 0.5)
    assert costs.choice(1, [1.0, 1.6, 1.96], [0, 1, 2]) > 0


def test_time_of_a_number_is_between_those_that_are_known() -> None:
    times = PassTimes()
    assert times.of(3) is None
    for _ in range(FEWEST_MEASURES):
        times.add(2, 1.0)
    times.add(6, 9.0)
    assert times.of(1) == times.of(3) == times.of(7) == 1.0, "one measure is not enough"
    for _ in range(FEWEST_MEASURES):
        times.add(6, 9.0)
    assert (times.of(1), times.of(2), times.of(3), times.of(6), times.of(9)) == (
        1.0,
        1.0,
        3.0,
        9.0,
        9.0,
    )


def test_numbers_of_rows_count_as_the_next_lower_one_that_is_kept() -> None:
    assert [bucket_of(number) for number in (0, 1, 7, 8, 9, 17, 35, 36, 1000)] == [
        0,
        1,
        7,
        8,
        8,
        16,
        32,
        36,
        BUCKETS[-1],
    ]


class CountedGuesses(Drafter):
    """Drafter double that proposes three tokens at each call."""

    num_asked = 0

    def propose(self, asked: Sequence[AskedDraft]) -> list[Sequence[int]]:
        self.num_asked += 1
        return [(1, 2, 3)] * len(asked)

    def close(self, request: RequestId) -> None:
        pass

    def forget_requests(self) -> None:
        pass


class BacklogGuesses(CountedGuesses):
    """Drafter double with a backlog of 6 s in each step."""

    costs_time = True

    def propose(self, asked: Sequence[AskedDraft]) -> list[Sequence[int]]:
        return [(1, 2, 3)[: each.most] for each in asked]

    def expected_backlog_s(self, asked: Sequence[AskedDraft]) -> float:
        return 6.0


class Growing:
    """A task that grows by one row per step, and a pool that has pages for it."""

    num_rows, wants_draw, most_drafts = 1, True, 3
    prompt_ids: Sequence[int] = ()

    def __init__(self, num_tokens: int = 0) -> None:
        """Create the task and its pool. `num_tokens`: number of tokens that the task's answer
        already has.
        """
        self.answer_ids = [1] * num_tokens

    def grow(self, table: object, num_rows: int) -> bool:
        return True


def run_passes(
    speculation: Speculation,
    number: int,
    *,
    is_right: Callable[[], bool],
    draft_s: float,
    num_requests: int = 1,
    num_tokens: int = 0,
) -> list[int]:
    """Run `number` steps; return the number of draft tokens in each.

    A step takes 1 s, and `draft_s` more for each draft token. `is_right`: whether the next draft
    token is accepted. `num_tokens`: number of tokens that every answer has before the first step.
    """
    task, drafts = cast(Any, Growing(num_tokens)), list[int]()
    requests = [RequestId(f"r{request}") for request in range(num_requests)]
    for _ in range(number):
        entries: list[tuple[RequestId, PassEntry[Any]]] = [
            (
                request,
                PassEntry(task=task, extent=Extent(table=cast(PageTable, None), start=0, stop=1)),
            )
            for request in requests
        ]
        entries = list(
            zip(requests, speculation.with_drafts(entries, cast(KVPool, task)), strict=True)
        )
        num_drafts = [len(entry.extent.drafts) for _, entry in entries]
        drafts.append(sum(num_drafts))
        drawn: dict[int, Any] = {
            id(entry.extent): [None]
            * (1 + len(list(takewhile(bool, (is_right() for _ in entry.extent.drafts)))))
            for _, entry in entries
        }
        speculation.record(entries, PassDone(tapped={}, drawn=drawn), 1.0 + draft_s * drafts[-1])
    return drafts


def run_equal_passes(speculation: Speculation, number: int, *, accepts: bool) -> list[int]:
    """Run `number` steps in which all drafts are right and take no time or, without `accepts`, all
    are wrong and a draft takes as long as a step. Return the number of draft tokens in each.
    """
    return run_passes(
        speculation, number, is_right=lambda: accepts, draft_s=0.0 if accepts else 1.0
    )


def test_guesses_are_rarely_looked_for_while_none_is_worth_its_time() -> None:
    drafter = CountedGuesses()
    speculation = Speculation({"suffix": drafter}, "suffix", 3)
    run_equal_passes(speculation, 400, accepts=False)
    before = drafter.num_asked
    num_measures = sum(map(bool, run_equal_passes(speculation, 400, accepts=False)))
    assert num_measures <= 400 / FEWEST_BETWEEN
    assert drafter.num_asked - before <= 400 / REST + (REST + 1) * num_measures + 1, (
        "each measure is followed by a new attempt"
    )
    run_equal_passes(speculation, 4000, accepts=True)
    before = drafter.num_asked
    drafts = run_equal_passes(speculation, 20, accepts=True)
    assert drafts.count(3) >= 19 and drafter.num_asked - before == 20, (
        "one of them may measure another number"
    )


def test_guesses_for_other_numbers_of_requests_are_looked_for_meanwhile() -> None:
    drafter = CountedGuesses()
    speculation = Speculation({"suffix": drafter}, "suffix", 3)
    run_equal_passes(speculation, 400, accepts=False)
    drafter.num_asked = 0
    run_passes(speculation, REST, is_right=lambda: True, draft_s=0.0, num_requests=2)
    assert drafter.num_asked == REST


@pytest.mark.parametrize(("num_tokens", "best"), [(0, 3), (38, 0), (80, 0)])
def test_backlog_is_read_where_enough_of_an_average_answer_is_left(
    num_tokens: int, best: int
) -> None:
    """The backlog is read if enough of an average answer is left. Answers have 40 tokens on
    average; at least a quarter of these is assumed to follow.
    """
    speculation, chance = Speculation({EAGLE3: BacklogGuesses()}, EAGLE3, 3), random.Random(1)
    for _ in range(FEWEST_MEASURES):
        speculation.close(RequestId("earlier"), cast(Any, Growing(40)), complete=True)
    drafts = run_passes(
        speculation,
        1000,
        is_right=lambda: chance.random() < 0.6,
        draft_s=0.05,
        num_tokens=num_tokens,
    )
    assert drafts.count(best) > MOSTLY * len(drafts)


@pytest.mark.parametrize(
    ("rate", "draft_s", "best"), [(0.85, 0.35, 3), (0.9, 0.4, 3), (0.7, 0.25, 2)]
)
def test_best_number_of_drafts_is_found_though_each_is_right_by_chance(
    rate: float, draft_s: float, best: int
) -> None:
    """The best number of drafts is found although acceptance is random. `rate`: probability that a
    draft token after accepted ones is accepted. The best number is 3 to 10 % faster than the next
    lower one.
    """
    speculation, chance = Speculation({"suffix": CountedGuesses()}, "suffix", 3), random.Random(1)
    drafts = run_passes(speculation, 3000, is_right=lambda: chance.random() < rate, draft_s=draft_s)
    assert drafts[500:].count(best) >= 0.7 * len(drafts[500:])


def test_rates_of_right_drafts_outlast_a_switch_and_begin_again_with_another_head() -> None:
    speculation = Speculation({EAGLE3: CountedGuesses()}, EAGLE3, 3)
    run_passes(speculation, 400, is_right=lambda: False, draft_s=0.3)
    speculation.use(OFF)
    speculation.use(EAGLE3)
    assert sum(run_passes(speculation, 20, is_right=lambda: False, draft_s=0.3)) <= 3, (
        "one pass may measure another number"
    )
    speculation.on_new_head(None)
    assert sum(run_passes(speculation, 20, is_right=lambda: True, draft_s=0.3)) >= 3 * 10


def test_unknown_drafter_is_refused_and_the_one_in_use_stays() -> None:
    speculation = Speculation({"ngram": NgramDrafter()}, "ngram", 3)
    with pytest.raises(BadInput, match="'eagle' is none of off, ngram, auto"):
        speculation.use("eagle")
    assert speculation.figures().drafter == "ngram"
    speculation.use("off")
    assert speculation.figures() == SpeculationFigures(
        drafter="off", drafted=(0, 0, 0), accepted=(0, 0, 0)
    )


def test_figures_count_accepted_drafts_by_position() -> None:
    figures = SpeculationFigures(
        drafter="suffix", num_draws=10, drafted=(8, 4, 0), accepted=(6, 1, 0)
    )
    encoded = str(Vitals(speculation=figures).encode()["speculation"])
    assert Vitals.decode({"speculation": encoded.encode()}).speculation == figures
    assert figures.acceptance_length == 1.7 and figures.shares == (0.75, 0.25)
