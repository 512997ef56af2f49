"""The teacher: espeak-ng, which synthesizes Pocket's training speech and reports the start time of
every word.

espeak-ng has one state per process: syntheses are serialized, and the phase of the voice carries
over from text to text. So the samples are reproducible only for the same texts in the same order
from the start of a process.
Source: speak_lib.h of espeak-ng 1.51.
"""

import ctypes
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from threading import Lock

import numpy as np
import soxr
from numpy.typing import NDArray

from fleet.core.errors import ConfigError

SAMPLE_RATE_HZ = 24_000
LIBRARIES = ("libespeak-ng.so.1", "libespeak-ng.1.dylib")
INSTALL = "apt-get install espeak-ng"

_SYNCHRONOUS, _DONT_EXIT = 2, 0x8000
_RATE, _PITCH, _PITCH_RANGE = 1, 3, 4
_BY_CHARACTER, _UTF8, _WITH_PHONEMES = 1, 1, 0x100
_END_OF_EVENTS, _WORD = 0, 1
# Spelled words: "c a t". Otherwise "a" is the article, which espeak-ng pronounces differently from
# the letter.
_SPELLED = re.compile(r"\b[a-z](?: [a-z]){2,}\b|\ba$")
_LETTER_A = "[[eI]]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Voice:
    """A voice of espeak-ng. `name`: voice listed by `espeak-ng --voices=en`, with an optional
    variant: `en-us`, `en-us+f3`.

    Units: `rate_wpm` words per minute (80..450); `pitch` and `pitch_range` 0..99, 50 is the voice's
    default.
    """

    name: str = "en-us"
    rate_wpm: int = 150
    pitch: int = 50
    pitch_range: int = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthesizedSpeech:
    """Speech of a text: mono samples at 24 kHz in -1..1, and the start time of each word.

    Invariants: one start for every word, in ascending order.
    """

    samples: NDArray[np.float32]
    word_starts_s: tuple[float, ...]


class _EventId(ctypes.Union):
    _fields_ = [("number", ctypes.c_int), ("name", ctypes.c_char_p), ("string", ctypes.c_char * 8)]


class _EspeakEvent(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("unique_identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("id", _EventId),
    ]


_Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)


class Teacher:
    """Synthesizes texts with espeak-ng.

    Raises: ConfigError if espeak-ng is missing or lacks the voice.
    """

    def __init__(self, libraries: Sequence[str] = LIBRARIES) -> None:
        self._engine = _engine(tuple(libraries))

    def speak(self, text: str, voice: Voice | None = None) -> SynthesizedSpeech:
        """Synthesize a text that is normalized by `spoken`; silence around the speech is kept."""
        words = [
            _LETTER_A if is_letter else word
            for word, is_letter in zip(text.split(), letters_a(text), strict=True)
        ]
        if not words:
            return SynthesizedSpeech(samples=np.zeros(0, np.float32), word_starts_s=())
        samples, events = self._engine.synthesise(" ".join(words), voice or Voice())
        rate_hz = self._engine.rate_hz
        starts = word_starts(words, events, end=len(samples))
        resampled = soxr.resample(samples.astype(np.float32) / 32768, rate_hz, SAMPLE_RATE_HZ)
        return SynthesizedSpeech(
            samples=np.clip(resampled, -1, 1).astype(np.float32),
            word_starts_s=tuple(start / rate_hz for start in starts),
        )


def letters_a(text: str) -> list[bool]:
    """Return for each word whether it is the letter A: within a spelled word, or as the last word,
    where no article can be.
    """
    spelled = [match.span() for match in _SPELLED.finditer(text)]
    begins = _begins(text.split())
    return [
        word == "a" and any(first <= begin < end for first, end in spelled)
        for word, begin in zip(text.split(), begins, strict=True)
    ]


def word_starts(words: Sequence[str], events: Sequence[tuple[int, int]], end: int) -> list[float]:
    """Return the sample at which each word starts. `events`: (character, sample) pairs reported by
    espeak-ng. `end`: number of samples.

    espeak-ng reports one event for some pairs of words ("of the"); the start of the second word is
    interpolated by letters.
    """
    begins = _begins(words)
    anchors = {0: 0}
    for position, sample in events:
        anchors.setdefault(begins[bisect_right(begins, position) - 1], sample)
    known = sorted(anchors) + [begins[-1] + len(words[-1]) + 1]
    return np.interp(
        begins, known, np.maximum.accumulate([*(anchors[begin] for begin in known[:-1]), end])
    ).tolist()


def _begins(words: Sequence[str]) -> list[int]:
    return list(accumulate((len(word) + 1 for word in words), initial=0))[: len(words)]


@cache
def _engine(libraries: tuple[str, ...]) -> "_Engine":
    """Return the process's only espeak-ng engine: a second initialisation would drop the callback
    of the first.
    """
    return _Engine(_library(libraries))


def _library(names: Sequence[str]) -> ctypes.CDLL:
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise ConfigError(
        f"espeak-ng, the teacher's voice, is not installed; run `{INSTALL}`", param="teacher"
    )


class _Engine:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._lock = Lock()
        self._blocks: list[NDArray[np.int16]] = []
        self._events: list[tuple[int, int]] = []
        # The library does not hold a reference, so this keeps the callback alive.
        self._callback = _Callback(self._receive)
        self.rate_hz = int(library.espeak_Initialize(_SYNCHRONOUS, 0, None, _DONT_EXIT))
        if self.rate_hz <= 0:
            raise ConfigError(
                f"espeak-ng finds no voices (espeak-ng-data); run `{INSTALL}`", param="teacher"
            )
        library.espeak_SetSynthCallback(self._callback)

    def synthesise(
        self, text: str, voice: Voice
    ) -> tuple[NDArray[np.int16], list[tuple[int, int]]]:
        """Return the samples of a text, and a (character, sample) pair for every word event;
        characters count from 0.
        """
        encoded = text.encode() + b"\0"
        with self._lock:
            self._blocks, self._events = [], []
            self._set(voice)
            failed = self._library.espeak_Synth(
                encoded,
                ctypes.c_size_t(len(encoded)),
                0,
                _BY_CHARACTER,
                0,
                _UTF8 | _WITH_PHONEMES,
                None,
                None,
            )
            if failed or not self._blocks:
                raise ConfigError(
                    f"espeak-ng failed to synthesize {text!r} in the voice {voice.name!r}",
                    param="teacher",
                )
            return np.concatenate(self._blocks), self._events

    def _set(self, voice: Voice) -> None:
        if self._library.espeak_SetVoiceByName(voice.name.encode()):
            raise ConfigError(
                f"espeak-ng has no voice {voice.name!r}; `espeak-ng --voices` lists them",
                param="voice.name",
            )
        for parameter, value in (
            (_RATE, voice.rate_wpm),
            (_PITCH, voice.pitch),
            (_PITCH_RANGE, voice.pitch_range),
        ):
            self._library.espeak_SetParameter(parameter, value, 0)

    def _receive(self, block: int | None, num_samples: int, events: int) -> int:
        if block and num_samples > 0:
            self._blocks.append(np.frombuffer(ctypes.string_at(block, 2 * num_samples), np.int16))
        event = _EspeakEvent.from_address(events)
        while event.type != _END_OF_EVENTS:
            if event.type == _WORD:
                self._events.append((event.text_position - 1, event.sample))
            events += ctypes.sizeof(_EspeakEvent)
            event = _EspeakEvent.from_address(events)
        return 0
