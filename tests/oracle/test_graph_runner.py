"""Decode steps and prompts as captured graphs, compared with `transformers` and with `FastRunner`,
the slow twin.

On a CPU, the function that a GPU would capture is called in every step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from fleet.core.chunk import LOGPROBS
from fleet.core.errors import EngineError
from fleet.core.ids import StageName
from fleet.core.request import RequestSpec, Sampling
from fleet.drafts.drafters import SuffixDrafter
from fleet.drafts.speculation import Speculation
from fleet.engine.torch.graph_runner import GraphRunner, buckets_up_to
from fleet.engine.torch.lm_engine import LMEngine
from fleet.engine.torch.pass_queue import LocalPasses
from fleet.graphs import EACH, get_graph
from fleet.lab.measure.twin import Answers
from fleet.stages.base import BuiltStage
from tests.oracle.cases import CASES, TEXT
from tests.oracle.twins import (
    SPEAKING,
    Built,
    Truth,
    TwinRequests,
    ask,
    assert_all_pages_free,
    build_stage,
    codes_of,
    speaking_stages,
    speaking_twin,
    tokens_of,
    with_invalid_audio,
)
from tests.stage_options import stage_options

pytestmark = pytest.mark.one_file_in(6, "engines")

THINKER, TALKER = SPEAKING
SHORT = [case for case in CASES if case.frames <= 70]
MIXED: Sequence[Mapping[str, Any]] = (
    {},
    {
        "temperature": 0.8,
        "logit_bias": ((40, 4.0), (41, -6.0)),
        "bad_words": ((42,), (40, 40)),
        "top_logprobs": 3,
    },
    {"temperature": 0.9, "top_k": 5},
    {"temperature": 0.7, "top_p": 0.6, "repetition_penalty": 1.3},
    {
        "temperature": 1.1,
        "top_k": 50,
        "top_p": 0.9,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.2,
    },
    {"repetition_penalty": 1.5, "min_tokens": 12},
    {"temperature": 1.0, "min_tokens": 30, "presence_penalty": 0.6},
)
"""Sampling parameters, one set per request."""


PROMPT_SIZES = (16, 64)
with_prompts = pytest.mark.parametrize("prompts", [(), PROMPT_SIZES], ids=["", "with prompts"])
"""Runs a test with eager prompts, and with prompts in steps of `PROMPT_SIZES` rows."""


def with_graphs(
    built: Built,
    buckets: Sequence[int] | None = None,
    step_of: Any = None,
    *,
    prompts: tuple[int, ...] = (),
    clock: Callable[[], float] | None = None,
) -> Built:
    """Return the stages with engines that run decode steps as graphs. `step_of`: transformation of
    a step's function. `prompts`: numbers of rows of a prompt's steps, if these are graphs too.
    `clock`: clock by which prompt rows beside decoding requests are limited; None for no limit.
    """
    graphed: Built = {}
    for name, stage in built.items():
        engine: LMEngine[Any] = stage.engine  # pyright: ignore[reportAssignmentType]
        sizes = buckets or buckets_up_to(engine.limits.max_batch)
        runner = GraphRunner(
            engine.program,  # pyright: ignore[reportArgumentType]
            engine.pool,
            sizes,
            prompt_buckets=prompts,
        )
        if step_of is not None:
            runner.step = step_of(runner.step)
            runner.prompts.compute = step_of(runner.prompts.compute)
        passes, limits = LocalPasses(runner), engine.limits
        if clock is None:
            loop = LMEngine(engine.program, engine.pool, passes, limits)
        else:
            limits = replace(limits, prompt_buckets=prompts)
            loop = LMEngine(engine.program, engine.pool, passes, limits, clock=clock)
        graphed[name] = replace(stage, engine=loop)
    return graphed


def mixed(asked: TwinRequests) -> TwinRequests:
    """Return the requests with different sampling parameters, in both stages."""

    def changed(spec: RequestSpec, settings: Mapping[str, Any]) -> RequestSpec:
        sampling: dict[StageName, Sampling] = {
            stage: msgspec.structs.replace(old, **settings) for stage, old in spec.sampling.items()
        }
        return msgspec.structs.replace(spec, sampling=sampling)

    specs = tuple(changed(spec, MIXED[n % len(MIXED)]) for n, spec in enumerate(asked.specs))
    return replace(asked, specs=specs)


def assert_equal_answers(asked: TwinRequests, made: Answers, wanted: Answers) -> None:
    for case, spec in zip(asked.cases, asked.specs, strict=True):
        assert tokens_of(made, spec.id) == tokens_of(wanted, spec.id), f"{case.name}: answer tokens"
        assert np.array_equal(codes_of(made, spec.id), codes_of(wanted, spec.id)), (
            f"{case.name}: codes"
        )


@pytest.mark.parametrize(
    ("prompts", "clock"),
    [((), None), (PROMPT_SIZES, None), (PROMPT_SIZES, count(1.0).__next__)],
    ids=["", "with prompts", "with cut prompts"],
)
def test_greedy_answers_match_transformers_in_padded_steps(
    tiny_checkpoint: Path,
    truth: Truth,
    prompts: tuple[int, ...],
    clock: Callable[[], float] | None,
) -> None:
    built = with_graphs(
        speaking_stages(tiny_checkpoint, max_batch=11),
        buckets=[1, 3, 11],
        prompts=prompts,
        clock=clock,
    )
    asked = ask(tiny_checkpoint)
    answers = speaking_twin(built, lambda _: EACH).run(asked.specs, asked.blobs)
    for case, spec in zip(asked.cases, asked.specs, strict=True):
        assert tokens_of(answers, spec.id) == truth[case.name].token_ids, (
            f"{case.name}: answer tokens"
        )
        assert (
            np.array_equal(codes_of(answers, spec.id), truth[case.name].codes)
            or not truth[case.name].codes.size
        )
    assert_all_pages_free(built)


@with_prompts
def test_sampled_answers_of_mixed_parameters_equal_the_twins(
    tiny_checkpoint: Path, built: Built, prompts: tuple[int, ...]
) -> None:
    asked = mixed(ask(tiny_checkpoint, SHORT))
    graphed = with_graphs(speaking_stages(tiny_checkpoint), prompts=prompts)
    made = speaking_twin(graphed).run(asked.specs, asked.blobs)
    wanted = speaking_twin(built).run(asked.specs, asked.blobs)
    assert_equal_answers(asked, made, wanted)
    told = [logprobs_of(answers, asked.specs) for answers in (made, wanted)]
    assert len(told[0]) > 3
    np.testing.assert_allclose(told[0], told[1], atol=1e-4)
    assert len({len(tokens_of(made, spec.id)) for spec in asked.specs}) > 2, (
        "requests must end at different steps"
    )


def logprobs_of(answers: Answers, specs: Sequence[RequestSpec]) -> np.ndarray:
    """Return the log probabilities of all answers whose requests ask for them."""
    chunks = [chunk for spec in specs for chunk in answers[spec.id][TEXT]]
    return np.concatenate([chunk[LOGPROBS] for chunk in chunks if LOGPROBS in chunk])


def test_drafts_are_verified_beside_captured_steps(tiny_checkpoint: Path, built: Built) -> None:
    """Drafts are verified beside captured steps: in one step, rows with drafts are computed by the
    twin, rows without by the graph.
    """
    asked = mixed(ask(tiny_checkpoint, SHORT))
    graphed = with_graphs(speaking_stages(tiny_checkpoint))
    thinker: LMEngine[Any] = graphed[THINKER].engine  # pyright: ignore[reportAssignmentType]
    thinker.speculation = Speculation(
        {"suffix": SuffixDrafter(10_000)}, "suffix", 4, follows_times=False
    )
    wanted = speaking_twin(built).run(asked.specs, asked.blobs)
    for _ in range(2):
        assert_equal_answers(asked, speaking_twin(graphed).run(asked.specs, asked.blobs), wanted)
    figures = thinker.speculation.figures()
    assert (
        0 < sum(figures.accepted) < sum(figures.drafted) and figures.drafted[0] < figures.num_draws
    )
    assert_all_pages_free(graphed)


@with_prompts
def test_keys_and_values_equal_the_twins_within_rounding(
    tiny_checkpoint: Path, prompts: tuple[int, ...]
) -> None:
    asked = mixed(ask(tiny_checkpoint, SHORT))
    fast = speaking_stages(tiny_checkpoint)
    graphed = with_graphs(speaking_stages(tiny_checkpoint), prompts=prompts)
    for stages in (fast, graphed):
        speaking_twin(stages).run(asked.specs, asked.blobs)
    for stage in SPEAKING:
        want, made = (stages[stage].engine.pool for stages in (fast, graphed))  # pyright: ignore
        assert torch.count_nonzero(want.data) > 10_000
        scratch = want.scratch_page
        torch.testing.assert_close(
            made.data[:, :scratch], want.data[:, :scratch], rtol=1e-5, atol=1e-5
        )


@with_prompts
def test_small_pool_recomputes_evicted_requests_as_graphs(
    tiny_checkpoint: Path, truth: Truth, prompts: tuple[int, ...]
) -> None:
    """Evicted requests are recomputed as graphs: 12 pages of 16 positions hold any one of the
    requests, but not all.
    """
    built = with_graphs(speaking_stages(tiny_checkpoint, kv_pages=12), prompts=prompts)
    asked = ask(tiny_checkpoint, SHORT)
    answers = speaking_twin(built).run(asked.specs, asked.blobs)
    for case, spec in zip(asked.cases, asked.specs, strict=True):
        assert tokens_of(answers, spec.id) == truth[case.name].token_ids
    assert_all_pages_free(built)


@with_prompts
def test_failed_request_does_not_fail_its_step(
    tiny_checkpoint: Path, truth: Truth, prompts: tuple[int, ...]
) -> None:
    """A failed request does not fail its step. Its audio rows contain NaN; they are computed in
    steps with other requests, and later pad such steps.
    """
    built = with_graphs(speaking_stages(tiny_checkpoint), prompts=prompts)
    asked = ask(tiny_checkpoint)
    poisoned, blobs = with_invalid_audio(asked)
    twin = speaking_twin(built)
    answers = twin.run(asked.specs, blobs)
    assert list(twin.errors) == [poisoned.id]
    assert isinstance(twin.errors[poisoned.id], EngineError)
    for case, spec in zip(asked.cases, asked.specs, strict=True):
        assert spec is poisoned or tokens_of(answers, spec.id) == truth[case.name].token_ids
    assert_all_pages_free(built)


def test_whole_step_compiles_as_one_graph_for_every_request(tiny_checkpoint: Path) -> None:
    """A whole step compiles as one graph for every request, and so does a step of prompt rows: one
    page holds any context here, and no step may depend on a value.

    In bfloat16, as on a GPU, since the tracer refuses grouped products of other types.
    """

    def compiled(step: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(step, fullgraph=True, backend="eager", dynamic=False)

    def stage_of(stage: StageName) -> BuiltStage:
        options = stage_options(
            stage=stage,
            checkpoint=tiny_checkpoint,
            dtype="bfloat16",
            max_batch=4,
            kv_pages=8,
            page_size_tokens=256,
        )
        return build_stage(get_graph("qwen3_omni"), options)

    built = {stage: stage_of(stage) for stage in SPEAKING}
    asked = mixed(ask(tiny_checkpoint, [case for case in SHORT if case.name != "audio"][:4]))
    wanted = speaking_twin(with_graphs(built, buckets=[4], prompts=(64,))).run(
        asked.specs, asked.blobs
    )
    counters.clear()
    twin = speaking_twin(with_graphs(built, buckets=[4], step_of=compiled, prompts=(64,)))
    made = twin.run(asked.specs, asked.blobs)
    assert not twin.errors
    assert_equal_answers(asked, made, wanted)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2 * len(SPEAKING)
    assert max(codes_of(made, spec.id).size for spec in asked.specs) > 0
