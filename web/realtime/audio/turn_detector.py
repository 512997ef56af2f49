"""Where a speaker's turn begins and ends, decided from one probability of speech per frame. Pure; knows no model and no clock."""

from dataclasses import dataclass

RATE_HZ = 16_000
FRAME_SAMPLES = 512
FRAME_MS = 1000 * FRAME_SAMPLES // RATE_HZ
MIN_VOICED_FRAMES = 2
"""A click fills one frame; speech fills the next one too."""
HYSTERESIS = 0.15
"""Speech ends below the threshold by this much, as Silero's own iterator has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRules:
    """Units: ms. `speculate_ms` of silence is when an answer may be begun that is thrown away if speech goes on; 0: never.

    `longest_ms`: a turn that lasts so long is ended, since no prompt takes more.
    """

    threshold: float = 0.5
    prefix_ms: int = 300
    silence_ms: int = 500
    speculate_ms: int = 200
    longest_ms: int = 120_000


@dataclass(frozen=True, slots=True)
class Started:
    """Speech began. Units: samples since the stream's first; the prefix is before `start`."""

    start: int
    voiced: int
    """Where the first voiced frame begins."""


@dataclass(frozen=True, slots=True)
class Paused:
    """Silent for `speculate_ms`: this may be the end, and the turn's sound would end at `end`."""

    end: int


@dataclass(frozen=True, slots=True)
class GoesOn:
    """It was not: speech goes on."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The turn is over. Its sound ends at `end`, its last voiced frame at `voiced_end`; `voiced_ms` of it were speech."""

    end: int
    voiced_end: int
    voiced_ms: int


TurnEvent = Started | Paused | GoesOn | Stopped


class TurnDetector:
    """Feed it every frame's probability of speech, in order. Units: `here` is where the frame ends, in the stream's samples.

    Invariants: events come as Started (Paused GoesOn)* [Paused] Stopped; `end` of the last Paused is that of Stopped.
    """

    def __init__(self, rules: TurnRules) -> None:
        self.rules = rules
        self.speaking = False
        self._run = 0
        """Frames of speech in a row, while none has begun."""
        self._quiet = 0
        """Frames of silence in a row, while speaking."""
        self._voiced = 0
        self._start = 0
        self._floor = 0
        """No turn begins before the end of the last one."""
        self._paused_at: int | None = None

    @property
    def voiced_ms(self) -> int:
        return self._voiced * FRAME_MS

    def feed(self, probability: float, here: int) -> list[TurnEvent]:
        return self._in_speech(probability, here) if self.speaking else self._in_silence(probability, here)

    def cut(self, here: int) -> None:
        """What came so far was taken, or thrown away: whatever comes now begins anew."""
        self.speaking = False
        self._floor = here
        self._run = self._quiet = 0
        self._paused_at = None

    def _in_silence(self, probability: float, here: int) -> list[TurnEvent]:
        self._run = self._run + 1 if probability >= self.rules.threshold else 0
        if self._run < MIN_VOICED_FRAMES:
            return []
        voiced = here - self._run * FRAME_SAMPLES
        prefix = self.rules.prefix_ms * RATE_HZ // 1000
        self._start = min(voiced, max(self._floor, voiced - prefix))
        self.speaking, self._voiced, self._quiet, self._run = True, self._run, 0, 0
        return [Started(self._start, voiced)]

    def _in_speech(self, probability: float, here: int) -> list[TurnEvent]:
        events: list[TurnEvent] = []
        if probability >= self.rules.threshold:
            self._voiced += 1
            self._quiet = 0
            if self._paused_at is not None:
                self._paused_at = None
                events.append(GoesOn())
        elif self._quiet or probability < self.rules.threshold - HYSTERESIS:
            self._quiet += 1
        else:
            self._voiced += 1
        return events + self._ends(here)

    def _ends(self, here: int) -> list[TurnEvent]:
        quiet_ms = self._quiet * FRAME_MS
        too_long = (here - self._start) * 1000 >= self.rules.longest_ms * RATE_HZ
        if (self._quiet and quiet_ms >= self.rules.silence_ms) or too_long:
            end = here if self._paused_at is None else self._paused_at
            stopped = Stopped(end, here - self._quiet * FRAME_SAMPLES, self.voiced_ms)
            self.cut(end)
            return [stopped]
        speculate_ms = self.rules.speculate_ms
        if speculate_ms and self._paused_at is None and quiet_ms >= speculate_ms:
            self._paused_at = here
            return [Paused(here)]
        return []
