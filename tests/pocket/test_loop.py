"""Pocket's training loop: a resumed run equals an uninterrupted one."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fleet.lab.pocket.train import loop
from fleet.lab.pocket.train.loop import Schedule, train

SCHEDULE = Schedule(steps=120, learning_rate=0.1, warmup=4, evaluate_every=40)


class Killed(Exception):
    pass


class SumPart:
    """A model part that learns to sum four numbers."""

    name = "toy"

    def __init__(self, killed_at: int | None = None) -> None:
        torch.manual_seed(0)
        self.module = nn.Linear(4, 1)
        self._killed_at = killed_at

    def loss(self, rng: np.random.Generator, step: int) -> tuple[Tensor, Mapping[str, float]]:
        if step == self._killed_at:
            raise Killed
        inputs = torch.from_numpy(rng.standard_normal((8, 4)).astype(np.float32))
        return (self.module(inputs) - inputs.sum(1, keepdim=True)).square().mean(), {}

    def evaluate(self) -> Mapping[str, float]:
        return {"sum": float(self.module.weight.detach().sum())}


def test_resumed_run_ends_with_weights_of_uninterrupted_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "SAVE_EVERY_S", 0.0)
    uninterrupted = SumPart()
    train(uninterrupted, tmp_path / "whole", SCHEDULE, seed=1)
    with pytest.raises(Killed):
        train(SumPart(killed_at=23), tmp_path / "killed", SCHEDULE, seed=1)
    resumed = SumPart()
    file = train(resumed, tmp_path / "killed", SCHEDULE, seed=1)
    assert torch.equal(resumed.module.weight, uninterrupted.module.weight)
    assert torch.equal(resumed.module.bias, uninterrupted.module.bias)
    assert file.is_file() and len(list(file.parent.glob("toy.*.safetensors"))) == 2


def test_learning_rate_warms_up_and_ends_at_zero(tmp_path: Path) -> None:
    toy = SumPart()
    train(toy, tmp_path, SCHEDULE, seed=2)
    assert toy.evaluate()["sum"] == pytest.approx(4, abs=0.5)
    assert (
        SCHEDULE.rate(0) == pytest.approx(0.025)
        and SCHEDULE.rate(4) == pytest.approx(0.1)
        and SCHEDULE.rate(120) < 1e-6
    )
