"""Tables of the voice benchmarks: turns of one session, interruptions, many sessions. Measures nothing."""

from collections.abc import Iterable, Iterator

from rich.console import Group
from rich.text import Text

from fleet.bench.barge_in import BargeInResult
from fleet.bench.voice import VoiceResult
from fleet.bench.voice_sessions_result import QueuedSession, VoiceSessionsResult, summary_and_p99
from fleet.reporting.stats import Summary
from fleet.reporting.tables import NONE, figure, table_of, titled


def voice_table(voice: VoiceResult) -> Group:
    """The parts are the fleet's report on its own clock; they need not add up to the client's wait."""
    rows = [
        ("voice to voice (first voiced sample plays)", voice.voice_to_voice_ms),
        (f"without {voice.silence_ms} ms of silence", voice.fleet_ms),
        ("first audio received, voiced or not", voice.first_audio_ms),
        *((f"  {name}", voice.part_ms(name)) for name in voice.part_names),
    ]
    return _summary_table(f"{len(voice.turns)} spoken turns of one session with {voice.model}", "ms", rows)


def barge_in_table(result: BargeInResult) -> Group:
    fields = (
        ("speech detected", "detected_ms"),
        ("answer cancelled", "cancelled_ms"),
        ("all stages idle", "idle_ms"),
        ("memory free", "memory_ms"),
    )
    rows = [(name, result.summary(field)) for name, field in fields]
    return _summary_table(f"{len(result.turns)} interrupted answers of {result.model}", "ms from the first voiced sample", rows)


def _summary_table(title: str, unit: str, rows: Iterable[tuple[str, Summary | None]]) -> Group:
    table = table_of(unit, "p50", "p95", "max")
    for name, summary in rows:
        if summary:
            table.add_row(name, *(figure(value) for value in (summary.p50, summary.p95, summary.high)))
    return titled(title, table)


def voice_sessions_tables(result: VoiceSessionsResult) -> Iterator[Group | Text]:
    turns, console = result.turns, sum(session.console for session in result.sessions)
    sessions = f"{len(result.sessions)} concurrent voice sessions, {console} of them on the console's socket"
    table = table_of("ms", "p50", "p95", "p99", "max")
    for name, samples in (
        (f"voice to voice, without {result.silence_ms} ms of silence", result.fleet_ms),
        *((f"  {name}", samples) for name, samples in result.parts_ms.items()),
        ("audio after it was due (negative: before)", result.late_ms),
        ("microphones of this client late", result.mic_late_ms),
    ):
        if (found := summary_and_p99(samples)) is not None:
            summary, p99 = found
            table.add_row(name, *(figure(value) for value in (summary.p50, summary.p95, p99, summary.high)))
    table.add_section()
    table.add_row("underruns", figure(result.underruns))
    for fault in dict.fromkeys(result.faults):
        table.add_row(f"ended early: {fault[:60]}", figure(result.faults.count(fault)))
    yield titled(f"{sessions}; {len(turns)} answers of the {result.engine} engine", table)
    if result.queued is not None:
        yield Text(_queued_line(result.queued))
    cores = table_of("CPU while all sessions were active", "cores")
    for name, used in sorted(result.cores.items(), key=lambda row: -row[1]):
        cores.add_row(name, f"{used:.2f}")
    cores.add_section()
    cores.add_row("this client", f"{result.client_cores:.2f}")
    cores.add_row("background load", f"{result.others_cores:.2f}" if result.others_cores is not None else NONE)
    yield titled(f"{result.seconds:.1f} s", cores)


def _queued_line(queued: QueuedSession) -> str:
    place = "got no queue position" if queued.position is None else f"got queue position {queued.position}"
    when = "was admitted too early" if queued.early else f"was admitted {figure(queued.admitted_ms)} ms after another had left"
    return f"the session beyond the limit {place}, {when}, and was {'answered' if queued.answered else 'not answered'}"
