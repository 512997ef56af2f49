"""Begin and end of a user's turns, decided from one probability of speech per frame. Pure; knows no
model and no clock.
"""

from dataclasses import dataclass

from fleet.processing.voice_activity import FRAME_MS, FRAME_SAMPLES, RATE_HZ
from web.realtime.audio.turn_end import EndWaits, end_of_turn_ms

MIN_VOICED_FRAMES = 2
"""Number of consecutive voiced frames with which a turn begins: a click fills only one frame."""
HYSTERESIS = 0.15
"""Difference between the threshold at which speech begins and the lower probability at which it
ends. Source: Silero's `VADIterator`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRules:
    """Parameters of turn detection. Units: milliseconds; `threshold` is a probability.

    `prefix_ms` is the length of the audio before the first voiced frame that belongs to a turn.
    After `silence_ms` of silence the turn ends. With `waits`, the words before the silence decide
    how long the silence must be, once they are known (`expect_end`); None ignores words. After
    `speculate_ms` of silence a speculative response may start, to be discarded if speech continues;
    0 starts none. A turn of `longest_ms` is ended during speech, since no prompt holds a longer
    turn.
    """

    threshold: float = 0.5
    prefix_ms: int = 300
    silence_ms: int = 500
    speculate_ms: int = 200
    longest_ms: int = 120_000
    waits: EndWaits | None = None


@dataclass(frozen=True, slots=True)
class TurnStarted:
    """Event: a turn began. `start` is its first sample, including the prefix, and `voiced` the
    first sample of voice. Units: samples at 16 kHz since the beginning of the input.
    """

    start: int
    voiced: int


@dataclass(frozen=True, slots=True)
class TurnPaused:
    """Event: the user was silent for `speculate_ms`, so the turn may be over. `end` is the
    position, in samples at 16 kHz, at which the turn's audio ends if the user stays silent.
    """

    end: int


@dataclass(frozen=True, slots=True)
class TurnResumed:
    """Event: the user continued to speak after a TurnPaused."""


@dataclass(frozen=True, slots=True)
class TurnStopped:
    """Event: a turn ended. `end` is the end of the turn's audio, and `voiced_end` the end of the
    last voiced frame, in samples at 16 kHz. `voiced_ms` is the total length of the voiced frames.
    """

    end: int
    voiced_end: int
    voiced_ms: int


TurnEvent = TurnStarted | TurnPaused | TurnResumed | TurnStopped


class TurnDetector:
    """State machine that turns the speech probabilities of successive frames into turn events.
    Units: `end` is the position after a frame, in samples at 16 kHz.

    Invariants: events come as Started (Paused Resumed)* [Paused] Stopped; a Paused that is followed
    by Stopped has the same `end`.
    """

    def __init__(self, rules: TurnRules) -> None:
        self.rules = rules
        self.speaking = False
        self._voiced_run = 0
        """Number of consecutive voiced frames while no turn is under way."""
        self._quiet = 0
        """Number of consecutive silent frames within a turn."""
        self._voiced = 0
        self._start = 0
        self._floor = 0
        """Earliest position at which the next turn may begin: the end of the last turn."""
        self._paused_at: int | None = None
        self._end_ms: int | None = None
        """Milliseconds of silence that end the turn, chosen by its words; None while the words are
        not known, so that `silence_ms` applies.
        """

    @property
    def is_quiet(self) -> bool:
        """Return True if the last frame of the turn under way was silent."""
        return self.speaking and self._quiet > 0

    @property
    def voiced_ms(self) -> int:
        return self._voiced * FRAME_MS

    def feed(self, probability: float, end: int) -> list[TurnEvent]:
        return (
            self._in_speech(probability, end)
            if self.speaking
            else self._in_silence(probability, end)
        )

    def expect_end(self, paused_at: int, transcript: str) -> None:
        """Let the words of the turn decide how long a silence ends the turn. `transcript` is what
        was said before the pause whose event had the end `paused_at`. The call has no effect if
        that pause is over, or if the rules have no `waits`.
        """
        if self.rules.waits is not None and paused_at == self._paused_at:
            self._end_ms = end_of_turn_ms(transcript, self.rules.waits)

    def reject(self) -> None:
        """End a turn that has just begun, without an event, since the sound is not a person's
        voice. The next turn may begin with the same audio.
        """
        self.speaking = False
        self._voiced_run = self._quiet = 0

    def cut(self, end: int) -> None:
        """End a turn under way, without an event. The next turn begins at `end` or later, since
        earlier audio was read or discarded.
        """
        self.speaking = False
        self._floor = end
        self._voiced_run = self._quiet = 0
        self._paused_at = self._end_ms = None

    def _in_silence(self, probability: float, end: int) -> list[TurnEvent]:
        self._voiced_run = self._voiced_run + 1 if probability >= self.rules.threshold else 0
        if self._voiced_run < MIN_VOICED_FRAMES:
            return []
        voiced = end - self._voiced_run * FRAME_SAMPLES
        prefix = self.rules.prefix_ms * RATE_HZ // 1000
        self._start = min(voiced, max(self._floor, voiced - prefix))
        self.speaking = True
        self._voiced = self._voiced_run
        self._quiet = self._voiced_run = 0
        return [TurnStarted(self._start, voiced)]

    def _in_speech(self, probability: float, end: int) -> list[TurnEvent]:
        events: list[TurnEvent] = []
        if probability >= self.rules.threshold:
            self._voiced += 1
            self._quiet = 0
            if self._paused_at is not None:
                self._paused_at = self._end_ms = None
                events.append(TurnResumed())
        elif self._quiet or probability < self.rules.threshold - HYSTERESIS:
            self._quiet += 1
        else:
            self._voiced += 1
        return events + self._find_end(end)

    def _find_end(self, end: int) -> list[TurnEvent]:
        quiet_ms = self._quiet * FRAME_MS
        too_long = (end - self._start) * 1000 >= self.rules.longest_ms * RATE_HZ
        silence_ms = self.rules.silence_ms if self._end_ms is None else self._end_ms
        if (self._quiet and quiet_ms >= silence_ms) or too_long:
            turn_end = end if self._paused_at is None else self._paused_at
            stopped = TurnStopped(turn_end, end - self._quiet * FRAME_SAMPLES, self.voiced_ms)
            self.cut(turn_end)
            return [stopped]
        speculate_ms = self.rules.speculate_ms
        if speculate_ms and self._paused_at is None and quiet_ms >= speculate_ms:
            self._paused_at = end
            return [TurnPaused(end)]
        return []
