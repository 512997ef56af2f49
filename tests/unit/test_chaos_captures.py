"""Captures for training during `fleet chaos`, without a fleet: what a checkpoint may say about
them.
"""

import pytest

from fleet.drafts.trainer.state import TrainedSamples
from fleet.lab.faults.captures import wrong_samples

WHOLE = TrainedSamples(contained=("a", "b", "c", "held out"), windows=(("a", "b"), (), ("c",)))


def test_checkpoint_that_has_each_acknowledged_sample_once_is_right() -> None:
    assert wrong_samples(["a", "c", "held out"], WHOLE) == []


@pytest.mark.parametrize(
    ("acknowledged", "samples", "wrong"),
    [
        (["a", "d"], WHOLE, "capture d was acknowledged, but the last checkpoint lacks it"),
        (
            ["a"],
            TrainedSamples(contained=("a",), windows=(("a",), ("a",))),
            "capture a was a new sample of 2 windows",
        ),
        (["a", "b", "a"], WHOLE, "capture a was acknowledged 2 times"),
        ([], WHOLE, "no capture was acknowledged"),
    ],
)
def test_lost_and_repeated_samples_are_named(
    acknowledged: list[str], samples: TrainedSamples, wrong: str
) -> None:
    assert wrong_samples(acknowledged, samples) == [wrong]
