"""The voice of a checkpoint folder, as its `voice.json` describes it.

`voice.json` has the kind of the model (`voice`: hibari or kokoro), the names of the voices, the
default one first (`voices`), and for Kokoro optionally the path of the model in the folder
(`model`).
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from fleet.core.errors import ConfigError
from fleet.models.voices.base import VoiceModel

FILE = "voice.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class VoiceFile:
    """Contents of `voice.json`. `voice`: kind of the model. `voices`: names, the default first."""

    voice: str
    voices: tuple[str, ...]
    model: str = "model.onnx"


def load_voice(folder: Path) -> VoiceModel:
    """Load the voice of a folder. Raises: ConfigError if the folder, a file of it or the package of
    the voice is missing or unusable.
    """
    described = read_voice_file(folder)
    try:
        if described.voice == "hibari":
            from fleet.models.voices.hibari import HibariVoice

            return HibariVoice(folder, described.voices)
        if described.voice == "kokoro":
            from fleet.models.voices.kokoro import KokoroVoice

            return KokoroVoice(folder, described.voices, described.model)
    except ImportError as error:
        raise ConfigError(
            f"checkpoint {folder}: its voice {described.voice} needs the package hibari-tts "
            f"({error}); install it with pip install 'fleet-serving[voice]'",
            param="checkpoint",
        ) from error
    raise ConfigError(
        f"checkpoint {folder}: {FILE} names the voice {described.voice!r}; use hibari or kokoro",
        param="checkpoint",
    )


def read_voice_file(folder: Path) -> VoiceFile:
    """Read the `voice.json` of a folder. Raises: ConfigError."""
    path = folder / FILE
    try:
        described = msgspec.json.decode(path.read_bytes(), type=VoiceFile)
    except FileNotFoundError as error:
        raise ConfigError(
            f"checkpoint {folder}: it has no {FILE}, which describes its voice, for example "
            '{"voice": "hibari", "voices": ["heart"]}',
            param="checkpoint",
        ) from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"checkpoint {folder}: {FILE}: {error}", param="checkpoint") from error
    if not described.voices:
        raise ConfigError(
            f"checkpoint {folder}: {FILE} has no voices; name at least one in its list voices",
            param="checkpoint",
        )
    return described
