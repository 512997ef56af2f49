"""The frontend of Qwen3-Omni: ChatML with audio inside the turns, text and speech out.

Source: transformers 5.23, models/qwen3_omni_moe/processing_qwen3_omni_moe.py and
modeling_qwen3_omni_moe.py.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from fleet.config.schema import Limits
from fleet.core.errors import BadInput, ConfigError, UnsupportedValue, quoted
from fleet.core.request import RequestSpec
from fleet.processing.base import ChatRequest
from fleet.processing.clips import clip_blob, clip_table, decode_clips
from fleet.processing.prompt import PromptFrontend
from fleet.processing.sampling_defaults import read_checkpoint_sampling
from fleet.processing.template import read_json

ANSWER_RATE_HZ = 24_000
"""Code2Wav's output rate; the checkpoint's config does not carry it."""
DEFAULT_SPEAKER = "ethan"
"""Default voice, as in `generate(speaker=...)` of `transformers`."""
VOICE_PARAM = "voice"
"""The key of `RequestSpec.params` that the Talker reads its speaker from."""

TRANSCRIBE = "Please transcribe the audio."
LANGUAGES: Mapping[str, str] = {
    "en": "English",
    "zh": "Chinese",
    "ko": "Korean",
    "ja": "Japanese",
    "de": "German",
    "ru": "Russian",
    "it": "Italian",
    "fr": "French",
    "es": "Spanish",
    "pt": "Portuguese",
    "ms": "Malay",
    "nl": "Dutch",
    "id": "Indonesian",
    "tr": "Turkish",
    "vi": "Vietnamese",
    "yue": "Cantonese",
    "ar": "Arabic",
    "ur": "Urdu",
}
"""Languages of speech input, by ISO code. Source: Qwen3-Omni's model card."""

_MEDIA_KEYS = tuple(
    f"{name}_token_id"
    for name in (
        "audio",
        "audio_start",
        "audio_end",
        "image",
        "video",
        "vision_start",
        "vision_end",
    )
)
"""Keys of the Thinker's configuration with the tokens that stand for audio, images or video."""

_ALIASES_OF = {
    ("chelsie", "ethan"): ("alloy", "coral", "marin", "nova", "sage", "shimmer"),
    ("ethan", "aiden", "chelsie"): ("ash", "cedar", "onyx"),
    ("aiden", "ethan", "chelsie"): ("ballad", "echo", "fable", "verse"),
}
VOICE_ALIASES: Mapping[str, tuple[str, ...]] = {
    name: speakers for speakers, names in _ALIASES_OF.items() for name in names
}
"""OpenAI's voice names -> speakers in order of preference; the first that the checkpoint has is
used.
"""


