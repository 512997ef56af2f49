"""Results of the benchmark of many voice sessions. Measures nothing."""

import msgspec

from fleet.api_client.realtime import LatencyPart
from fleet.reporting.stats import Summary, percentile, summarise


class SessionTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One question and its answer.

    `late_ms`: for each piece of audio but the first, its arrival after the moment at which it was due; negative if early.
    `parts`: the fleet's report of its share of the wait.
    """

    voice_to_voice_ms: float
    parts: tuple[LatencyPart, ...]
    underruns: int
    answer_s: float
    late_ms: tuple[float, ...]


class SessionResult(msgspec.Struct, frozen=True, kw_only=True):
    """One session. `fault`: the error that ended it early, or "". `mic_late_ms`: delay of each block that this client sent."""

    console: bool
    turns: tuple[SessionTurn, ...]
    mic_late_ms: tuple[float, ...]
    fault: str = ""


class QueuedSession(msgspec.Struct, frozen=True, kw_only=True):
    """The session beyond the limit.

    `position`: its place in the queue, None if none was reported. `early`: admitted before another session had left.
    `admitted_ms`: time from the first leave to its admission, None if it was not admitted.
    """

    position: int | None
    early: bool
    admitted_ms: float | None
    answered: bool


class VoiceSessionsResult(msgspec.Struct, frozen=True, kw_only=True):
    """`cores`: CPU of each process of the fleet in `seconds` with all sessions active; `client_cores`: of this process."""

    model: str
    engine: str
    wanted_turns: int
    silence_ms: int
    sessions: tuple[SessionResult, ...]
    queued: QueuedSession | None
    seconds: float
    cores: dict[str, float]
    client_cores: float
    others_cores: float | None

    @property
    def turns(self) -> list[SessionTurn]:
        return [turn for session in self.sessions for turn in session.turns]

    @property
    def underruns(self) -> int:
        return sum(turn.underruns for turn in self.turns)

    @property
    def faults(self) -> list[str]:
        return [session.fault for session in self.sessions if session.fault]

    @property
    def late_ms(self) -> list[float]:
        return [late for turn in self.turns for late in turn.late_ms]

    @property
    def mic_late_ms(self) -> list[float]:
        return [late for session in self.sessions for late in session.mic_late_ms]

    @property
    def fleet_ms(self) -> list[float]:
        """Voice to voice without the end-of-turn silence."""
        return [turn.voice_to_voice_ms - self.silence_ms for turn in self.turns]

    @property
    def parts_ms(self) -> dict[str, list[float]]:
        parts: dict[str, list[float]] = {}
        for part in (part for turn in self.turns for part in turn.parts):
            parts.setdefault(part.name, []).append(part.ms)
        return parts


def summary_and_p99(samples: list[float]) -> tuple[Summary, float] | None:
    summary = summarise(samples)
    return (summary, percentile(samples, 99)) if summary is not None else None
