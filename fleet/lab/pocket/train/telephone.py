"""Training of the audio tower to hear speech over a telephone as it hears the same speech in the
whole band.

Starts from the tower of `joint`, which also is the teacher: its rows for a clip are the target for
the clip's telephone sound, and for the clip itself, so that nothing is lost. The Thinker reads the
same rows as before and is not trained.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn

from fleet.core.errors import ConfigError
from fleet.lab.pocket.hearing.augment import at_microphone, over_telephone, through_g711
from fleet.lab.pocket.hearing.features import log_mel
from fleet.lab.pocket.hearing.recordings import load
from fleet.lab.pocket.train.hearing import Batches, evenly, to_float
from fleet.lab.pocket.train.loop import Loss, Schedule
from fleet.lab.pocket.train.tower import Hearing, compute_states, positions

TELEPHONE_SHARE = 0.7
"""Share of clips that the trained tower receives over a telephone."""
NUM_HELD_OUT = 32

SCHEDULE = Schedule(
    steps=1200, learning_rate=5e-4, warmup=60, weight_decay=0.01, evaluate_every=100
)

Clips = Sequence[NDArray[np.float32]]


class TelephoneTower(nn.Module):
    """Module of the trained tower, with weights named as in `Hearing`."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.audio_tower: Any = Hearing(seed).audio_tower


class TelephonePart:
    """Trainable part: the audio tower, whose teacher is a frozen copy of its weights after the
    joint training.

    Raises: ConfigError if `joint` is not trained yet.
    """

    name = "telephone"

    def __init__(self, recordings: Path, parts: Path, seed: int) -> None:
        self.module = TelephoneTower(seed)
        self.module.load_state_dict(load_tower(parts))
        self._teacher = deepcopy(self.module.audio_tower).requires_grad_(False)
        known = load(recordings, "train").all()
        self._others = [each.samples for each in known]
        self._batches = Batches(known)
        held_out = evenly(load(recordings, "held_out").all(), NUM_HELD_OUT)
        self._exam = [to_float(each) for each in held_out]

    def loss(self, rng: np.random.Generator, step: int) -> Loss:
        """Return the tower's distance from the teacher for a random batch, most of whose clips come
        over a telephone. The statistic `clips` is the number of recordings in the batch.
        """
        clips = [at_microphone(each.samples, self._others, rng) for each in self._batches.draw(rng)]
        received = [
            over_telephone(each, rng) if rng.random() < TELEPHONE_SHARE else each for each in clips
        ]
        return self._distance(received, clips), {"clips": len(clips)}

    def evaluate(self) -> Mapping[str, float]:
        """Return the tower's distances from the teacher for held-out clips: `whole_band` for the
        clips themselves, `g711` for the same clips in G.711.
        """
        over_g711 = [through_g711(each, "mu") for each in self._exam]
        received = {"whole_band": self._exam, "g711": over_g711}
        return {name: float(self._distance(clips, self._exam)) for name, clips in received.items()}

    def _distance(self, received: Clips, clips: Clips) -> Tensor:
        """Return how far the tower's rows for `received` are from the teacher's rows for `clips`,
        the same sound: mean square of the difference over the variance of the teacher's rows.
        """
        self._teacher.to(torch.get_default_device())
        with torch.no_grad():
            wanted = rows(self._teacher, clips)
        found = rows(self.module.audio_tower, received)
        variance = (wanted - wanted.mean(0)).square().mean()
        return (found - wanted).square().mean() / variance


def rows(tower: Any, clips: Clips) -> Tensor:
    """Return the tower's rows for all clips, one after the other.

    Shapes: positions of all clips x width of the Thinker.
    """
    batch = log_mel(clips)
    states = compute_states(tower, batch)
    has_sound = torch.arange(states.shape[1]) < positions(batch.num_frames)[:, None]
    return tower.proj2(states[has_sound])


def load_tower(parts: Path) -> dict[str, Tensor]:
    """Return the weights of the audio tower after the joint training. Raises: ConfigError if
    `joint` is not trained yet.
    """
    file = parts / "joint.safetensors"
    if not file.is_file():
        raise ConfigError(f"{file} is missing; train joint first", param="parts")
    return {
        name: value for name, value in load_file(file).items() if name.startswith("audio_tower.")
    }
