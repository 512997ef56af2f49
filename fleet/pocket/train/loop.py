"""The loop that every part of Pocket is trained by: resumes after a kill as if nothing had been, and shows how far it is.

What a step draws comes from a generator keyed (seed, step), so a resumed run is the same run. State is safetensors and JSON,
renamed into place; a kill loses at most `SAVE_EVERY_S` of work. Knows no model.
"""

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm

from fleet.core.errors import ConfigError

SAVE_EVERY_S = 60.0

Compilable = TypeVar("Compilable", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """AdamW with a warm-up and a cosine to zero. Units: `learning_rate` is the peak; `clip` the gradient's largest norm."""

    steps: int
    learning_rate: float = 1.5e-3
    warmup: int = 100
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    clip: float = 1.0
    evaluate_every: int = 500

    def scaled(self, share: float) -> "Schedule":
        """The same with a share of the steps."""
        return replace(self, steps=max(1, round(self.steps * share)))

    def warm(self) -> "Schedule":
        """The same from trained weights: half the rate, so that what is known is not lost."""
        return replace(self, learning_rate=self.learning_rate / 2)

    def rate(self, step: int) -> float:
        """The learning rate at a step, from 0 up to `steps`."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def compiled(function: Compilable, *, dynamic: bool | None = None) -> Compilable:
    """Return the function compiled, or itself where there is no C++ compiler."""
    if not any(map(shutil.which, ("g++", "clang++"))):
        return function
    return cast(Compilable, torch.compile(function, dynamic=dynamic))


class TrainablePart(Protocol):
    """One trainable part of the model."""

    name: str

    @property
    def module(self) -> nn.Module:
        """Every parameter that is trained and every buffer that must be kept."""
        ...

    def loss(self, rng: np.random.Generator, step: int) -> tuple[Tensor, Mapping[str, float]]:
        """The loss of one batch drawn with `rng`, and figures to show beside it."""
        ...

    def evaluate(self) -> Mapping[str, float]:
        """Figures on what is held out."""
        ...


def train(
    part: TrainablePart,
    folder: Path,
    schedule: Schedule,
    *,
    seed: int,
    start: Mapping[str, Tensor] | None = None,
    device: str = "cpu",
) -> Path:
    """Train to the schedule's end, going on from what `folder` holds, and return the file of the weights.

    Weights are drawn on the CPU, so that a seed is the same model everywhere; then all is computed on `device`, torch's
    default device from then on.

    A run that has not begun begins with the weights in `start`; those it does not name stay as drawn.
    Writes `NAME.safetensors` (weights), `NAME.optimizer.safetensors`, `NAME.json` (where it is) and `NAME.log.jsonl` (curves).
    """
    folder.mkdir(parents=True, exist_ok=True)
    part.module.to(device)
    with torch.device(device):
        return _train(TrainingRun(part, folder, schedule), part.name, schedule, seed, start or {})


def _train(run: "TrainingRun", name: str, schedule: Schedule, seed: int, start: Mapping[str, Tensor]) -> Path:
    step = run.resume(start)
    saved_s = time.monotonic()
    with tqdm(total=schedule.steps, initial=step, desc=name, unit="step", mininterval=5) as bar:
        while step < schedule.steps:
            figures = run.step(step, np.random.default_rng((seed, step)))
            step += 1
            bar.update()
            bar.set_postfix({name: f"{value:.3f}" for name, value in figures.items()}, refresh=False)
            if step % schedule.evaluate_every == 0 or step == schedule.steps:
                run.log(step, figures | run.evaluate())
            if time.monotonic() - saved_s > SAVE_EVERY_S:
                run.save(step)
                saved_s = time.monotonic()
    run.save(step)
    return run.weights


class TrainingRun:
    def __init__(self, part: TrainablePart, folder: Path, schedule: Schedule) -> None:
        self._part, self._schedule = part, schedule
        self._optimizer = torch.optim.AdamW(
            [parameter for parameter in part.module.parameters() if parameter.requires_grad],
            lr=schedule.learning_rate,
            betas=schedule.betas,
            weight_decay=schedule.weight_decay,
        )
        self.weights = folder / f"{part.name}.safetensors"
        self._moments = folder / f"{part.name}.optimizer.safetensors"
        self._progress = folder / f"{part.name}.json"
        self._log = folder / f"{part.name}.log.jsonl"
        self._begun_s = time.monotonic()
        self._spent_s = 0.0

    def resume(self, start: Mapping[str, Tensor]) -> int:
        if not self._progress.exists():
            strange = self._part.module.load_state_dict(start, strict=False).unexpected_keys
            if strange:
                raise ConfigError(f"start: {self._part.name} has no {strange[0]}; start it from nothing", param="start")
            return 0
        progress = json.loads(self._progress.read_text())
        tag = str(progress["tag"])
        self._part.module.load_state_dict(load_file(self.weights.with_suffix(f".{tag}")))
        moments = load_file(self._moments.with_suffix(f".{tag}"))
        groups = self._optimizer.state_dict()["param_groups"]
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in moments.items():
            index, key = name.split(".")
            state.setdefault(int(index), {})[key] = value
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})
        self._spent_s = float(progress["spent_s"])
        return int(progress["step"])

    def step(self, step: int, rng: np.random.Generator) -> dict[str, float]:
        for group in self._optimizer.param_groups:
            group["lr"] = self._schedule.rate(step)
        self._part.module.train()
        self._optimizer.zero_grad(set_to_none=True)
        loss, figures = self._part.loss(rng, step)
        loss.backward()
        nn.utils.clip_grad_norm_(self._part.module.parameters(), self._schedule.clip)
        self._optimizer.step()
        return {"loss": float(loss.detach()), **figures}

    def evaluate(self) -> dict[str, float]:
        self._part.module.eval()
        with torch.no_grad():
            return dict(self._part.evaluate())

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        line = {"step": step, "spent_s": round(self._total_s(), 1), **{key: round(value, 5) for key, value in figures.items()}}
        with self._log.open("a") as log:
            log.write(json.dumps(line) + "\n")
        tqdm.write(json.dumps(line))

    def save(self, step: int) -> None:
        """Both files of one save bear its tag, and the progress file names the tag last: a kill between leaves the old pair."""
        tag = f"{step}.safetensors"
        save_file({key: value.contiguous() for key, value in self._part.module.state_dict().items()}, self._at(self.weights, tag))
        state = self._optimizer.state_dict()["state"]
        moments = {f"{index}.{key}": value for index, each in state.items() for key, value in each.items()}
        save_file(moments, self._at(self._moments, tag))
        _replace(self._progress, json.dumps({"step": step, "tag": tag, "spent_s": round(self._total_s(), 1)}))
        # The plain name is a link for the reader; the pair above is what a resume reads.
        link = self.weights.with_suffix(".link")
        link.unlink(missing_ok=True)
        link.symlink_to(self._at(self.weights, tag).name)
        os.replace(link, self.weights)
        for file in self._part_files():
            if not file.name.endswith(f".{tag}"):
                file.unlink()

    def _part_files(self) -> list[Path]:
        tagged = [*self.weights.parent.glob(f"{self.weights.stem}.[0-9]*.safetensors")]
        return tagged + [*self.weights.parent.glob(f"{self._moments.stem}.[0-9]*.safetensors")]

    @staticmethod
    def _at(path: Path, tag: str) -> Path:
        return path.with_suffix(f".{tag}")

    def _total_s(self) -> float:
        return self._spent_s + time.monotonic() - self._begun_s


def _replace(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)
