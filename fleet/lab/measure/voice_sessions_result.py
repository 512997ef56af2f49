"""Results of the benchmark of many voice sessions. Measures nothing."""

from collections.abc import Iterator

import msgspec
from rich.console import Group
from rich.text import Text

from fleet.lab.client.realtime import LatencyPart
from fleet.lab.report.result import Result
from fleet.lab.report.stats import Ratio, at_least, at_most, percentile, summarise
from fleet.lab.report.tables import NONE, figure, table_of, titled


class SessionTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One question and its answer.

    `late_ms`: for each piece of audio but the first, its arrival after the moment at which it was
    due; negative if early.
    `parts`: the fleet's report of its share of the wait.
    """

    voice_to_voice_ms: float
    parts: tuple[LatencyPart, ...]
    underruns: int
    answer_s: float
    late_ms: tuple[float, ...]


class SessionResult(msgspec.Struct, frozen=True, kw_only=True):
    """One session. `fault`: the error that ended it early, or "". `mic_late_ms`: delay of each
    block that this client sent.
    """

    console: bool
    turns: tuple[SessionTurn, ...]
    mic_late_ms: tuple[float, ...]
    fault: str = ""


class QueuedSession(msgspec.Struct, frozen=True, kw_only=True):
    """The session beyond the limit.

    `position`: its place in the queue, None if none was reported. `early`: admitted before another
    session had left.
    `admitted_ms`: time from the first leave to its admission, None if it was not admitted.
    """

    position: int | None
    early: bool
    admitted_ms: float | None
    answered: bool

    def line(self) -> str:
        place = (
            "got no queue position"
            if self.position is None
            else f"got queue position {self.position}"
        )
        when = (
            "was admitted too early"
            if self.early
            else f"was admitted {figure(self.admitted_ms)} ms after another had left"
        )
        return (
            f"the session beyond the limit {place}, {when}, and was "
            f"{'answered' if self.answered else 'not answered'}"
        )


class VoiceSessionsResult(Result, frozen=True, kw_only=True):
    """`cores`: CPU of each process of the fleet in `seconds` with all sessions active;
    `client_cores`: of this process.
    """

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

    def tables(self) -> Iterator[Group | Text]:
        console = sum(session.console for session in self.sessions)
        sessions = (
            f"{len(self.sessions)} concurrent voice sessions, {console} of them on the "
            "console's socket"
        )
        table = table_of("ms", "p50", "p95", "p99", "max")
        for name, samples in (
            (f"voice to voice, without {self.silence_ms} ms of silence", self.fleet_ms),
            *((f"  {name}", samples) for name, samples in self.parts_ms.items()),
            ("audio after it was due (negative: before)", self.late_ms),
            ("microphones of this client late", self.mic_late_ms),
        ):
            if summary := summarise(samples):
                table.add_row(
                    name,
                    *map(figure, (summary.p50, summary.p95, percentile(samples, 99), summary.high)),
                )
        table.add_section()
        table.add_row("underruns", figure(self.underruns))
        for fault in dict.fromkeys(self.faults):
            table.add_row(f"ended early: {fault[:60]}", figure(self.faults.count(fault)))
        yield titled(f"{sessions}; {len(self.turns)} answers of the {self.engine} engine", table)
        if self.queued is not None:
            yield Text(self.queued.line())
        cores = table_of("CPU while all sessions were active", "cores")
        for name, used in sorted(self.cores.items(), key=lambda row: -row[1]):
            cores.add_row(name, f"{used:.2f}")
        cores.add_section()
        cores.add_row("this client", f"{self.client_cores:.2f}")
        cores.add_row(
            "background load", f"{self.others_cores:.2f}" if self.others_cores is not None else NONE
        )
        yield titled(f"{self.seconds:.1f} s", cores)

    def targets(self) -> list[Ratio]:
        """Check that no playback underruns, every question is answered, and the session beyond the
        limit is queued.
        """
        count, queued = len(self.sessions), self.queued
        unanswered = count * self.wanted_turns - len(self.turns)
        ratios = [
            at_most(f"underruns of {count} voice sessions", self.underruns, 0, "underruns"),
            at_most("questions not answered", unanswered, 0, "questions"),
        ]
        if queued is not None:
            admitted = (
                queued.position == 1
                and not queued.early
                and queued.admitted_ms is not None
                and queued.answered
            )
            ratios.append(at_least("extra session queued, then admitted", float(admitted), 1))
        return ratios

    def background_loads(self) -> list[float | None]:
        return [self.others_cores]
