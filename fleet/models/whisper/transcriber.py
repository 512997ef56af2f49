"""What every engine of the Whisper family has in common: windows, forced prefix, prompt, and the
part of a window that counts. Computes nothing.

Source: transformers 5.23, models/whisper/generation_whisper.py (prefix, language, prompt).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleet.core.errors import BadInput
from fleet.engine.recognizer import (
    LANGUAGE,
    PROMPT,
    HeardWindow,
    RecognizerModel,
    WindowJob,
    WindowT,
)
from fleet.models.whisper.config import WhisperSizes
from fleet.models.whisper.features import HOP_SAMPLES, RATE_HZ
from fleet.models.whisper.word_times import FoundWords, place_words
from fleet.processing.tokenizer import load_tokenizer, token_ids
from fleet.processing.whisper_tokens import read_whisper_tokens
from fleet.processing.whisper_words import num_spoken_letters, text_parts, words_of

SHORT_WINDOWS_S = (8, 20)
"""Sizes of windows for speech that leaves much of the model's own window empty. An 8 s window costs
a fifth of one of 30 s, with the same transcript (20 sentences, WER 0.6 instead of 0.0 %).
"""
SAMPLES_PER_POSITION = 2 * HOP_SAMPLES
MIN_ADVANCE_S = 1.0
"""Shortest part of a timed window, in seconds, after which another window may begin. A window whose
last pair of timestamps is earlier counts as heard to its end, so that a clip takes a bounded number
of windows.
"""


class WhisperTranscriber(RecognizerModel[WindowT]):
    """A checkpoint's tokens and windows. `window_sizes_s`: seconds of each window size; the model's
    own window is always among them.
    """

    def __init__(self, folder: Path, sizes: WhisperSizes, window_sizes_s: Sequence[int]) -> None:
        self._tokens = read_whisper_tokens(folder)
        self._tokenizer = load_tokenizer(folder)
        self._positions = sizes.text_positions
        longest = sizes.audio_positions * SAMPLES_PER_POSITION
        shorter = {size for size_s in window_sizes_s if (size := size_s * RATE_HZ) < longest}
        self._window_sizes = (*sorted(shorter), longest)

    @property
    def rate_hz(self) -> int:
        return RATE_HZ

    @property
    def window_sizes(self) -> Sequence[int]:
        return self._window_sizes

    @property
    def end_token(self) -> int:
        return self._tokens.end

    def check_request(self, params: Mapping[str, str]) -> None:
        """Check a request's language and prompt. Raises: BadInput for a language that the
        checkpoint does not know, or for a prompt if the checkpoint has no token that begins one.
        """
        if params.get(LANGUAGE):
            self._tokens.language_id(params[LANGUAGE])
        if params.get(PROMPT) and self._tokens.start_of_previous is None:
            raise BadInput(
                "prompt: this recogniser's checkpoint has no token that begins a prompt; leave it "
                "out",
                param="prompt",
            )

    def max_tokens(self, job: WindowJob) -> int:
        return self._positions - len(self._prompt(job)) - len(self._prefix(0, timed=False))

    def hear(self, job: WindowJob, tokens: Sequence[int]) -> HeardWindow:
        """Return a window's tokens and the number of samples that they cover. In a timed window
        that does not end with a single timestamp, tokens after the last pair of timestamps belong
        to a cut sentence, and are dropped; the next window begins at the first timestamp of that
        pair.
        """
        end, first = self._tokens.end, self._tokens.timestamp_begin
        kept = list(tokens[:-1] if tokens and tokens[-1] == end else tokens)
        pairs = [at for at in range(1, len(kept)) if kept[at - 1] >= first and kept[at] >= first]
        ends_single = [token >= first for token in kept[-2:]] == [False, True]
        if job.timed and pairs and not ends_single:
            at = (kept[pairs[-1] - 1] - first) * SAMPLES_PER_POSITION
            if MIN_ADVANCE_S * RATE_HZ <= at < len(job.samples):
                return HeardWindow(tokens=(*kept[: pairs[-1] + 1], end), num_samples=at)
        return HeardWindow(tokens=(*kept, end), num_samples=len(job.samples))

    def language_of(self, tokens: Sequence[int]) -> str:
        languages = self._tokens.languages.items()
        return next((code for code, token in languages if token in tokens[:1]), "")

    def _word_times(
        self, job: WindowJob, tokens: Sequence[int], begins_N: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the samples of the window at which the word of each token begins and ends,
        ascending. A token outside of words begins and ends where the word before it ends.
        `begins_N`: sample at which the attention finds each token.
        """
        decode, language = self._tokenizer.decode, job.language or self.language_of(tokens)
        words = [
            (first + run.begin, first + run.spoken_end, first + run.end, run.text)
            for first, part in text_parts(tokens, self._tokens.end)
            for run in words_of(part, decode, language)
        ]
        times_2N = np.zeros((2, len(tokens)), np.int64)
        if not words:
            return times_2N[0], times_2N[1]
        begins, spoken_ends, ends, texts = zip(*words, strict=True)
        last = min(spoken_ends[-1], len(tokens) - 1)
        found = FoundWords(
            borders_B=np.maximum.accumulate(begins_N[[*begins, last]]),
            num_letters_W=np.array([num_spoken_letters(text) for text in texts], np.float64),
            ends_clause_W=np.array(spoken_ends) < ends,
        )
        samples = job.samples[: self.hear(job, tokens).num_samples]
        placed = zip(begins, ends, np.rint(place_words(samples, found)).astype(int).T, strict=True)
        for begin, end, times in placed:
            times_2N[:, begin:end] = times[:, None]
            times_2N[:, end:] = times[1]
        return times_2N[0], times_2N[1]

    def _prompt(self, job: WindowJob) -> list[int]:
        """Return the tokens of the request's prompt, only the last ones if the prompt is too long;
        [] without a prompt.
        """
        text, start = job.params.get(PROMPT, "").strip(), self._tokens.start_of_previous
        if not text or start is None:
            return []
        ids = token_ids(self._tokenizer, " " + text, "prompt")
        plain = [token for token in ids if token < self._tokens.end]
        return [start, *plain[-(self._positions // 2 - 1) + 1 :]]

    def _prefix(self, language: int | None, *, timed: bool) -> list[int]:
        tokens = self._tokens
        named = (
            [language, tokens.transcribe]
            if language is not None and tokens.transcribe is not None
            else []
        )
        return [tokens.start, *named, *([] if timed else [tokens.no_timestamps])]
