"""Decode steps by fused kernels, run by their slow twins, against torch's operations; and the
choice between the two forms of a step.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fleet.engine.torch.attention_step import StepLayout
from fleet.engine.torch.experts import grouped_experts
from fleet.engine.torch.fastest import Fastest
from fleet.engine.torch.kv_pool import KVPool
from fleet.engine.torch.program import GraphProgram, StepOutputs
from fleet.engine.torch.step_forms import MAX_FUSED_ROWS, StepForms, trial_inputs
from fleet.engine.torch.step_inputs import RowInputs
from fleet.models.qwen3_omni.code_predictor import CodePredictor
from fleet.models.qwen3_omni.talker import Talker
from fleet.models.qwen3_omni.thinker import Thinker
from tests.decoder_weights import random_model
from tests.unit.kernels.interpreted_step import draws_of

Program = GraphProgram[Any]
CPU = torch.device("cpu")
PAGE_SIZE = 16


@pytest.fixture(scope="module")
def programs() -> dict[str, Program]:
    model = random_model({})
    return {
        "thinker": Thinker(*model, frozenset([2]), grouped_experts, 1024, one_by_one=False),
        "talker": Talker(*model, grouped_experts, 1024, tiled=False),
    }


@pytest.fixture(params=["thinker", "talker"])
def program(request: pytest.FixtureRequest, programs: dict[str, Program]) -> Program:
    return programs[request.param]


def make_pool(program: Program) -> KVPool:
    return KVPool(
        program.kv_shape, num_pages=8, page_size=PAGE_SIZE, dtype=torch.float32, device=CPU
    )


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def both_forms(compute: Callable[[bool], Any]) -> tuple[Any, Any]:
    with torch.inference_mode():
        return compute(False), compute(True)


@pytest.mark.parametrize("num_rows", [1, 3, 32])
def test_fused_layers_return_the_hidden_states_of_torch(program: Program, num_rows: int) -> None:
    pools = [make_pool(program), make_pool(program)]
    inputs = trial_inputs(pools[0], program.step_shape.hidden_size, num_rows)

    def forward(is_fused: bool) -> Any:
        layout = StepLayout(pools[is_fused], inputs, is_fused=is_fused)
        return program.forward(inputs.rows_BH, layout, ())

    plain, fused = both_forms(forward)
    assert_close(fused.last_NH, plain.last_NH)
    assert (fused.tapped_NH is None) == (plain.tapped_NH is None)
    if plain.tapped_NH is not None:
        assert_close(fused.tapped_NH, plain.tapped_NH)
    assert_close(pools[1].data, pools[0].data)


@pytest.mark.parametrize("num_rows", [1, 3, 32])
def test_fused_sampling_samples_the_codes_of_torch(program: Program, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    last_BH = torch.randn(num_rows, program.step_shape.hidden_size, generator=generator)
    draws = draws_of(program, num_rows)

    def sample(is_fused: bool) -> StepOutputs:
        return program.sample_step(last_BH, draws, is_fused=is_fused)

    plain, fused = both_forms(sample)
    assert fused.codes_BQ.tolist() == plain.codes_BQ.tolist()
    assert_close(fused.rows_BH, plain.rows_BH)


def test_trials_of_both_forms_agree(program: Program) -> None:
    pool = make_pool(program)
    inputs = trial_inputs(pool, program.step_shape.hidden_size, 20)

    def trial(is_fused: bool) -> Sequence[Tensor]:
        return program.trial(inputs.rows_BH, StepLayout(pool, inputs, is_fused=is_fused))

    for plain, fused in zip(*both_forms(trial), strict=True):
        assert_close(fused, plain)


class TwoForms:
    """Program whose fused form takes a given time, and returns given values or fails."""

    def __init__(self, program: Program, value: float | None = 1.0, fused_s: float = 1.0) -> None:
        self.step_shape = program.step_shape
        self._value, self._fused_s = value, fused_s
        self.now_s, self.num_trials = 0.0, 0

    def trial(self, rows_BH: Tensor, layout: StepLayout) -> Sequence[Tensor]:
        self.num_trials += 1
        self.now_s += self._fused_s if layout.is_fused else 2.0
        if not layout.is_fused:
            return (torch.ones(len(rows_BH)),)
        if self._value is None:
            raise RuntimeError("no such kernel")
        return (torch.full((len(rows_BH),), self._value),)


@pytest.mark.parametrize(
    ("value", "fused_s", "is_fused"),
    [(1.0, 1.0, True), (1.0, 3.0, False), (1.5, 1.0, False), (None, 1.0, False)],
    ids=["faster", "slower", "wrong", "failing"],
)
def test_form_is_chosen_by_measurement(
    programs: dict[str, Program],
    value: float | None,
    fused_s: float,
    is_fused: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    two: Any = TwoForms(programs["talker"], value, fused_s)
    fastest = Fastest(CPU, time_limit_s=1000.0, clock=lambda: two.now_s)
    forms = StepForms(two, make_pool(programs["talker"]), fastest, None)
    with caplog.at_level(logging.WARNING):
        assert forms.is_fused(4) == is_fused
    assert bool(caplog.records) == (value != 1.0)
    num_trials = two.num_trials
    assert forms.is_fused(4) == is_fused and two.num_trials == num_trials, "measured once"
    assert not forms.is_fused(MAX_FUSED_ROWS + 1) and two.num_trials == num_trials


def test_form_is_not_measured_without_a_gpu(programs: dict[str, Program]) -> None:
    two: Any = TwoForms(programs["talker"])
    assert not StepForms(two, make_pool(programs["talker"]), None, None).is_fused(1)
    assert StepForms(two, make_pool(programs["talker"]), None, None, is_fused=True).is_fused(1)
    assert two.num_trials == 0


def test_rows_of_a_trial_have_slots_of_their_own(programs: dict[str, Program]) -> None:
    pool = make_pool(programs["talker"])
    inputs: RowInputs = trial_inputs(pool, 8, 2 * PAGE_SIZE + 3)
    assert sorted(inputs.slots_B.tolist()) == list(range(2 * PAGE_SIZE + 3))
    assert (inputs.pages_BP[:, 0] * PAGE_SIZE + inputs.positions_B).tolist() == (
        inputs.slots_B.tolist()
    )


def test_certain_codes_are_the_same_with_any_noise(programs: dict[str, Program]) -> None:
    talker: Any = programs["talker"]
    predictor: CodePredictor = talker._predictor
    rows_SH = torch.randn(5, programs["talker"].step_shape.hidden_size)
    with torch.inference_mode():
        _, first_SH = predictor.trial(rows_SH, is_fused=False)
        _, again_SH = predictor.trial(rows_SH + 1, is_fused=True)
    assert torch.equal(first_SH, again_SH) and len(first_SH.unique(dim=0)) == 5
