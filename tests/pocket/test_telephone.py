"""Telephone sound in Pocket's training: what G.711 leaves of a clip, and a tower that learns to
hear it as it hears the whole band.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from fleet.cli.checkpoint import resolve_checkpoint
from fleet.config import load_config
from fleet.core.errors import ConfigError
from fleet.lab.pocket.hearing import recordings
from fleet.lab.pocket.hearing.augment import augment, over_telephone, through_g711
from fleet.lab.pocket.recipe import RecipeOptions, run_steps
from fleet.lab.pocket.train.loop import Schedule, train
from fleet.lab.pocket.train.telephone import TelephonePart
from fleet.lab.pocket.train.tower import Hearing
from fleet.processing.g711 import Law

RATE_HZ = recordings.SAMPLE_RATE_HZ
Samples = NDArray[np.float32]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recordings")
    for kind in ("train", "held_out"):
        recordings.make_shard(folder, kind, 0, num_dialogues=13, num_sentences=3)
    return folder


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """Weights of a tower that was not trained."""
    save_file(Hearing(seed=1).state_dict(), tmp_path / "joint.safetensors")
    return tmp_path


def noise() -> Samples:
    samples = np.random.default_rng(1).standard_normal(2 * RATE_HZ + 1)
    return (0.1 * samples).astype(np.float32)


def level_db(samples: Samples, low_hz: float, high_hz: float) -> float:
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples)))) ** 2
    hz = np.fft.rfftfreq(len(samples), 1 / RATE_HZ)
    return float(10 * np.log10(spectrum[(hz >= low_hz) & (hz < high_hz)].mean()))


@pytest.mark.parametrize("law", ["mu", "a"])
@pytest.mark.parametrize("quality", ["MQ", "HQ"])
def test_g711_keeps_speech_band_and_nothing_above(law: Law, quality: str) -> None:
    sent = noise()
    received = through_g711(sent, law, quality)
    assert received.shape == sent.shape and received.dtype == np.float32
    assert level_db(received, 300, 3400) == pytest.approx(level_db(sent, 300, 3400), abs=0.2)
    assert level_db(received, 4600, 8000) < level_db(sent, 4600, 8000) - 50


def test_telephone_lines_differ_by_seed_only() -> None:
    sent = noise()
    received = [over_telephone(sent, np.random.default_rng(seed)) for seed in range(20)]
    assert len({each.tobytes() for each in received}) > 4, "only laws and qualities differ"
    assert np.array_equal(received[3], over_telephone(sent, np.random.default_rng(3)))
    low_db = [level_db(each, 0, 100) for each in received]
    assert max(low_db) - min(low_db) > 10, "no line lacks the low tones, or each does"


def test_augmented_clips_include_telephone_sound() -> None:
    """Of augmented clips some have nothing above 4.6 kHz, and most do."""
    clip = (noise() * 32_767).astype(np.int16)
    clips = [augment(clip, [clip], np.random.default_rng(seed)) for seed in range(60)]
    narrow = [level_db(each, 4600, 8000) < level_db(each, 500, 3000) - 40 for each in clips]
    assert 4 <= sum(narrow) <= 30


@torch.no_grad()
def test_tower_is_its_own_teacher_at_first(folder: Path, parts: Path) -> None:
    found = TelephonePart(folder, parts, seed=2).evaluate()
    assert found["whole_band"] < 1e-9 and found["g711"] > 0.01


def test_trained_tower_hears_telephone_more_like_whole_band(folder: Path, parts: Path) -> None:
    part = TelephonePart(folder, parts, seed=2)
    before = found(part)
    schedule = Schedule(steps=5, learning_rate=3e-5, warmup=1, evaluate_every=5)
    weights = load_file(train(part, parts, schedule, seed=1))
    after = found(part)
    assert after["g711"] < 0.9 * before["g711"] and after["whole_band"] < before["g711"]
    assert weights.keys() == part.module.state_dict().keys()
    assert all(name.startswith("audio_tower.") for name in weights)


@torch.no_grad()
def found(part: TelephonePart) -> Mapping[str, float]:
    return part.evaluate()


def test_telephone_training_without_joint_training_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="joint.safetensors is missing; train joint first"):
        TelephonePart(folder, tmp_path, seed=1)


def test_export_takes_parts_without_training_from_start(tmp_path: Path) -> None:
    """A tower trained on telephone sound is exported with the other parts of `start`; without it,
    the export equals `start`.
    """
    start = resolve_checkpoint(load_config(None, ()))
    work = RecipeOptions(folder=tmp_path, start=start)
    run_steps(work, ["export"])
    assert differing(start, tmp_path / "pocket") == set()
    tower = load_file(work.weights("telephone"))
    name = "audio_tower.proj2.bias"
    save_file(tower | {name: tower[name] + 1}, work.weights("telephone"))
    run_steps(work, ["export"])
    assert differing(start, tmp_path / "pocket") == {"thinker.audio_tower.proj2.bias"}


def differing(first: Path, second: Path) -> set[str]:
    """Return the names of the weights that two exported folders do not share."""
    old, new = (load_file(each / "model.safetensors") for each in (first, second))
    assert old.keys() == new.keys()
    return {name for name in old if not torch.equal(old[name], new[name])}
