"""Begin and end of a user's turns, decided from one probability of speech per frame. Pure; knows no
model and no clock.
"""

from dataclasses import dataclass

from fleet.processing.voice_activity import FRAME_MS, FRAME_SAMPLES, RATE_HZ

MIN_VOICED_FRAMES = 2
"""A click fills one frame; speech fills the next one too."""
HYSTERESIS = 0.15
"""Speech ends this far below the threshold. Source: Silero's `VADIterator`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRules:
    """Units: ms. After `speculate_ms` of silence a response may be started, to be discarded if
    speech continues; 0: never.

    `longest_ms`: a turn of this length is ended, since no prompt holds a longer one.
    """

    threshold: float = 0.5
    prefix_ms: int = 300
    silence_ms: int = 500
    speculate_ms: int = 200
    longest_ms: int = 120_000


@dataclass(frozen=True, slots=True)
class TurnStarted:
    """Speech began. Units: samples since the stream's first; `start` includes the prefix, `voiced`
    is the first voiced frame.
    """

    start: int
    voiced: int


@dataclass(frozen=True, slots=True)
class TurnPaused:
    """Silence lasted for `speculate_ms`: the turn may be over, and its audio would end at `end`."""

    end: int


@dataclass(frozen=True, slots=True)
class TurnResumed:
    """Speech continued after a pause."""


@dataclass(frozen=True, slots=True)
class TurnStopped:
    """The turn is over. Its audio ends at `end`, its last voiced frame at `voiced_end`; `voiced_ms`
    of it were speech.
    """

    end: int
    voiced_end: int
    voiced_ms: int


TurnEvent = TurnStarted | TurnPaused | TurnResumed | TurnStopped


class TurnDetector:
    """Detector of turns, given the probability of speech of every frame, in order. Units: `end` of
    a frame in the stream's samples.

    Invariants: events come as Started (Paused Resumed)* [Paused] Stopped; the last Paused and
    Stopped have the same `end`.
    """

    def __init__(self, rules: TurnRules) -> None:
        self.rules = rules
        self.speaking = False
        self._voiced_run = 0
        """Consecutive voiced frames before a turn began."""
        self._quiet = 0
        """Consecutive silent frames within a turn."""
        self._voiced = 0
        self._start = 0
        self._floor = 0
        """No turn begins before the end of the last one."""
        self._paused_at: int | None = None

    @property
    def voiced_ms(self) -> int:
        return self._voiced * FRAME_MS

    def feed(self, probability: float, end: int) -> list[TurnEvent]:
        return (
            self._in_speech(probability, end)
            if self.speaking
            else self._in_silence(probability, end)
        )

    def cut(self, end: int) -> None:
        """Forget the audio before `end`, which was read or discarded: no turn begins before it."""
        self.speaking = False
        self._floor = end
        self._voiced_run = self._quiet = 0
        self._paused_at = None

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
                self._paused_at = None
                events.append(TurnResumed())
        elif self._quiet or probability < self.rules.threshold - HYSTERESIS:
            self._quiet += 1
        else:
            self._voiced += 1
        return events + self._find_end(end)

    def _find_end(self, end: int) -> list[TurnEvent]:
        quiet_ms = self._quiet * FRAME_MS
        too_long = (end - self._start) * 1000 >= self.rules.longest_ms * RATE_HZ
        if (self._quiet and quiet_ms >= self.rules.silence_ms) or too_long:
            turn_end = end if self._paused_at is None else self._paused_at
            stopped = TurnStopped(turn_end, end - self._quiet * FRAME_SAMPLES, self.voiced_ms)
            self.cut(turn_end)
            return [stopped]
        speculate_ms = self.rules.speculate_ms
        if speculate_ms and self._paused_at is None and quiet_ms >= speculate_ms:
            self._paused_at = end
            return [TurnPaused(end)]
        return []
