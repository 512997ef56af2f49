"""Whisper on CTranslate2 behind the recogniser's batch loop. A window's tokens are sampled in one
call, and revealed one by one.

Each window is sampled alone, since the loop opens one per step: its tokens do not depend on other
windows, so the engine has invariant numerics as it is. With a temperature the draws are
CTranslate2's own: a window that is lost before it is sent is drawn anew, and a seed has no effect.
Source: ctranslate2 4.8, python/ctranslate2 (`models.Whisper`, `converters.TransformersConverter`).
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fleet.core.errors import BadInput, ConfigError
from fleet.engine.recognizer import LANGUAGE, WindowDetails, WindowJob
from fleet.models.whisper.config import read_sizes
from fleet.models.whisper.features import LogMel
from fleet.models.whisper.transcriber import (
    SAMPLES_PER_POSITION,
    SHORT_WINDOWS_S,
    WhisperTranscriber,
)

CONVERTED = "ctranslate2"
"""Sub-folder of a checkpoint with the model in CTranslate2's form, if it is converted already:
`ct2-transformers-converter --model FOLDER --output_dir FOLDER/ctranslate2`.
"""
COMPUTE_TYPES = ("int8", "float32", "bfloat16", "float16", "int8_float32", "int8_bfloat16", "int16")
LATE_POSITIONS = 8
"""Number of audio positions added to the beginnings of tokens that CTranslate2 finds. Its alignment
reads the rows that predict the tokens, which find beginnings too early (see `alignment.py`), and
cannot read the tokens' own rows. Measured together with `word_times.py`.
"""


@dataclass(slots=True, kw_only=True, eq=False)
class ConvertedWindow:
    """State of a window. `audio_AW`: encoder rows. `tokens`: the known tokens, and the sampled
    tokens that were revealed. `num_forced`: 1 if `tokens` begins with the detected language, else
    0. `sampled`: all tokens after the known ones, revealed or not; None before they are sampled.
    """

    job: WindowJob
    audio_AW: NDArray[np.float32]
    tokens: list[int]
    prefix: tuple[int, ...]
    num_forced: int
    no_speech: float = 0.0
    sampled: list[int] | None = None
    num_revealed: int = 0


class ConvertedRecognizer(WhisperTranscriber[ConvertedWindow]):
    """A converted model on the CPU. `threads`: threads of one call. `compute_type`: type in which
    CTranslate2 computes.
    """

    def __init__(
        self,
        folder: Path,
        *,
        threads: int,
        compute_type: str,
        window_sizes_s: Sequence[int] = SHORT_WINDOWS_S,
    ) -> None:
        sizes = read_sizes(folder)
        super().__init__(folder, sizes, window_sizes_s)
        self._library = library()
        self._model = _load(self._library, folder, threads, compute_type)
        self._mel = LogMel(sizes.num_mels, torch.device("cpu"))
        self._filter_width = sizes.filter_width
        self._limit = sizes.text_positions

    def check_request(self, params: Mapping[str, str]) -> None:
        """Check a request as for any engine. A request without a language is also refused if
        CTranslate2 cannot detect one, because the vocabulary is small, as in a tiny checkpoint.
        Raises: BadInput.
        """
        super().check_request(params)
        if self._tokens.languages and not params.get(LANGUAGE) and not self._model.is_multilingual:
            raise BadInput(
                "language: CTranslate2 detects no language with a vocabulary as small as this "
                "checkpoint's; name the language, or use stages.asr.engine: torch",
                param="language",
            )

    def open(self, job: WindowJob) -> ConvertedWindow:
        features_1MF = self._mel.of(job.samples, job.num_samples).numpy()[None]
        audio = self._model.encode(self._view(features_1MF), to_cpu=True)
        tokens = list(job.known)
        language = self._tokens.language_id(job.language) if job.language else None
        detected = bool(self._tokens.languages) and language is None
        if detected and not tokens:
            tokens = [self._detect(audio)]
        if detected:
            language = tokens[0]
        return ConvertedWindow(
            job=job,
            audio_AW=np.array(audio, np.float32)[0],
            tokens=tokens,
            prefix=(*self._prompt(job), *self._prefix(language, timed=job.timed)),
            num_forced=int(detected),
        )

    def advance(self, windows: Sequence[ConvertedWindow]) -> None:
        for window in windows:
            if window.sampled is None:
                window.sampled = self._sample(window)
            more = window.sampled[window.num_revealed : window.num_revealed + 1]
            window.tokens += more or [self._tokens.end]
            window.num_revealed += 1

    def details(self, window: ConvertedWindow, tokens: Sequence[int]) -> WindowDetails:
        text = [token for token in tokens if token < self._tokens.end]
        first = window.prefix.index(self._tokens.start)
        begins = np.zeros(len(tokens))
        probabilities = np.ones(len(tokens))
        if text:
            named = [one for one in window.prefix[first:] if one != self._tokens.no_timestamps]
            (found,) = self._model.align(
                self._view(window.audio_AW[None]),
                named,
                [text],
                max(2, 2 * (len(window.job.samples) // SAMPLES_PER_POSITION)),
                median_filter_width=self._filter_width,
            )
            places = [n for n, token in enumerate(tokens) if token < self._tokens.end]
            probabilities[places] = found.text_token_probs
            begins = _begins(found.alignments, places, len(tokens))
        last = window.job.num_samples // SAMPLES_PER_POSITION
        shifted = np.where(begins > 0, begins + LATE_POSITIONS, 0).clip(max=last)
        logprobs = np.log(probabilities.clip(min=1e-10)).astype(np.float32)
        logprobs[-1] = np.nan
        begins, ends = self._word_times(window.job, tokens, shifted * SAMPLES_PER_POSITION)
        return WindowDetails(
            begins=begins,
            ends=ends,
            logprobs=logprobs if text else np.zeros(len(tokens), np.float32),
            no_speech=window.no_speech,
        )

    def check(self) -> None: ...

    def _sample(self, window: ConvertedWindow) -> list[int]:
        """Sample all tokens that follow the known ones, and note the probability of no speech."""
        temperature = window.job.sampling.temperature
        (result,) = self._model.generate(
            self._view(window.audio_AW[None]),
            [[*window.prefix, *window.tokens[window.num_forced :]]],
            beam_size=1,
            max_length=self._limit,
            return_no_speech_prob=True,
            sampling_topk=0 if temperature else 1,
            sampling_temperature=temperature or 1.0,
            max_initial_timestamp_index=self._last_first_timestamp,
        )
        window.no_speech = float(result.no_speech_prob)
        return [*result.sequences_ids[0], self._tokens.end]

    @property
    def _last_first_timestamp(self) -> int:
        last = self._tokens.last_first_timestamp
        return 50 if last is None else last - self._tokens.timestamp_begin

    def _detect(self, audio: object) -> int:
        """Return the token of the language that the decoder finds most likely."""
        ((best, _), *_), *_ = self._model.detect_language(audio)
        return self._tokens.languages[best.strip("<|>")]

    def _view(self, array: NDArray[np.float32]) -> Any:
        return self._library.StorageView.from_array(np.ascontiguousarray(array))


def _begins(
    pairs: Sequence[tuple[int, int]], places: Sequence[int], num_tokens: int
) -> NDArray[np.float64]:
    """Return the first audio position of each token. A token that is no text begins with the next
    text token, or where the text ends. `pairs`: (index of a text token, audio position), ascending.
    `places`: index of each text token among all tokens.
    """
    reached: dict[int, int] = {}
    for index, position in pairs:
        reached.setdefault(index, position)
    end = max(position for _, position in pairs) if pairs else 0
    begins = np.full(num_tokens, np.nan)
    for index, place in enumerate(places):
        begins[place] = reached.get(index, end)
    begins[-1] = reached.get(len(places), end)
    for place in range(num_tokens - 2, -1, -1):
        if np.isnan(begins[place]):
            begins[place] = begins[place + 1]
    return np.maximum.accumulate(begins)


def library() -> Any:
    """Import CTranslate2. Raises: ConfigError naming the extra."""
    try:
        return import_module("ctranslate2")
    except ImportError as error:
        raise ConfigError(
            "stages.asr.engine: ctranslate2 is not installed; install fleet-serving[voice], "
            "or use torch",
            param="stages.asr.engine",
        ) from error


def _load(library: Any, folder: Path, threads: int, compute_type: str) -> Any:
    how = {"device": "cpu", "compute_type": compute_type, "intra_threads": threads}
    converted = folder / CONVERTED
    if (converted / "model.bin").is_file():
        return library.models.Whisper(str(converted), **how)
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / CONVERTED
        converter = library.converters.TransformersConverter(str(folder))
        converter.convert(str(target), quantization=_stored_as(compute_type))
        return library.models.Whisper(str(target), **how)


def _stored_as(compute_type: str) -> str | None:
    return None if compute_type == "float32" else compute_type
