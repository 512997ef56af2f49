"""What the measure of many voice sessions found, as data. Measures nothing."""

import msgspec

from fleet.bench.voice import Part
from fleet.reporting.stats import Summary, percentile, summarise


class SessionTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One question and its answer as its listener had it. Units: ms, and seconds of sound.

    `late_ms`: of each piece of sound but the first, how long after the moment to play it; below 0 it was early. `parts`: as the
    fleet tells them, of its own share of the wait.
    """

    voice_to_voice_ms: float
    parts: tuple[Part, ...]
    underruns: int
    answer_s: float
    late_ms: tuple[float, ...]


class SessionResult(msgspec.Struct, frozen=True, kw_only=True):
    """One session. `fault` says why it ended early; "" where it did not. `mic_late_ms`: of the blocks that this side sent."""

    console: bool
    turns: tuple[SessionTurn, ...]
    mic_late_ms: tuple[float, ...]
    fault: str = ""


class QueuedSession(msgspec.Struct, frozen=True, kw_only=True):
    """Who came when all sessions were taken: its place in line (None: it was told none), whether it was let in before anybody had
    left, and how long after somebody had it was (None: never).
    """

    position: int | None
    early: bool
    let_in_ms: float | None
    answered: bool


class VoiceSessionsResult(msgspec.Struct, frozen=True, kw_only=True):
    """`cores`: how busy each process of the fleet was while all sessions talked, and `driver_cores` this one, for `seconds`."""

    model: str
    engine: str
    wanted_turns: int
    silence_ms: int
    talks: tuple[SessionResult, ...]
    beyond: QueuedSession | None
    seconds: float
    cores: dict[str, float]
    driver_cores: float
    others_cores: float | None

    @property
    def turns(self) -> list[SessionTurn]:
        return [turn for talk in self.talks for turn in talk.turns]

    @property
    def underruns(self) -> int:
        return sum(turn.underruns for turn in self.turns)

    @property
    def faults(self) -> list[str]:
        return [talk.fault for talk in self.talks if talk.fault]

    @property
    def late_ms(self) -> list[float]:
        return [late for turn in self.turns for late in turn.late_ms]

    @property
    def mic_late_ms(self) -> list[float]:
        return [late for talk in self.talks for late in talk.mic_late_ms]

    @property
    def ours_ms(self) -> list[float]:
        """From voice to voice without the silence that was waited for."""
        return [turn.voice_to_voice_ms - self.silence_ms for turn in self.turns]

    @property
    def parts_ms(self) -> dict[str, list[float]]:
        told: dict[str, list[float]] = {}
        for part in (part for turn in self.turns for part in turn.parts):
            told.setdefault(part.name, []).append(part.ms)
        return told


def spread(samples: list[float]) -> tuple[Summary, float] | None:
    """The summary, and the 99th percentile that it has not."""
    summary = summarise(samples)
    return (summary, percentile(samples, 99)) if summary is not None else None
