"""The recipe's order, and its refusals: what a step needs stands before it."""

import pytest

from fleet.core.errors import BadInput
from fleet.pocket.recipe import STEPS, RecipeOptions, make
from fleet.pocket.train.loop import Schedule


def test_every_step_stands_after_those_it_reads_from() -> None:
    names = list(STEPS)
    for name, step in STEPS.items():
        assert all(names.index(before) < names.index(name) for before in step.after), name


def test_an_unknown_step_is_named_with_those_there_are() -> None:
    with pytest.raises(BadInput, match="there is no 'sing'; use some of speech, recordings"):
        make(RecipeOptions(), ["sing"])


def test_a_device_that_is_not_here_is_refused_before_anything_is_made() -> None:
    with pytest.raises(BadInput, match=r"device: 'cuda:99' is not here .*; use cpu") as refused:
        RecipeOptions(device="cuda:99")
    assert refused.value.param == "device"


@pytest.mark.parametrize("field", ["threads", "workers", "share"])
def test_nothing_is_refused(field: str) -> None:
    with pytest.raises(BadInput, match=f"{field}: must be positive"):
        RecipeOptions(**{field: 0})  # type: ignore[arg-type]


def test_a_share_of_a_schedule_keeps_its_rates() -> None:
    whole = Schedule(steps=1000)
    small = whole.scaled(0.1)
    assert small.steps == 100 and small.learning_rate == whole.learning_rate
    assert whole.scaled(1e-9).steps == 1
