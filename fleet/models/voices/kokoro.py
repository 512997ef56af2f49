"""Kokoro-82M (Apache-2.0) as an ONNX model with one file per voice, in the layout of
onnx-community/Kokoro-82M-v1.0-ONNX: `voices/NAME.bin` beside the model.

A voice is a table of style vectors, one for each number of phonemes. The model returns no
durations: the end of a word is estimated from its share of the clause's phonemes.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleet.core.errors import ConfigError
from fleet.models.voices.base import Speech, VoiceModel, VoiceName, find_voice
from fleet.models.voices.groups import speak_groups
from fleet.models.voices.phonemes import phoneme_ids, pronunciation
from fleet.models.voices.session import OnnxModel

STYLE_WIDTH = 256
LANGUAGES = {"a": "en-US", "b": "en-GB"}
"""Language of a voice by the first letter of its name. Voices with other first letters are refused,
since their languages have no pronunciation here.
"""


class KokoroVoice(VoiceModel):
    """The listed voices of Kokoro. `model`: path of the ONNX file in the folder. Raises:
    ConfigError if a file is missing or has another format.
    """

    sample_rate_hz = 24_000

    def __init__(self, folder: Path, names: Sequence[str], model: str) -> None:
        self._voices = [VoiceName(name=name, language=_language(name)) for name in names]
        self._styles = {name: _read_styles(folder / "voices" / f"{name}.bin") for name in names}
        path = folder / model
        if not path.is_file():
            raise ConfigError(
                f"checkpoint {folder}: it has no model {model}; name the ONNX file in the key "
                "model of voice.json",
                param="checkpoint",
            )
        self._model = OnnxModel(path.read_bytes(), path)
        self._inputs = _input_names(self._model, path)
        self._pronunciations = {
            language: pronunciation(british=language == "en-GB")
            for language in {voice.language for voice in self._voices}
        }

    def voices(self) -> Sequence[VoiceName]:
        return self._voices

    def synthesize(self, text: str, voice: str, *, speed: float, seed: int) -> Speech:
        """Speak `text`. `seed` has no effect: the model draws no noise from outside."""
        found = find_voice(self._voices, voice)
        words = self._pronunciations[found.language].words(text)
        styles = self._styles[found.name]
        return speak_groups(
            words,
            speed,
            self.sample_rate_hz,
            lambda group, model_speed: self._speak(group, styles, model_speed),
        )

    def _speak(
        self, words: Sequence[str], styles: NDArray[np.float32], speed: float
    ) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
        ids, ends = phoneme_ids(words)
        num_phonemes = len(ids) - 2
        if not num_phonemes:
            return np.zeros(0, np.float32), np.zeros(len(words))
        style = styles[min(num_phonemes, len(styles) - 1)][None]
        values = (np.array([ids], np.int64), style, np.array([speed], np.float32))
        wave, *_ = self._model.run(dict(zip(self._inputs, values, strict=True)))
        samples = wave.reshape(-1).astype(np.float32, copy=False)
        return samples, np.array(ends) * (len(samples) / len(ids))


def _language(name: str) -> str:
    if name[:1] not in LANGUAGES:
        raise ConfigError(
            f"checkpoint: Kokoro's voice {name!r} is not English; use voices whose names begin "
            "with a (American) or b (British)",
            param="checkpoint",
        )
    return LANGUAGES[name[:1]]


def _read_styles(path: Path) -> NDArray[np.float32]:
    """Read a voice: float32 [numbers of phonemes, `STYLE_WIDTH`]. Raises: ConfigError."""
    if not path.is_file():
        raise ConfigError(
            f"checkpoint: the voice {path.stem} needs the file {path}", param="checkpoint"
        )
    values = np.frombuffer(path.read_bytes(), np.float32)
    if not len(values) or len(values) % STYLE_WIDTH:
        raise ConfigError(
            f"checkpoint: {path} is no voice of Kokoro (rows of {STYLE_WIDTH} float32 numbers)",
            param="checkpoint",
        )
    return values.reshape(-1, STYLE_WIDTH)


def _input_names(model: OnnxModel, path: Path) -> tuple[str, str, str]:
    """Return the model's names of its inputs: ids, style and speed. Raises: ConfigError."""
    names = model.input_names
    for ids in ("input_ids", "tokens"):
        if names == {ids, "style", "speed"}:
            return ids, "style", "speed"
    raise ConfigError(
        f"checkpoint: {path} has the inputs {', '.join(sorted(names))}; Kokoro has input_ids (or "
        "tokens), style and speed",
        param="checkpoint",
    )
