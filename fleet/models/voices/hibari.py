"""hibari: small English voices distilled from Kokoro's (hibari-tts 0.2.1, Apache-2.0). The voice
`heart` is in the package; others are used if their files are in the checkpoint's folder.

The network takes phonemes and returns a spectrum, from which the package's signal processing makes
samples. Durations of phonemes are an inner tensor of the network, so the ends of words are exact.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from hibari import dsp
from hibari.voices import VOICES
from numpy.typing import NDArray

from fleet.core.errors import ConfigError
from fleet.models.voices.base import Speech, VoiceModel, VoiceName, find_voice
from fleet.models.voices.groups import speak_groups
from fleet.models.voices.phonemes import ASSETS, phoneme_ids, pronunciation
from fleet.models.voices.session import OnnxModel, with_output

DURATIONS = "/Clip_output_0"
"""Inner tensor with the duration of each phoneme in units of `UNIT_SAMPLES`, float32."""
UNIT_SAMPLES = 2 * dsp.HOP


class HibariVoice(VoiceModel):
    """The listed voices of hibari. Raises: ConfigError if a voice or its file is unknown."""

    sample_rate_hz = dsp.SR

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._voices = [VoiceName(name=name, language=_entry(name)["language"]) for name in names]
        self._models = {name: _open(folder, name) for name in names}
        self._pronunciations = {
            british: pronunciation(british=british)
            for british in {bool(_entry(name)["british"]) for name in names}
        }

    def voices(self) -> Sequence[VoiceName]:
        return self._voices

    def synthesize(self, text: str, voice: str, *, speed: float, seed: int) -> Speech:
        name = find_voice(self._voices, voice).name
        words = self._pronunciations[bool(_entry(name)["british"])].words(text)
        model, noise = self._models[name], np.random.default_rng(seed)
        return speak_groups(
            words,
            speed,
            self.sample_rate_hz,
            lambda group, model_speed: _speak(model, group, model_speed, noise),
        )


def _speak(
    model: OnnxModel,
    words: Sequence[str],
    speed: float,
    noise: np.random.Generator,
) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """Return the samples of words, and the sample at which each ends."""
    ids, ends = phoneme_ids(words)
    if len(ids) < 3:
        return np.zeros(0, np.float32), np.zeros(len(words))
    inputs = {"ids": np.array([ids], np.int64), "speed": np.array([speed], np.float32)}
    lh, theta, ln, lr, phi, f0, *more = model.run(inputs)
    samples = dsp.synth(lh[0], theta[0], ln[0], lr[0], phi[0], f0[0], noise)
    durations = more[0] * UNIT_SAMPLES if more else np.full(len(ids), len(samples) / len(ids))
    at = np.concatenate(([0.0], np.cumsum(durations, dtype=np.float64)))
    return samples.astype(np.float32, copy=False), at[ends]


def _entry(name: str) -> dict[str, str]:
    """Return hibari's description of a voice. Raises: ConfigError."""
    if name not in VOICES:
        raise ConfigError(
            f"checkpoint: hibari has no voice {name!r}; use some of {', '.join(VOICES)}",
            param="checkpoint",
        )
    return VOICES[name]


def _open(folder: Path, name: str) -> OnnxModel:
    """Open the model of a voice, with phoneme durations as another output if the model has the
    tensor `DURATIONS`. Raises: ConfigError, also if the file is not the published one.
    """
    path = _path(folder, name)
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != _entry(name)["sha256"]:
        raise ConfigError(
            f"checkpoint: {path} is not the file of hibari's voice {name} (its SHA-256 differs); "
            "fetch it again",
            param="checkpoint",
        )
    has_durations = DURATIONS.encode() in data
    return OnnxModel(with_output(data, DURATIONS) if has_durations else data, path)


def _path(folder: Path, name: str) -> Path:
    """Return the model file of a voice, in the package or the folder. Raises: ConfigError."""
    entry = _entry(name)
    places = [ASSETS] if entry.get("bundled") else [folder, folder / "voices"]
    for path in (place / entry["file"] for place in places):
        if path.is_file():
            return path
    raise ConfigError(
        f"checkpoint {folder}: hibari's voice {name} needs the file {entry['file']}, from "
        "huggingface.co/maureesewilliams/hibari, folder voices",
        param="checkpoint",
    )