class OmniFrontend(PromptFrontend):
    """Prompt processing of one Qwen3-Omni checkpoint. Raises: ConfigError if the checkpoint lacks
    the tokenizer, the chat template or a needed token id.
    """

    sample_rate_hz = ANSWER_RATE_HZ

    def __init__(self, checkpoint: Path, limits: Limits) -> None:
        super().__init__(checkpoint, limits)
        config = read_json(checkpoint / "config.json")
        thinker, talker = _section(config, "thinker_config"), _section(config, "talker_config")
        features = read_json(checkpoint / "preprocessor_config.json")
        self._audio_id = _integer(thinker, "audio_token_id", None)
        self._media_ids = frozenset(_integer(thinker, key, self._audio_id) for key in _MEDIA_KEYS)
        self._n_window = _integer(_section(thinker, "audio_config"), "n_window", 50)
        self.audio_rate_hz = _integer(features, "sampling_rate", 16_000)
        self._hop_samples = _integer(features, "hop_length", 160)
        self._samples_per_frame = _samples_per_frame(_section(config, "code2wav_config"))
        self._sampling = {
            "thinker": read_checkpoint_sampling(checkpoint),
            "talker": read_checkpoint_sampling(checkpoint, "talker_"),
        }
        self._speakers = sorted(str(name) for name in _section(talker, "speaker_id"))
        self._languages = _languages(checkpoint)

    def prepare(self, chat: ChatRequest) -> tuple[RequestSpec, bytes | None]:
        voice = self.voice(chat.voice, chat.voice_where)
        clips = decode_clips(chat, rate_hz=self.audio_rate_hz, max_audio_s=self.limits.max_audio_s)
        ids = self.tokenize(chat)
        lengths = [len(clip) for clip in clips]
        positions = num_audio_positions(
            lengths, n_window=self._n_window, hop_samples=self._hop_samples
        )
        expanded = _expand(ids, self._audio_id, positions)
        self.check_length(expanded, chat.where)
        spec = RequestSpec(
            id=chat.id,
            graph=chat.graph,
            prompt_ids=tuple(expanded),
            audio=clip_table(clips, self.audio_rate_hz),
            outputs=chat.outputs,
            sampling=chat.sampling,
            params={VOICE_PARAM: voice} if chat.spoken else {},
            given=self.given_ids(chat.given),
            created_us=chat.created_us,
        )
        return spec, clip_blob(clips)

    def _is_audio(self, control: str) -> bool:
        return control == self._controls.get(self._audio_id)

    def speech_prompt(self, text: str) -> str:
        """Return a fixed user turn that asks for the text to be spoken. The Talker reads the turn
        too, and the checkpoint Pocket was trained on this one.
        """
        return f"Repeat after me: {text}"

    def transcription_prompt(self, language: str | None = None, where: str = "language") -> str:
        """Return a question that asks for a transcription.

        With a language, the question is from Qwen3-Omni's model card. Without one, or if the
        checkpoint has a single language, the question is one that the checkpoint Pocket was trained
        on and other models understand.
        """
        if language is None:
            return TRANSCRIBE
        name = self._language(language, where)
        return (
            TRANSCRIBE if len(self._languages) == 1 else f"Transcribe the {name} audio into text."
        )

    def _language(self, given: str, where: str) -> str:
        """Return the English name of a language given as a code or a name. Raises:
        UnsupportedValue.
        """
        code = re.split("[-_]", given.strip().lower())[0]
        for known, name in self._languages.items():
            if code == known or given.strip().lower() == name.lower():
                return name
        listed = ", ".join(self._languages)
        raise UnsupportedValue(
            f"{where}: {quoted(given)} is none of the languages that this model transcribes: "
            f"{listed}",
            param=where,
        )

    def languages(self) -> list[str]:
        return list(self._languages)

    def voices(self) -> list[str]:
        return sorted(self._speakers, key=lambda name: (name != DEFAULT_SPEAKER, name))

    def sampling(self) -> Mapping[str, Mapping[str, float | int]]:
        return self._sampling

    def num_prompt_audio_tokens(self, spec: RequestSpec) -> int:
        return spec.prompt_ids.count(self._audio_id)

    def num_answer_audio_tokens(self, num_samples: int) -> int:
        return -(-num_samples // self._samples_per_frame)

    def voice(self, wanted: str | None, where: str = "audio.voice") -> str:
        name = (wanted or DEFAULT_SPEAKER).lower()
        if name in self._speakers:
            return name
        if wanted is None or name in VOICE_ALIASES:
            preferred = (
                speaker for speaker in VOICE_ALIASES.get(name, ()) if speaker in self._speakers
            )
            return next(preferred, self._speakers[0] if self._speakers else "")
        known = ", ".join(self._speakers)
        raise BadInput(f"{where}: no voice {quoted(wanted)}; use one of {known}", param=where)


def num_audio_positions(
    lengths: Sequence[int], *, n_window: int = 50, hop_samples: int = 160
) -> list[int]:
    """Return the number of prompt positions of each clip, as the model's processor computes it for
    the clips of one request padded to the longest.

    `lengths`: lengths of the clips in samples at 16 kHz; `hop_samples`: hop of the mel spectrogram;
    `n_window`: half the number of mel frames in one chunk of the audio encoder.
    A clip shorter than the longest keeps its last partial hop; the longest loses it. Source:
    `_process_audio`, `_get_feat_extract_output_lengths`, and the mask in
    `WhisperFeatureExtractor.__call__`.
    """
    longest = max(lengths, default=0)
    frames = [min(-(-length // hop_samples), longest // hop_samples) for length in lengths]
    return [_encoder_positions(count, n_window) for count in frames]


def _encoder_positions(num_frames: int, n_window: int) -> int:
    chunks, tail = divmod(num_frames, 2 * n_window)
    for _ in range(3):  # three convolutions of stride 2
        tail = (tail - 1) // 2 + 1
    return tail + 13 * chunks


def _expand(ids: Sequence[int], audio_id: int, positions: Sequence[int]) -> list[int]:
    if ids.count(audio_id) != len(positions):
        raise BadInput(
            "messages: the chat template drops an audio part; put audio in user messages",
            param="messages",
        )
    counts = iter(positions)
    expanded: list[int] = []
    for token in ids:
        expanded.extend([token] * next(counts) if token == audio_id else [token])
    return expanded


def _samples_per_frame(code2wav: Mapping[str, object]) -> int:
    rates = (code2wav.get(key) for key in ("upsample_rates", "upsampling_ratios"))
    return math.prod(int(str(rate)) for each in rates if isinstance(each, list) for rate in each)


def _languages(checkpoint: Path) -> Mapping[str, str]:
    """Return the languages that a checkpoint transcribes: `languages` in examples.json, a file that
    Fleet adds to a checkpoint, or all of the model's.
    """
    listed = read_json(checkpoint / "examples.json").get("languages")
    if listed is None:
        return LANGUAGES
    if not isinstance(listed, list) or not listed or not set(map(str, listed)) <= LANGUAGES.keys():
        message = (
            f"{checkpoint / 'examples.json'}: languages must be a list of codes, such as "
            f"{', '.join(LANGUAGES)}"
        )
        raise ConfigError(message, param="checkpoint")
    return {str(code): LANGUAGES[str(code)] for code in listed}


def _section(config: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = config.get(name)
    return value if isinstance(value, dict) else {}


def _integer(section: Mapping[str, object], name: str, default: int | None) -> int:
    value = section.get(name, default)
    if not isinstance(value, int):
        raise ConfigError(f"the checkpoint's config has no number {name!r}", param="checkpoint")
    return value
