"""Speculation: answers, greedy and sampled, equal answers without drafts, however good the drafts
are. The drafters are `ngram`, `suffix`, and doubles that are always right, always wrong, or right
by chance.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from torch import Tensor

import fleet.drafts.choice as drafter_choice
import fleet.engine.torch.answer as answer_module
from fleet.core.ids import DECODE, EdgeName, RequestId, StageName
from fleet.core.request import RequestSpec, Sampling
from fleet.drafts.drafters import (
    AskedDraft,
    Drafter,
    MatchingDrafter,
    NgramDrafter,
    Proposer,
    SuffixDrafter,
)
from fleet.drafts.speculation import Speculation
from fleet.engine.base import TOKEN, EngineOutput
from fleet.engine.torch.answer import AnsweringTask
from fleet.engine.torch.lm_engine import LMEngine
from fleet.engine.torch.sampling import RowSampling, draw
from fleet.graphs import get_graph
from fleet.lab.measure.twin import SlowTwin
from fleet.models.causal_lm.tiny import write_tiny_checkpoint
from fleet.processing.tokenizer import load_tokenizer
from fleet.stages.base import BuiltStage
from fleet.stages.text import build
from tests.oracle.twins import assert_all_pages_free, tokens_of
from tests.stage_options import stage_options

pytestmark = pytest.mark.one_file_in(6, "engines")

LM, TEXT = StageName("lm"), EdgeName("text")
NUM_TOKENS, NUM_DRAFTS, NUM_IDS = 40, 4, 256
PROMPTS = tuple(
    tuple(random.Random(number).choices(range(3, NUM_IDS), k=3 + 5 * number)) for number in range(8)
)
GREEDY = Sampling(max_tokens=NUM_TOKENS, ignore_eos=True)
SAMPLED = Sampling(
    max_tokens=NUM_TOKENS,
    temperature=0.8,
    top_p=0.95,
    repetition_penalty=1.2,
    frequency_penalty=0.3,
    presence_penalty=0.2,
    min_tokens=5,
)
Answers = list[list[int]]


@dataclass(slots=True)
class KnownProposer(Proposer):
    """Drafter double that proposes tokens of a known answer, each right with a given
    probability.
    """

    answer: Sequence[int]
    share: float
    rng: random.Random
    num_seen: int = 0

    def add(self, tokens: Sequence[int]) -> None:
        self.num_seen += len(tokens)

    def propose(self, most: int) -> Sequence[int]:
        coming = self.answer[self.num_seen : self.num_seen + most]
        return [
            token if self.rng.random() < self.share else (token + 1) % NUM_IDS for token in coming
        ]


class KnownDrafter(MatchingDrafter):
    def __init__(self, answers: Sequence[Sequence[int]], share: float) -> None:
        super().__init__()
        self._answers, self._share = dict(zip(PROMPTS, answers, strict=True)), share
        self._rng = random.Random(7)

    def open(self, prompt_ids: Sequence[int]) -> Proposer:
        return KnownProposer(self._answers[tuple(prompt_ids)], self._share, self._rng)


DRAFTERS: dict[str, Callable[[Answers], Drafter]] = {
    "always right": lambda answers: KnownDrafter(answers, 1.0),
    "always wrong": lambda answers: KnownDrafter(answers, 0.0),
    "right by chance": lambda answers: KnownDrafter(answers, 0.7),
    "ngram": lambda _: NgramDrafter(),
    "suffix": lambda _: SuffixDrafter(10_000),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("speculation") / "lm")


@dataclass(slots=True)
class Runs:
    """Runs of requests with and without drafts. `logits`: logits of every sampled token in the last
    run, by its noise key.
    """

    folder: Path
    logits: dict[int, bytes] = field(default_factory=dict[int, bytes])

    def stage(self, drafter: Drafter | None = None, **options: Any) -> BuiltStage:
        built = build(stage_options(stage=LM, checkpoint=self.folder, **options))
        if drafter is not None:
            engine(built).speculation = Speculation(
                {"known": drafter}, "known", NUM_DRAFTS, follows_times=False
            )
        return built

    def answers(
        self,
        built: BuiltStage,
        sampling: Sampling,
        prompts: Sequence[Sequence[int]] = PROMPTS,
        batch: int = 8,
    ) -> Answers:
        """Answer the prompts, `batch` at a time, each with a seed of its own."""
        self.logits.clear()
        specs = [spec_of(number, prompt, sampling) for number, prompt in enumerate(prompts)]
        twin, answers = SlowTwin(get_graph("text"), {LM: built}), Answers()
        for first in range(0, len(specs), batch):
            some = specs[first : first + batch]
            got = twin.run(some)
            answers += [tokens_of(got, spec.id) for spec in some]
        assert not twin.errors
        assert_all_pages_free({LM: built})
        return answers


@pytest.fixture
def runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    made = Runs(folder)

    def recording(logits_SV: Tensor, draws: Sequence[RowSampling], **more: Any) -> Tensor:
        for plan, row in zip(draws, logits_SV, strict=True):
            made.logits[plan.noise_key] = row.numpy().tobytes()
        return draw(logits_SV, draws, **more)

    monkeypatch.setattr(answer_module, "draw", recording)
    yield made


def engine(built: BuiltStage) -> LMEngine[Any]:
    return cast("LMEngine[Any]", built.engine)


def spec_of(number: int, prompt: Sequence[int], sampling: Sampling, **more: Any) -> RequestSpec:
    sampling = msgspec.structs.replace(sampling, seed=number)
    return RequestSpec(
        id=RequestId(f"r{number}"),
        graph="text",
        prompt_ids=tuple(prompt),
        outputs=(TEXT,),
        sampling={LM: sampling},
        **more,
    )


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled with penalties"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_answers_and_logits_are_byte_equal_to_those_without_speculation(
    runs: Runs, drafter: str, sampling: Sampling
) -> None:
    expected = runs.answers(runs.stage(numerics="invariant"), sampling, batch=1)
    logits = dict(runs.logits)
    for batch, chunk in ((1, 256), (8, 7), (8, 1)):
        built = runs.stage(
            DRAFTERS[drafter](expected), numerics="invariant", prefill_chunk_tokens=chunk
        )
        assert runs.answers(built, sampling, batch=batch) == expected
        assert {key: runs.logits[key] for key in logits} == logits
        figures = engine(built).stats().speculation
        assert (
            figures is not None and figures.acceptance_length is not None and figures.drafted[0] > 0
        )
        assert drafter != "always right" or figures.acceptance_length > NUM_DRAFTS
        assert drafter != "always wrong" or sum(figures.accepted) == 0


@pytest.mark.parametrize("drafter", ["always right", "right by chance"])
def test_answers_are_equal_in_fast_numerics(runs: Runs, drafter: str) -> None:
    for sampling in (GREEDY, SAMPLED):
        expected = runs.answers(runs.stage(), sampling)
        assert (
            runs.answers(runs.stage(DRAFTERS[drafter](expected), prefill_chunk_tokens=7), sampling)
            == expected
        )


def test_answer_that_accepts_one_token_too_many_is_found(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = runs.answers(runs.stage(), GREEDY)

    def record_all(
        task: AnsweringTask,
        drafts: Sequence[int],
        tokens: Sequence[int],
        rows_RH: Tensor,
        _logprobs: object,
    ) -> Sequence[EngineOutput]:
        wrong = next(
            (number for number, draft in enumerate(drafts) if tokens[number] != draft), len(drafts)
        )
        return [
            task.record_draw(token, row)
            for token, row in zip(tokens[: wrong + 2], rows_RH.split(1), strict=False)
        ]

    monkeypatch.setattr(answer_module, "_record_drafted", record_all)
    got = runs.answers(runs.stage(DRAFTERS["right by chance"](expected)), GREEDY)
    assert any(
        mine[: len(other)] != other[: len(mine)] for mine, other in zip(got, expected, strict=True)
    )


def test_requests_continue_equal_after_their_pages_are_taken(runs: Runs) -> None:
    expected = runs.answers(runs.stage(numerics="invariant"), GREEDY)
    needed = max(len(prompt) for prompt in PROMPTS) + NUM_TOKENS
    built = runs.stage(
        DRAFTERS["right by chance"](expected), numerics="invariant", kv_pages=2 * -(-needed // 16)
    )
    assert runs.answers(built, GREEDY) == expected


@pytest.mark.parametrize("num_logged", [1, 13])
def test_answer_continues_equal_from_its_log_with_another_drafter(
    runs: Runs, num_logged: int
) -> None:
    """An answer continues from its log with another drafter: the successor of a lost worker has
    other drafts, or no drafts, and the answer is equal.
    """
    expected = runs.answers(runs.stage(numerics="invariant"), SAMPLED)
    for drafter in (None, DRAFTERS["right by chance"](expected), NgramDrafter()):
        built = runs.stage(drafter, numerics="invariant")
        given = [spec_of(number, prompt, SAMPLED) for number, prompt in enumerate(PROMPTS)]
        assert [
            continued_answer(built, spec, answer[:num_logged])
            for spec, answer in zip(given, expected, strict=True)
        ] == expected


def continued_answer(built: BuiltStage, spec: RequestSpec, logged: Sequence[int]) -> list[int]:
    adapter = built.adapter(spec, None)
    request, pieces = adapter.open({(TEXT, DECODE): {"ids": np.array(logged, np.int32)}})
    built.engine.submit(request)
    for piece in pieces:
        built.engine.feed(spec.id, piece)
    tokens: list[int] = []
    while built.engine.is_ready():
        tokens += [int(output.arrays[TOKEN][0]) for output in built.engine.step()]
    return tokens


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_drafters_that_change_in_mid_answer_change_no_answer(
    runs: Runs, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafters that change in mid-answer change no answer: drafter `auto`, with trials so short
    that every answer is drafted by each drafter.
    """
    monkeypatch.setattr(drafter_choice, "TRIAL_PASSES", 2)
    monkeypatch.setattr(drafter_choice, "WARM_UP_PASSES", 1)
    monkeypatch.setattr(drafter_choice, "FIRST_TERM", 2)
    expected = runs.answers(runs.stage(numerics="invariant"), sampling)
    built = runs.stage(numerics="invariant")
    used = Counter[str]()

    class Counted(KnownDrafter):
        def propose(self, asked: Sequence[AskedDraft]) -> list[Sequence[int]]:
            assert (speculation := engine(built).speculation) is not None
            used[speculation.figures().drafter] += 1
            return super().propose(asked)

    drafters = {"suffix": Counted(expected, 0.7), "eagle3": Counted(expected, 1.0)}
    engine(built).speculation = Speculation(drafters, "auto", NUM_DRAFTS, follows_times=False)
    assert runs.answers(built, sampling) == expected
    assert min(used["suffix"], used["eagle3"]) >= 3, used
    assert runs.answers(built, sampling) == expected


