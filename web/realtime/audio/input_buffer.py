"""Buffer of a voice session's input audio: decoded, resampled to 16 kHz, kept while it may belong
to a turn, and cut into frames for voice detection.

Knows no conversation and no socket.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import soxr
from numpy.typing import NDArray

from fleet.processing.base import Samples
from fleet.processing.voice_activity import FRAME_SAMPLES, RATE_HZ, VadState
from web.realtime.audio.formats import AudioFormat
from web.realtime.audio.turn_detector import TurnDetector, TurnEvent, TurnRules, TurnStopped

Pcm = NDArray[np.int16]
SLICE_S = 0.5
"""Longest piece of input in seconds that is processed at once; then other sessions of the process
have their turn.
"""
SILENT_PEAK = 52
"""Peak below which input is silent, out of 32768 (56 dB below full scale): above what browsers and
headsets send in silence, below any voice at a microphone.
"""
SILENT_S = 0.5
"""Seconds of silence after which the state of the voice detection model can be reset without loss.
"""
RESAMPLER_DELAY_S = 0.12
"""Upper bound in seconds of the audio that the resampler holds back: 118 ms at 8 kHz, under 42 ms
from 22 kHz on.
"""
RETAINED_MS = 1000
"""Length of the silence that is kept for the prefix of the next turn; longer than any prefix needs.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A frame of input for voice detection. `end` is the position after its last sample;
    `is_silent` is True for a frame of long silence, for which the voice detection model need not
    run.

    Shapes: `pcm` is [512], at 16 kHz.
    """

    pcm: Pcm
    end: int
    is_silent: bool

    @property
    def samples(self) -> Samples:
        return self.pcm.astype(np.float32) * np.float32(1 / 32768)


class AudioInputBuffer:
    """Input audio of one voice session at 16 kHz, with voice detection and turn detection.

    Units: positions count samples at 16 kHz since the beginning of the session.
    Long silence before any speech skips resampling and voice detection, and is stored as zeros:
    most microphones are silent.
    Invariants: `_retained` holds the last samples, up to `position`; if `_silent_from` is set, all
    samples after it are zeros.
    """

    def __init__(self, form: AudioFormat, rules: TurnRules | None) -> None:
        self.position = 0
        self.vad = VadState()
        self.detector: TurnDetector | None = None
        self._retained = bytearray()
        self._cut_sample = b""
        self._quiet_s = 0.0
        self._silent_from: int | None = None
        self._classified = 0
        self._resampler: soxr.ResampleStream | None = None
        self.set_format(form)
        self.set_rules(rules)

    def set_format(self, form: AudioFormat) -> None:
        """Set the format of the audio that arrives from now on. Audio that is buffered, or held
        back by the resampler, is kept.
        """
        if self._resampler is not None:
            self._add(self._flush_resampler())
        self.form, self._cut_sample = form, b""
        self._num_received, self._received_from = 0, self.position
        self._resampler = (
            None
            if form.rate == RATE_HZ
            else soxr.ResampleStream(form.rate, RATE_HZ, 1, "int16", quality="MQ")
        )

    @property
    def rate_hz(self) -> int:
        """Rate of the audio that the client sends."""
        return self.form.rate

    def seconds(self, audio: bytes) -> float:
        """Return the length of audio in the client's format."""
        return len(audio) / self.form.sample_bytes / self.rate_hz

    def set_rules(self, rules: TurnRules | None) -> None:
        """Set the rules of turn detection. During a turn, the new rules apply to that turn;
        otherwise detection starts anew with the next audio. None turns detection off, also during a
        turn; the client then commits its turns.
        """
        if rules is None:
            self.detector = None
        elif self.detector is None or not self.detector.speaking:
            self.detector = TurnDetector(rules)
            self._classified = self.position
            self.vad.reset()
        else:
            self.detector.rules = rules

    @property
    def retained_ms(self) -> int:
        """Length of the buffered audio, including samples that the resampler holds back."""
        return (len(self._retained) // 2 + self._held_back_len) * 1000 // RATE_HZ

    @property
    def received(self) -> int:
        """Position of the end of all received audio; `position` is less by the samples that the
        resampler holds back.
        """
        return self._received_from + self._num_received * RATE_HZ // self.rate_hz

    @property
    def _held_back_len(self) -> int:
        return max(0, self.received - self.position)

    def split(self, audio: bytes) -> Iterator[bytes]:
        """Split input in the client's format into pieces of PCM16 at the client's rate, short
        enough that other sessions are processed in between. If the input ends within a sample, the
        next call completes the sample.
        """
        form, audio = self.form, self._cut_sample + audio
        whole = len(audio) - len(audio) % form.sample_bytes
        self._cut_sample = audio[whole:]
        step = form.sample_bytes * max(1, int(form.rate * SLICE_S))
        for start in range(0, whole, step):
            yield form.to_pcm(audio[start : min(whole, start + step)])

    def append(self, piece: bytes) -> None:
        samples = np.frombuffer(piece, "<i2")
        self._num_received += len(samples)
        if self._is_silent(samples):
            # Zeros also stand for the samples that the resampler held back and no longer returns.
            resampled = bytes(2 * self._held_back_len)
        elif self._resampler is None:
            resampled = piece
        else:
            resampled = self._resampler.resample_chunk(samples).astype("<i2", copy=False).tobytes()
        self._add(resampled)

    def _add(self, resampled: bytes) -> None:
        self._retained += resampled
        self.position += len(resampled) // 2

    def _is_silent(self, samples: Pcm) -> bool:
        """Return True if `samples` need no resampling and voice detection, since the input has long
        been silent and no turn is under way.

        The input must have been silent before these samples too, since the samples that the
        resampler holds back are discarded.
        """
        is_quiet = (
            int(np.maximum.reduce(samples)) < SILENT_PEAK
            and int(np.minimum.reduce(samples)) > -SILENT_PEAK
        )
        before_s = self._quiet_s
        self._quiet_s = before_s + len(samples) / self.rate_hz if is_quiet else 0.0
        if (
            self._quiet_s < SILENT_S
            or before_s < RESAMPLER_DELAY_S
            or self.detector is None
            or self.detector.speaking
        ):
            self._silent_from = None
        elif self._silent_from is None:
            self._silent_from = self.position
            self.vad.reset()
            if self._resampler is not None:
                self._resampler.clear()
        return self._silent_from is not None

    def next_frame(self) -> Frame | None:
        """Return the next frame for voice detection, each frame once. Return None if no complete
        frame has arrived, or without turn detection; audio received without turn detection never
        becomes a frame.
        """
        if self.detector is None:
            self._classified = self.position
        if self.position - self._classified < FRAME_SAMPLES:
            return None
        is_silent = self._silent_from is not None and self._classified >= self._silent_from
        start = 2 * (self._classified - self._first)
        pcm = np.frombuffer(bytes(self._retained[start : start + 2 * FRAME_SAMPLES]), "<i2")
        self._classified += FRAME_SAMPLES
        return Frame(pcm=pcm, end=self._classified, is_silent=is_silent)

    @property
    def is_behind(self) -> bool:
        """Return True if a complete frame waits for voice detection."""
        return self.detector is not None and self.position - self._classified >= FRAME_SAMPLES

    def classify(self, frame: Frame, probability: float) -> list[TurnEvent]:
        """Pass a frame's probability of speech to the turn detector and return the resulting turn
        events. A frame that was discarded meanwhile has no effect.
        """
        if self.detector is None or frame.end != self._classified:
            return []
        events = self.detector.feed(probability, frame.end)
        if any(isinstance(event, TurnStopped) for event in events):
            self.vad.reset()
        return events

    def take(self, start: int, end: int) -> bytes:
        """Remove all audio before position `end`. Return the audio from position `start` to `end`
        as PCM16 at 16 kHz, without any part that is no longer buffered.
        """
        pcm = self.peek(start, end)
        del self._retained[: max(0, 2 * (end - self._first))]
        return pcm

    def take_all(self) -> bytes:
        """Remove and return all buffered audio, including samples that the resampler holds back. A
        turn under way is ended without an event.
        """
        pcm = bytes(self._retained) + self._flush_resampler()
        self.clear()
        return pcm

    def _flush_resampler(self) -> bytes:
        """Return the samples that the resampler holds back. The resampler must be cleared before
        its next use.
        """
        if self._resampler is None:
            return b""
        end = (
            self._resampler.resample_chunk(np.empty(0, np.int16), last=True)
            .astype("<i2", copy=False)
            .tobytes()
        )
        # A fraction of a sample is rounded as positions are.
        return end[: 2 * self._held_back_len].ljust(2 * self._held_back_len, b"\0")

    def peek(self, start: int, end: int) -> bytes:
        """Return the same audio as `take` for these positions, but keep all audio in the buffer."""
        return bytes(
            self._retained[max(0, 2 * (start - self._first)) : max(0, 2 * (end - self._first))]
        )

    @property
    def _first(self) -> int:
        return self.position - len(self._retained) // 2

    def clear(self) -> None:
        """Discard all buffered audio. A turn under way is ended without an event. Later positions
        still count the discarded samples.
        """
        self.position += self._held_back_len
        self._cut_sample = b""
        if self._resampler is not None:
            self._resampler.clear()
        self._retained.clear()
        self._classified = self.position
        if self.detector is not None:
            self.detector.cut(self.position)

    def drop_silence(self) -> None:
        """While no turn is under way, discard buffered audio except for the last `RETAINED_MS`. Do
        nothing during a turn, or without turn detection.
        """
        if self.detector is None or self.detector.speaking:
            return
        limit = 2 * (RATE_HZ * RETAINED_MS // 1000 + FRAME_SAMPLES)
        if len(self._retained) > limit:
            del self._retained[: len(self._retained) - limit]
