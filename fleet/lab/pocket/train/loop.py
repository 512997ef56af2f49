"""Training loop of all parts of Pocket, resumable after a kill with the same result, and with a
progress bar.

The random generator of a step is keyed by (seed, step), so a resumed run equals an uninterrupted
one. State is saved as safetensors and JSON, replaced atomically; a kill loses at most
`SAVE_EVERY_S` of work. Independent of the model.
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
from fleet.lab.pocket.sharding import replacing

SAVE_EVERY_S = 60.0

Compilable = TypeVar("Compilable", bound=Callable[..., Any])
Loss = tuple[Tensor, Mapping[str, Tensor | float]]
"""Loss of a batch, and statistics to log with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Optimizer settings: AdamW with warm-up and cosine decay to zero. `learning_rate`: peak
    learning rate. `clip`: maximum norm of the gradient.
    """

    steps: int
    learning_rate: float = 1.5e-3
    warmup: int = 100
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    clip: float = 1.0
    evaluate_every: int = 500

    def scaled(self, share: float) -> "Schedule":
        """Return a copy of the schedule with `share` times as many steps."""
        return replace(self, steps=max(1, round(self.steps * share)))

    def warm(self) -> "Schedule":
        """Return a schedule that starts from trained weights: half the learning rate, so that the
        weights are not lost.
        """
        return replace(self, learning_rate=self.learning_rate / 2)

    def rate(self, step: int) -> float:
        """Return the learning rate at a step."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def compiled(function: Compilable, *, dynamic: bool | None = None) -> Compilable:
    """Return the function compiled by torch, or the function itself if there is no C++ compiler."""
    if not any(map(shutil.which, ("g++", "clang++"))):
        return function
    return cast(Compilable, torch.compile(function, dynamic=dynamic))


def initialise(
    module: nn.Module, generator: torch.Generator, num_layers: int, residual: tuple[str, ...]
) -> None:
    """Initialise the module's matrices so that they preserve their input's scale; matrices at the
    end of residual branches are scaled down with the number of layers.

    `residual`: suffixes of the names of such matrices, of which each layer has two.
    """
    for name, parameter in module.named_parameters():
        if parameter.dim() >= 2:
            std = parameter[0].numel() ** -0.5
            if name.endswith(residual):
                std *= (2 * num_layers) ** -0.5
            if "conv2d" in name:
                std *= 2**0.5
            nn.init.normal_(parameter, std=std, generator=generator)


class TrainablePart(Protocol):
    """A part of the model that `train` can train."""

    name: str

    @property
    def module(self) -> nn.Module:
        """Module with all trained parameters and saved buffers."""
        ...

    def loss(self, rng: np.random.Generator, step: int) -> Loss:
        """Return the loss of a random batch generated with `rng`, and statistics to log."""
        ...

    def evaluate(self) -> Mapping[str, float]:
        """Return statistics on held-out data, by name."""
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
    """Train a part to the end of the schedule, resuming from the state in `folder`; return the
    weight file.

    Weights are initialized on the CPU, so that a seed gives the same model on any machine; the
    training runs on `device`, as torch's default device.

    `start`: initial weights of a new run; weights without an entry keep their random values. Writes
    `NAME.safetensors` (weights), `NAME.optimizer.safetensors`, `NAME.json` (progress) and
    `NAME.log.jsonl` (curves).
    """
    folder.mkdir(parents=True, exist_ok=True)
    part.module.to(device)
    with torch.device(device):
        return _train(TrainingRun(part, folder, schedule), part.name, schedule, seed, start or {})


def _train(
    run: "TrainingRun", name: str, schedule: Schedule, seed: int, start: Mapping[str, Tensor]
) -> Path:
    step = run.resume(start)
    saved_s = time.monotonic()
    with tqdm(total=schedule.steps, initial=step, desc=name, unit="step", mininterval=5) as bar:
        while step < schedule.steps:
            stats = run.step(step, np.random.default_rng((seed, step)))
            step += 1
            bar.update()
            bar.set_postfix({name: f"{value:.3f}" for name, value in stats.items()}, refresh=False)
            if step % schedule.evaluate_every == 0 or step == schedule.steps:
                run.log(step, stats | run.evaluate())
            if time.monotonic() - saved_s > SAVE_EVERY_S:
                run.save(step)
                saved_s = time.monotonic()
    run.save(step)
    return run.weights


class TrainingRun:
    """State of one training run: optimizer, files, time spent."""

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
        self._started_s = time.monotonic()
        self._spent_s = 0.0

    def resume(self, start: Mapping[str, Tensor]) -> int:
        if not self._progress.exists():
            unexpected = self._part.module.load_state_dict(start, strict=False).unexpected_keys
            if unexpected:
                raise ConfigError(
                    f"start: {self._part.name} has no {unexpected[0]}; train it without start",
                    param="start",
                )
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
        loss, stats = self._part.loss(rng, step)
        loss.backward()
        nn.utils.clip_grad_norm_(self._part.module.parameters(), self._schedule.clip)
        self._optimizer.step()
        return {
            name: float(value.detach()) if isinstance(value, Tensor) else value
            for name, value in {"loss": loss, **stats}.items()
        }

    def evaluate(self) -> dict[str, float]:
        self._part.module.eval()
        with torch.no_grad():
            return dict(self._part.evaluate())

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        line = {
            "step": step,
            "spent_s": round(self._total_s(), 1),
            **{key: round(value, 5) for key, value in stats.items()},
        }
        with self._log.open("a") as log:
            log.write(json.dumps(line) + "\n")
        tqdm.write(json.dumps(line))

    def save(self, step: int) -> None:
        """Save weights and optimizer under a new tag, then the progress file with the tag, and
        delete earlier tags. A kill in between leaves a valid pair.
        """
        tag = f"{step}.safetensors"
        weights = {key: value.contiguous() for key, value in self._part.module.state_dict().items()}
        save_file(weights, self.weights.with_suffix(f".{tag}"))
        state = self._optimizer.state_dict()["state"]
        moments = {
            f"{index}.{key}": value for index, each in state.items() for key, value in each.items()
        }
        save_file(moments, self._moments.with_suffix(f".{tag}"))
        with replacing(self._progress) as new:
            new.write_text(
                json.dumps({"step": step, "tag": tag, "spent_s": round(self._total_s(), 1)})
            )
        # The plain name is a link for readers of the weights; a resume reads the tagged pair.
        link = self.weights.with_suffix(".link")
        link.unlink(missing_ok=True)
        link.symlink_to(self.weights.with_suffix(f".{tag}").name)
        os.replace(link, self.weights)
        for path in (self.weights, self._moments):
            for file in path.parent.glob(f"{path.stem}.[0-9]*.safetensors"):
                if file != path.with_suffix(f".{tag}"):
                    file.unlink()

    def _total_s(self) -> float:
        return self._spent_s + time.monotonic() - self._started_s