def test_stop_string_within_accepted_drafts_ends_the_answer_there(runs: Runs) -> None:
    expected = runs.answers(runs.stage(), GREEDY, PROMPTS[:1])
    text = load_tokenizer(runs.folder).decode(expected[0], skip_special_tokens=False)
    stopping = Sampling(max_tokens=NUM_TOKENS, ignore_eos=True, stop=(text[len(text) // 2 :][:3],))
    stopped = runs.answers(runs.stage(), stopping, PROMPTS[:1])
    assert (
        2 < len(stopped[0]) < NUM_TOKENS - NUM_DRAFTS
        and stopped[0] == expected[0][: len(stopped[0])]
    )
    known = DRAFTERS["always right"]([*expected, *([] for _ in PROMPTS[1:])])
    assert runs.answers(runs.stage(known), stopping, PROMPTS[:1]) == stopped


def test_next_turn_of_a_session_reuses_only_rows_of_its_answer(runs: Runs) -> None:
    """The next turn of a session reuses only rows of its answer; rows of rejected drafts are in the
    session's pages but are not reused.
    """
    plain = runs.stage(numerics="invariant")
    (first,) = runs.answers(plain, GREEDY, PROMPTS[:1])
    second = (*PROMPTS[0], *first, 9, 8, 7)
    (expected,) = runs.answers(plain, GREEDY, [second])
    for drafter in ("always right", "always wrong", "right by chance"):
        known = KnownDrafter(
            [first, *([] for _ in PROMPTS[1:])],
            {"always right": 1.0, "always wrong": 0.0}.get(drafter, 0.7),
        )
        built = runs.stage(known, numerics="invariant")
        assert session_turn(built, "a", PROMPTS[0]) == first
        engine(built).speculation = Speculation(
            {"ngram": NgramDrafter()}, "ngram", NUM_DRAFTS, follows_times=False
        )
        assert session_turn(built, "b", second) == expected
        assert built.engine.stats().kv.rows_reused == len(PROMPTS[0]) + len(first) - 1


def session_turn(built: BuiltStage, name: str, prompt: Sequence[int]) -> list[int]:
    request, pieces = built.adapter(spec_of(0, prompt, GREEDY), None).open()
    request = replace(request, request_id=RequestId(name), session="talk")
    built.engine.submit(request)
    for piece in pieces:
        built.engine.feed(request.request_id, piece)
    tokens: list[int] = []
    while built.engine.is_ready():
        tokens += [int(output.arrays[TOKEN][0]) for output in built.engine.step()]
    return tokens


def test_aborted_requests_leave_no_page(runs: Runs) -> None:
    expected = runs.answers(runs.stage(), GREEDY)
    built = runs.stage(DRAFTERS["right by chance"](expected))
    for steps in range(1, 6):
        for number, prompt in enumerate(PROMPTS):
            request, pieces = built.adapter(spec_of(number, prompt, GREEDY), None).open()
            built.engine.submit(request)
            built.engine.feed(request.request_id, pieces[0])
        for _ in range(steps):
            built.engine.step()
        for number in range(len(PROMPTS)):
            built.engine.abort(RequestId(f"r{number}"))
        assert_all_pages_free({LM: built})
    assert runs.answers(built, GREEDY) == expected
