"""The tables of voice: one session's turns, its interruptions, and many sessions at once. Measures nothing."""

from collections.abc import Iterator

from rich.console import Group
from rich.text import Text

from fleet.bench.barge_in import BargeInResult
from fleet.bench.voice import VoiceResult
from fleet.bench.voice_sessions_result import QueuedSession, VoiceSessionsResult, spread
from fleet.reporting.tables import NONE, figure, table_of, titled


def voice_table(voice: VoiceResult) -> Group:
    """The parts are the fleet's account of its own share, by its own clock; they need not add up to what the client waited."""
    table = table_of("ms", "p50", "p95", "most")
    rows = [
        ("voice to voice (first voiced sample heard)", voice.whole_ms), (f"less {voice.silence_ms} of silence", voice.ours_ms),
        ("first sound received, voiced or not", voice.first_sound_ms),
    ]  # fmt: skip
    for name, summary in [*rows, *((f"  {name}", voice.part_ms(name)) for name in voice.names)]:
        if summary:
            table.add_row(name, *(figure(value) for value in (summary.p50, summary.p95, summary.high)))
    return titled(f"{len(voice.turns)} spoken turns of one session with {voice.model}", table)


def barge_in_table(result: BargeInResult) -> Group:
    table = table_of("ms from the first voiced sample", "p50", "p95", "most")
    for name, part in (
        ("heard", "heard_ms"), ("answer cancelled", "cancelled_ms"), ("all stages idle", "idle_ms"), ("memory free", "memory_ms")
    ):  # fmt: skip
        if summary := result.summary(part):
            table.add_row(name, *(figure(value) for value in (summary.p50, summary.p95, summary.high)))
    return titled(f"{len(result.turns)} interrupted answers of {result.model}", table)


def voices_tables(voices: VoiceSessionsResult) -> Iterator[Group | Text]:
    turns, console = voices.turns, sum(talk.console for talk in voices.talks)
    sessions = f"{len(voices.talks)} voice sessions at once, {console} of them the console's"
    table = table_of("ms", "p50", "p95", "p99", "most")
    for name, samples in (
        (f"voice to voice, less {voices.silence_ms} of silence", voices.ours_ms),
        *((f"  {name}", samples) for name, samples in voices.parts_ms.items()),
        ("sound came after its moment (below 0: before)", voices.late_ms),
        ("the driver's own microphones late", voices.mic_late_ms),
    ):
        told = spread(samples)
        if told is not None:
            summary, p99 = told
            table.add_row(name, *(figure(value) for value in (summary.p50, summary.p95, p99, summary.high)))
    table.add_section()
    table.add_row("underruns", figure(voices.underruns))
    for fault in dict.fromkeys(voices.faults):
        table.add_row(f"ended early: {fault[:60]}", figure(voices.faults.count(fault)))
    yield titled(f"{sessions}; {len(turns)} answers of the {voices.engine} engine", table)
    if voices.beyond is not None:
        yield Text(_told(voices.beyond))
    cores = table_of("CPU while all talked", "cores")
    for name, used in sorted(voices.cores.items(), key=lambda row: -row[1]):
        cores.add_row(name, f"{used:.2f}")
    cores.add_section()
    cores.add_row("the sessions themselves (this process)", f"{voices.driver_cores:.2f}")
    cores.add_row("others", f"{voices.others_cores:.2f}" if voices.others_cores is not None else NONE)
    yield titled(f"{voices.seconds:.1f} s", cores)


def _told(beyond: QueuedSession) -> str:
    place = "was told no place" if beyond.position is None else f"was told place {beyond.position}"
    when = "was let in too early" if beyond.early else f"was let in {figure(beyond.let_in_ms)} ms after somebody left"
    return f"one too many {place}, {when}, and was {'answered' if beyond.answered else 'not answered'}"
