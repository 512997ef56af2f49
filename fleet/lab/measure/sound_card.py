"""A simulated sound card: a microphone and a loudspeaker on one sample clock, with a recording of
both.

Latencies are read from the recording alone, as with a second recorder in the room. Knows no fleet
and no model.
"""

from collections import deque
from pathlib import Path

import numpy as np
import soundfile
from numpy.typing import NDArray

from fleet.lab.client.audio import PCM_RATE_HZ
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.playback import START_S
from fleet.processing.voice_onset import VoicedSearch

BLOCK_MS = 10
BLOCK_LEN = PCM_RATE_HZ * BLOCK_MS // 1000
NOISE = 30
"""Amplitude of the room's noise, of 32768 (-66 dBFS): no microphone sends zeros."""

Samples = NDArray[np.int16]


class SoundCard:
    """Microphone, loudspeaker and recorder. Every call of `tick` is one block of 10 ms.

    `underruns`: number of times that the loudspeaker had nothing to play although the answer had
    not ended. Playback begins, and after an underrun continues, with 100 ms of audio in the buffer,
    as on the Voice page.
    """

    def __init__(self, seed: int = 1) -> None:
        self.underruns = 0
        self._noise = np.random.default_rng(seed)
        self._speech: deque[Samples] = deque()
        self._buffer = np.zeros(0, np.int16)
        self._is_playing = False
        self._has_ended = True
        self._recording: list[Samples] = []

    @property
    def num_samples(self) -> int:
        """Length of the recording so far, which is the card's clock."""
        return len(self._recording) * BLOCK_LEN

    @property
    def is_speaking(self) -> bool:
        """Return True while the microphone has speech to record."""
        return bool(self._speech)

    @property
    def is_quiet(self) -> bool:
        """Return True if the answer has ended and all its audio is played, or if no answer has
        begun.
        """
        return self._has_ended and not len(self._buffer)

    def speak(self, speech: Samples) -> None:
        """Queue `speech` for the microphone, padded with silence at its start so that its last
        sample ends a block.
        """
        padded = np.concatenate([np.zeros(-len(speech) % BLOCK_LEN, np.int16), speech])
        self._speech.extend(padded.reshape(-1, BLOCK_LEN))

    def receive(self, pcm: bytes) -> None:
        """Add samples of an answer to the loudspeaker's buffer. The answer lasts until
        `end_answer`.
        """
        self._has_ended = False
        self._buffer = np.concatenate([self._buffer, np.frombuffer(pcm, "<i2")])

    def end_answer(self) -> None:
        self._has_ended = True

    def flush(self) -> None:
        """Drop the audio that is not played yet, as at an interruption. Does not end the answer."""
        self._buffer = self._buffer[:0]

    def tick(self) -> bytes:
        """Play and record one block; return the microphone's PCM."""
        spoken = self._speech.popleft() if self._speech else np.zeros(BLOCK_LEN, np.int16)
        noise = self._noise.integers(-NOISE, NOISE + 1, BLOCK_LEN)
        mic = np.clip(spoken.astype(np.int32) + noise, -32768, 32767).astype("<i2")
        self._recording.append(np.stack([mic, self._next_played()], axis=1))
        return mic.tobytes()

    def write(self, path: Path) -> None:
        """Write the recording as a stereo file: left the microphone, right the loudspeaker."""
        samples = np.concatenate(self._recording) if self._recording else np.zeros((0, 2), np.int16)
        soundfile.write(str(path), samples, PCM_RATE_HZ, subtype="PCM_16")

    def _next_played(self) -> Samples:
        prebuffer = PCM_RATE_HZ * START_S
        if not self._is_playing and (len(self._buffer) >= prebuffer or self._has_ended):
            self._is_playing = len(self._buffer) > 0
        block = np.zeros(BLOCK_LEN, np.int16)
        if not self._is_playing:
            return block
        played, self._buffer = self._buffer[:BLOCK_LEN], self._buffer[BLOCK_LEN:]
        block[: len(played)] = played
        if len(played) < BLOCK_LEN or (self._has_ended and not len(self._buffer)):
            self._is_playing = False
            self.underruns += not self._has_ended
        return block


def read_latency_s(path: Path, since_s: float = 0.0) -> tuple[float, float]:
    """Read a recording of one question and its answer; return the time of the question's last
    voiced sample and the time of the answer's first one, in seconds of the recording. `since_s`:
    end of earlier answers, which the question interrupted.

    Raises: BenchError if question or answer is silent, or the answer begins before the question
    ends.
    """
    read, rate_hz = soundfile.read(path, dtype="int16", always_2d=True)
    question, answer = read.astype(np.int16).T
    end = len(question) - _first_voiced(question[::-1], rate_hz, f"{path}: the microphone")
    first = round(since_s * rate_hz)
    begin = first + _first_voiced(answer[first:], rate_hz, f"{path}: the loudspeaker")
    if begin < end:
        raise BenchError(f"{path}: the answer begins {(end - begin) / rate_hz:.2f} s too early")
    return end / rate_hz, begin / rate_hz


def _first_voiced(samples: Samples, rate_hz: int, name: str) -> int:
    search = VoicedSearch(rate_hz)
    search.feed(np.ascontiguousarray(samples, "<i2").tobytes())
    search.finish()
    if not search.found:
        raise BenchError(f"{name} is silent")
    return search.floor
