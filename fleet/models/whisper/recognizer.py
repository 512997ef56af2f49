"""Whisper in torch behind the recogniser's batch loop: language detection, suppressed tokens,
timestamps.

Source: transformers 5.23, generation/logits_process.py (`WhisperTimeStampLogitsProcessor`).
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fleet.core.errors import ConfigError
from fleet.engine.recognizer import (
    WindowDetails,
    WindowJob,
)
from fleet.engine.torch.build import ComputeDevice
from fleet.engine.torch.device import check_device
from fleet.engine.torch.noise import noise_key
from fleet.engine.torch.sampling import RowSampling, draw
from fleet.models.checkpoint import CheckpointReader
from fleet.models.whisper.alignment import token_begins
from fleet.models.whisper.config import read_sizes
from fleet.models.whisper.features import LogMel
from fleet.models.whisper.network import PREFIX, SpeechEncoder, TranscriptDecoder, WindowCache
from fleet.models.whisper.transcriber import (
    SAMPLES_PER_POSITION,
    SHORT_WINDOWS_S,
    WhisperTranscriber,
)
from fleet.processing.whisper_tokens import WhisperTokens

SALT = zlib.crc32(b"asr")
"""Constant of this stage, part of the key of sampling noise."""


@dataclass(slots=True, kw_only=True, eq=False)
class WhisperWindow:
    """State of a window. `logits`: logits after the last token, if computed already: float32 [1,
    V].
    """

    job: WindowJob
    cache: WindowCache
    tokens: list[int]
    logits: Tensor | None = None
    num_forced: int = 0
    """1 if `tokens` begins with the detected language, which belongs to `prefix` too; otherwise 0.
    """
    prefix: tuple[int, ...] = ()
    """Tokens that the decoder reads before the sampled tokens: the request's prompt, and the tokens
    for start, language, task and timestamps.
    """

    @property
    def sampled(self) -> list[int]:
        return self.tokens[self.num_forced :]


class WhisperRecognizer(WhisperTranscriber[WhisperWindow]):
    """The network in torch."""

    def __init__(
        self,
        reader: CheckpointReader,
        folder: Path,
        where: ComputeDevice,
        window_sizes_s: Sequence[int] = SHORT_WINDOWS_S,
    ) -> None:
        sizes = read_sizes(folder)
        super().__init__(folder, sizes, window_sizes_s)
        self._encoder, self._decoder = (
            SpeechEncoder(reader, sizes),
            TranscriptDecoder(reader, sizes),
        )
        self._mel = LogMel(sizes.num_mels, where.device)
        self._heads, self._filter_width = sizes.alignment_heads, sizes.filter_width
        self._device = where.device
        self._suppressed_V = _minus_inf(self._tokens.suppressed, self._decoder.num_tokens, where)

    @torch.inference_mode()
    def open(self, job: WindowJob) -> WhisperWindow:
        features = self._mel.of(job.samples, job.num_samples)
        cache = self._decoder.open(self._encoder.encode(features))
        tokens = list(job.known)
        language = self._tokens.language_id(job.language) if job.language else None
        detected = self._tokens.languages and language is None
        if detected and not tokens:
            tokens = [self._detect(cache)]
        if detected:
            language = tokens[0]
        window = WhisperWindow(job=job, cache=cache, tokens=tokens, num_forced=int(bool(detected)))
        window.prefix = (*self._prompt(job), *self._prefix(language, timed=job.timed))
        window.logits = self._decoder.next_logits([cache], [[*window.prefix, *window.sampled]])
        return window

    @torch.inference_mode()
    def advance(self, windows: Sequence[WhisperWindow]) -> None:
        behind = [window for window in windows if window.logits is None]
        if behind:
            logits_NV = self._decoder.next_logits(
                [window.cache for window in behind], [window.tokens[-1:] for window in behind]
            )
            for window, logits in zip(behind, logits_NV, strict=True):
                window.logits = logits[None]
        logits_NV = torch.cat([window.logits for window in windows if window.logits is not None])
        for row, window in zip(logits_NV, windows, strict=True):
            self._mask(row, window.job, window.sampled)
        rows = [self._row_sampling(window) for window in windows]
        drawn = draw(logits_NV, rows, one_by_one=True).tolist()
        for token, window in zip(drawn, windows, strict=True):
            window.logits = None
            # Logits that are not finite have no best token.
            window.tokens.append(token if token >= 0 else self._tokens.end)

    @torch.inference_mode()
    def details(self, window: WhisperWindow, tokens: Sequence[int]) -> WindowDetails:
        sampled = list(tokens[window.num_forced :])
        first, ids = len(window.prefix), [*window.prefix, *sampled][: self._positions]
        logits_NV, weights_HNA = self._decoder.attention(window.cache, ids, self._heads)
        num_positions = max(1, len(window.job.samples) // SAMPLES_PER_POSITION)
        begins = token_begins(weights_HNA[:, first - 1 :, :num_positions], self._filter_width)
        start = window.prefix.index(self._tokens.start)
        no_speech = float(logits_NV[start].softmax(-1)[self._tokens.no_speech])
        logprobs = [0.0] * window.num_forced
        for number, token in enumerate(sampled):
            row_V = logits_NV[first + number - 1]
            self._mask(row_V, window.job, sampled[:number])
            logprobs.append(float(row_V.log_softmax(-1)[token]))
        if list(tokens) != window.tokens:
            logprobs[-1] = float("nan")
        num_cut = first + len(sampled) - len(ids)
        begins = np.pad(np.pad(begins, (window.num_forced, 0)), (0, num_cut), "edge")
        begins, ends = self._word_times(window.job, tokens, begins * SAMPLES_PER_POSITION)
        return WindowDetails(
            begins=begins,
            ends=ends,
            logprobs=np.array(logprobs, np.float32),
            no_speech=no_speech,
        )

    def check(self) -> None:
        check_device(self._device)

    def _detect(self, cache: WindowCache) -> int:
        """Return the token of the language that the decoder finds most likely."""
        logits_V = self._decoder.next_logits([cache], [[self._tokens.start]])[0]
        cache.num_rows = 0
        ids = torch.tensor(sorted(self._tokens.languages.values()), device=self._device)
        return int(ids[logits_V[ids].argmax()])

    def _mask(self, logits_V: Tensor, job: WindowJob, sampled: Sequence[int]) -> None:
        """Set the logits of tokens that may not follow to -inf, in place. `sampled`: tokens of the
        window so far, without its prefix.
        """
        logits_V += self._suppressed_V
        if not sampled:
            logits_V[list(self._tokens.suppressed_first)] = -torch.inf
        if job.timed:
            mask_timestamps(logits_V, sampled, self._tokens)

    def _row_sampling(self, window: WhisperWindow) -> RowSampling:
        sampling, (clip, first_sample) = window.job.sampling, window.job.place
        index = first_sample * self._positions + len(window.tokens)
        return RowSampling(sampling=sampling, noise_key=noise_key(sampling.seed, SALT, clip, index))


def mask_timestamps(logits_V: Tensor, sampled: Sequence[int], tokens: WhisperTokens) -> None:
    """Set the logits of tokens that break the order of timestamps to -inf, in place. Timestamps
    come in pairs, do not decrease, and begin a window. A timestamp must follow if all timestamps
    together are likelier than any text token.
    """
    first = tokens.timestamp_begin
    logits_V[tokens.no_timestamps] = -torch.inf
    last_is_time = bool(sampled) and sampled[-1] >= first
    before_is_time = len(sampled) < 2 or sampled[-2] >= first
    if last_is_time and before_is_time:
        logits_V[first:] = -torch.inf
    elif last_is_time:
        logits_V[: tokens.end] = -torch.inf
    times = [token for token in sampled if token >= first]
    if times:
        may_repeat = last_is_time and not before_is_time
        logits_V[first : times[-1] + (0 if may_repeat else 1)] = -torch.inf
    if not sampled:
        logits_V[:first] = -torch.inf
        if tokens.last_first_timestamp is not None:
            logits_V[tokens.last_first_timestamp + 1 :] = -torch.inf
    if logits_V[first:].logsumexp(0) > logits_V[:first].max():
        logits_V[:first] = -torch.inf


def load_recognizer(
    folder: Path,
    where: ComputeDevice,
    *,
    window_sizes_s: Sequence[int] = SHORT_WINDOWS_S,
    progress: Callable[[float], None] = lambda _: None,
) -> tuple[WhisperRecognizer, tuple[str, ...]]:
    """Load a checkpoint; return the recogniser and the names of its weights. `progress`: function
    called with the loaded share, 0 to 1. Raises: ConfigError if the folder is not a Whisper
    checkpoint.
    """
    read_sizes(folder)
    reader = CheckpointReader(folder, device=where.device, dtype=where.dtype)
    reader.report_to(progress, reader.under(PREFIX))
    return WhisperRecognizer(reader, folder, where, window_sizes_s), tuple(reader.names)


def _minus_inf(ids: Sequence[int], num_tokens: int, where: ComputeDevice) -> Tensor:
    """Return -inf at `ids`, else 0: float32 [V]. Raises: ConfigError for an id without a logit."""
    if any(not 0 <= token < num_tokens for token in ids):
        raise ConfigError(
            f"generation_config.json suppresses token {max(ids)}, but the model has {num_tokens}; "
            "the files are of different models",
            param="checkpoint",
        )
    suppressed_V = torch.zeros(num_tokens, device=where.device)
    suppressed_V[list(ids)] = -torch.inf
    return suppressed_V
