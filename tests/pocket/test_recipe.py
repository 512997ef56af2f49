"""Pocket's training recipe: the order of its steps, and its errors."""

import pytest

from fleet.core.errors import BadInput
from fleet.lab.pocket.recipe import STEPS, RecipeOptions, run_steps
from fleet.lab.pocket.train.loop import Schedule


def test_recipe_steps_follow_their_inputs() -> None:
    names = list(STEPS)
    for name, step in STEPS.items():
        assert all(names.index(before) < names.index(name) for before in step.after), name


def test_unknown_step_is_refused_with_known_steps() -> None:
    with pytest.raises(BadInput, match="'sing' is unknown; use some of speech, recordings"):
        run_steps(RecipeOptions(), ["sing"])


def test_missing_device_is_refused_before_any_step() -> None:
    with pytest.raises(
        BadInput, match=r"device: 'cuda:99' is not available .*; use cpu"
    ) as refused:
        RecipeOptions(device="cuda:99")
    assert refused.value.param == "device"


@pytest.mark.parametrize("field", ["threads", "workers", "share"])
def test_recipe_options_must_be_positive(field: str) -> None:
    with pytest.raises(BadInput, match=f"{field}: must be positive"):
        RecipeOptions(**{field: 0})  # type: ignore[arg-type]


def test_scaled_schedule_keeps_its_rates() -> None:
    whole = Schedule(steps=1000)
    small = whole.scaled(0.1)
    assert small.steps == 100 and small.learning_rate == whole.learning_rate
    assert whole.scaled(1e-9).steps == 1
