"""Results of one run of the benchmark: as JSON, and as tables for the terminal. Measures nothing."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console, Group

from fleet.bench.agreement import Agreement
from fleet.bench.barge_in import BargeInResult
from fleet.bench.hand_off import HandOffResult, PageReads, StageHandOffs
from fleet.bench.hop import HopResult
from fleet.bench.interference import Interference
from fleet.bench.load import LoadPhase
from fleet.bench.reference import ReferenceResult
from fleet.bench.scale_result import Joined, ScaleResult, Window
from fleet.bench.serving import Serving
from fleet.bench.transfer import TransferResult
from fleet.bench.voice import VoiceResult
from fleet.bench.voice_report import barge_in_table, voice_sessions_tables, voice_table
from fleet.bench.voice_sessions_result import VoiceSessionsResult
from fleet.reporting.files import write_json
from fleet.reporting.machine import Machine
from fleet.reporting.stats import Ratio, Summary, summarise
from fleet.reporting.tables import NONE, figure, table_of, target_cells, titled

MS = 1e3
NOISY_CORES = 0.2


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """One run; a measurement that was not requested is None. `command`: its arguments; `began`: local time, ISO 8601."""

    began: str
    command: tuple[str, ...]
    machine: Machine
    serving: Serving | None = None
    baseline: ReferenceResult | None = None
    agreement: Agreement | None = None
    twin: ReferenceResult | None = None
    twin_agreement: Agreement | None = None
    hops: HopResult | None = None
    transfer: TransferResult | None = None
    scale: ScaleResult | None = None
    hand_offs: HandOffResult | None = None
    interference: Interference | None = None
    voice: VoiceResult | None = None
    voice_sessions: VoiceSessionsResult | None = None
    barge_in: BargeInResult | None = None
    ratios: tuple[Ratio, ...] = ()

    @property
    def missed(self) -> tuple[Ratio, ...]:
        return tuple(ratio for ratio in self.ratios if not ratio.met)


class _Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """The summaries of a phase, ahead of the raw numbers. Units: seconds."""

    first_text_s: Summary | None
    first_audio_s: Summary | None
    last_sample_s: Summary | None
    rtf: Summary | None
    gap_s: Summary | None
    viability: Summary | None
    throughput_audio_s_per_s: float
    requests_per_s: float


class BenchFile(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON file of a report. `met`: by name of the target."""

    percentiles: dict[str, _Percentiles]
    met: dict[str, bool]
    report: BenchReport


def write_report(report: BenchReport, path: Path) -> None:
    phases = (report.serving.single, report.serving.concurrent) if report.serving else ()
    file = BenchFile(
        percentiles={phase.name: _percentiles(phase) for phase in phases},
        met={ratio.name: ratio.met for ratio in report.ratios},
        report=report,
    )
    write_json(file, path)


def _percentiles(phase: LoadPhase) -> _Percentiles:
    return _Percentiles(
        first_text_s=phase.summary("first_text_s"),
        first_audio_s=phase.summary("first_audio_s"),
        last_sample_s=phase.summary("last_sample_s"),
        rtf=phase.summary("rtf"),
        gap_s=phase.gap_summary(),
        viability=phase.summary("viability"),
        throughput_audio_s_per_s=phase.throughput,
        requests_per_s=phase.requests_per_s,
    )


def show(report: BenchReport, console: Console) -> None:
    machine = report.machine
    console.print(
        f"{machine.processor}, {machine.cores} cores, {machine.memory_gib} GiB, load {machine.load_1min} before; "
        f"Python {machine.python}, " + ", ".join(f"{name} {version}" for name, version in machine.libraries.items()),
        soft_wrap=True,
        highlight=False,
    )
    if report.serving:
        console.print(_serving_table(report.serving, report.baseline))
    for name, agreement in (("baseline", report.agreement), ("twin", report.twin_agreement)):
        if agreement:
            _show_agreement(name, agreement, console)
    if report.baseline:
        console.print(f"baseline: {_ran_on(report.baseline)}", highlight=False)
    if report.twin:
        console.print(_twin_table(report.twin))
    if report.hops:
        console.print(_hop_table(report.hops))
    if report.transfer:
        console.print(_transfer_table(report.transfer))
    if report.scale:
        console.print(_scale_table(report.scale), _join_table(report.scale.joined))
    if report.hand_offs:
        for stage in report.hand_offs.stages:
            console.print(_hand_off_table(stage))
        if report.hand_offs.pages:
            console.print(_pages_table(report.hand_offs.pages))
    if report.interference:
        console.print(_interference_table(report.interference))
    if report.voice:
        console.print(voice_table(report.voice))
    if report.voice_sessions:
        console.print(*voice_sessions_tables(report.voice_sessions))
    if report.barge_in:
        console.print(barge_in_table(report.barge_in))
    if report.ratios:
        console.print(_ratio_table(report.ratios))
    if (others_cores := _max_background_load(report)) > NOISY_CORES:
        console.print(
            f"background load of up to {others_cores:.1f} cores: measure again on a quiet machine",
            style="yellow",
            highlight=False,
            soft_wrap=True,
        )


def _max_background_load(report: BenchReport) -> float:
    phases = (report.serving.single, report.serving.concurrent) if report.serving else ()
    sides = (report.interference.together, report.interference.split) if report.interference else ()
    scale = report.scale
    windows = (*(phase.window for phase in scale.phases), scale.joined.alone, scale.joined.together) if scale else ()
    spoken = (report.voice, report.voice_sessions, report.barge_in)
    measured = (*phases, *windows, report.baseline, report.twin, report.hand_offs, *spoken, *sides)
    return max((part.others_cores or 0.0 for part in measured if part), default=0.0)


def _serving_table(serving: Serving, baseline: ReferenceResult | None) -> Group:
    single, many = serving.single, serving.concurrent
    columns = ["", "single\np50", "\np95", f"{many.concurrency} at a time\np50", "\np95"]
    table = table_of(*columns, *(("baseline\np50", "\np95") if baseline else ()))
    for name, scale, field, reference in _latency_rows(baseline):
        summaries = [phase.summary(field) for phase in (single, many)]
        if any(summaries):
            known = [*summaries, reference] if baseline else summaries
            table.add_row(name, *(cell for summary in known for cell in _cells(summary, scale)))
    table.add_section()
    for name, *numbers in _rate_rows(serving, baseline):
        if any(number is not None for number in numbers):
            known = numbers if baseline else numbers[:-1]
            table.add_row(name, *(cell for number in known for cell in (figure(number), "")))
    phases = f"{len(single.timings)} requests one at a time, then {len(many.timings)}, {many.concurrency} at a time"
    return titled(f"{serving.model} at {serving.url}: {phases}", table)


def _latency_rows(baseline: ReferenceResult | None) -> list[tuple[str, float, str, Summary | None]]:
    """Return (name, scale, field of `AnswerMetrics`, baseline); the reference returns all its audio at its end."""
    answers = baseline.answers if baseline else ()
    took = summarise([answer.seconds for answer in answers])
    return [
        ("first text, ms", MS, "first_text_s", None),
        ("first audio, ms", MS, "first_audio_s", took),
        ("last sample, ms", MS, "last_sample_s", took),
        ("whole answer, ms", MS, "total_s", took),
        ("RTF, s/s of audio", 1.0, "rtf", _rtf(baseline)),
        ("longest gap, ms", MS, "max_gap_s", None),
        ("chunks in time, %", 100.0, "viability", None),
        ("playback stalled, ms", MS, "stalled_s", None),
    ]


def _rate_rows(serving: Serving, baseline: ReferenceResult | None) -> list[tuple[str, float | None, float | None, float | None]]:
    """Return (name, one at a time, concurrent, baseline)."""
    single, many = serving.single, serving.concurrent
    spoken = [("throughput, s of audio/s", single.throughput, many.throughput, baseline.throughput if baseline else None)]
    others_cores = (single.others_cores, many.others_cores, baseline.others_cores if baseline else None)
    return [
        *(spoken if single.audio_s else ()),
        ("requests, 1/s", single.requests_per_s, many.requests_per_s, _per_second(baseline)),
        ("answer tokens, 1/s", single.tokens_per_s, many.tokens_per_s, None),
        ("background load, cores", *others_cores),
    ]


def _rtf(baseline: ReferenceResult | None) -> Summary | None:
    answers = baseline.answers if baseline else ()
    return summarise([answer.seconds / answer.audio_s if answer.audio_s else None for answer in answers])


def _per_second(baseline: ReferenceResult | None) -> float | None:
    return len(baseline.answers) / baseline.seconds if baseline else None


def _cells(summary: Summary | None, scale: float) -> tuple[str, str]:
    return (NONE, NONE) if summary is None else (figure(summary.p50 * scale), figure(summary.p95 * scale))


def _show_agreement(name: str, agreement: Agreement, console: Console) -> None:
    count = agreement.count
    console.print(
        f"same as the {name}: prompt ids {agreement.same_prompt}/{count}, text {agreement.same_text}/{count}, "
        f"length of the audio {agreement.same_length}/{count}",
        highlight=False,
        soft_wrap=True,
    )


def _ran_on(result: ReferenceResult) -> str:
    return f"{result.num_threads} thread{'s' if result.num_threads > 1 else ''}, {result.device}, {result.dtype}"


def _twin_table(twin: ReferenceResult) -> Group:
    table = table_of("", "p50", "p95")
    first = summarise([answer.first_audio_s for answer in twin.answers])
    if first is not None:
        table.add_row("first audio, ms", *_cells(first, MS))
    table.add_row("whole answer, ms", *_cells(summarise([answer.seconds for answer in twin.answers]), MS))
    if first is not None:
        table.add_row("throughput, s of audio/s", figure(twin.throughput), "")
    table.add_row("background load, cores", figure(twin.others_cores), "")
    return titled(f"the same stages in one process ({_ran_on(twin)})", table)


def _hop_table(hops: HopResult) -> Group:
    table = table_of("", "p50", "p95", "min")
    rows = (("append to delivery, us", hops.delivery_us), ("append call, us", hops.append_us), ("bare ping, us", hops.ping_us))
    for name, durations_us in rows:
        if summary := summarise(durations_us):
            table.add_row(name, f"{summary.p50:.0f}", f"{summary.p95:.0f}", f"{summary.low:.0f}")
    return titled(f"{len(hops.delivery_us)} hops through Redis", table)


def _transfer_table(transfer: TransferResult) -> Group:
    table = table_of("bytes", "p50 us", "GB/s")
    for read in transfer.reads:
        table.add_row(f"{read.num_bytes}", f"{read.p50_us:.0f}", f"{read.gb_per_s:.2f}")
    return titled("tensor reads between two processes", table)


def _hand_off_table(stage: StageHandOffs) -> Group:
    table = table_of("ms", "p50", "p95", "max")
    for name, part in stage.parts_ms.items():
        table.add_row(name, *_cells(part, 1.0), figure(part.high if part else None))
    table.add_section()
    whole = stage.whole_ms
    table.add_row("last step to first step", *_cells(whole, 1.0), figure(whole.high if whole else None))
    table.add_row("first hand-off of the fleet", figure(stage.first_ms), "", "")
    recomputed = f", {stage.num_recomputed} recomputed" if stage.num_recomputed else ""
    return titled(f"{len(stage.hand_offs)} hand-offs of {stage.stage} from prefill to decode{recomputed}", table)


def _pages_table(pages: PageReads) -> Group:
    table = table_of("", "p50 us", "p95 us", "GB/s")
    rows = (("block by block", pages.blocks_us), ("one plain read", pages.plain_us), ("checked copy", pages.copied_us))
    for name, durations_us in rows:
        summary = summarise(durations_us)
        speed = pages.num_bytes / summary.p50 / 1000 if summary else None
        table.add_row(name, *_cells(summary, 1.0), figure(speed))
    return titled(f"{pages.num_bytes} bytes of KV rows, {pages.num_blocks} blocks, between two processes", table)


def _interference_table(found: Interference) -> Group:
    table = table_of("ms", "p50", "p95", "max")
    sides = (found.together, found.split)
    for name, summaries in (
        ("gaps, undisturbed", [side.undisturbed_s for side in sides]),
        ("gaps while long prompts arrive", [side.disturbed_s for side in sides]),
        ("first text of a long prompt", [side.long_s for side in sides]),
    ):
        for side, summary in zip(sides, summaries, strict=True):
            table.add_row(f"{name}, {side.name}", *_cells(summary, MS), figure(summary.high * MS if summary else None))
        table.add_section()
    table.add_row("p95 of gaps while they arrive, split / together", "", figure(found.ratio), "")
    workers = "; ".join(f"{side.name}: {', '.join(f'{count} {role}' for role, count in side.workers.items())}" for side in sides)
    load = f"{found.num_streams} running answers, prompts of {found.num_tokens} tokens every {found.interval_s * MS:.0f} ms"
    return titled(f"{load}\n{workers}", table)


def _scale_table(scale: ScaleResult) -> Group:
    windows = [phase.window for phase in scale.phases]
    table = table_of("", *(f"{phase.streams} streams" for phase in scale.phases))
    for name, *cells in _window_rows(windows):
        table.add_row(name, *cells)
    table.add_section()
    table.add_row("CPU per chunk, us", *(figure(window.cost_us) for window in windows))
    for process in windows[-1].cpu_s:
        table.add_row(f"  {process}", *(figure(window.cost_of_us(process)) for window in windows))
    table.add_section()
    table.add_row("complete answers", *(f"{phase.complete} of {phase.streams}" for phase in scale.phases))
    pace = f"{scale.num_edges} rows per chunk on each of {scale.num_edges} edges" if scale.num_edges > 1 else "a chunk per row"
    each = f"{scale.real_time_per_s(1):g} chunks/s per stream"
    return titled(f"scale: {scale.graph}, fake engine, a row every {scale.step_ms} ms, {pace}: {each}", table)


def _window_rows(windows: Sequence[Window]) -> Iterator[list[str]]:
    """Yield the name of each row and its cells, one per window."""
    yield ["chunks, 1/s", *(figure(window.chunks_per_s) for window in windows)]
    for name, hops in (
        ("between workers", [window.between_workers for window in windows]),
        ("worker to gateway", [window.to_gateway for window in windows]),
    ):
        yield [f"{name}, p50 ms", *(figure(ages.p50_us / 1e3 if ages else None) for ages in hops)]
        yield [f"{name}, p99 ms", *(figure(ages.p99_us / 1e3 if ages else None) for ages in hops)]
    yield ["load generator, cores", *(figure(window.generator_cores) for window in windows)]
    yield ["background load, cores", *(figure(window.others_cores) for window in windows)]


def _join_table(joined: Joined) -> Group:
    table = table_of("", "one worker", "two workers")
    for name, *cells in _window_rows((joined.alone, joined.together)):
        table.add_row(name, *cells)
    table.add_row("complete answers", "", f"{joined.complete} of {joined.streams}")
    slots = f"{joined.streams} streams for {joined.slots} slots of {joined.role}"
    return titled(f"{slots}; a second worker, {joined.start_s:.1f} s from its start to its last stream's first chunk", table)


def _ratio_table(ratios: tuple[Ratio, ...]) -> Group:
    table = table_of("", "measured", "target", "")
    for ratio in ratios:
        unit = "" if ratio.unit == "x" else f" {ratio.unit}"
        target = target_cells(ratio.target, unit, at_most=ratio.at_most, met=ratio.met)
        table.add_row(ratio.name, f"{figure(ratio.value)}{unit}", *target)
    return titled("targets", table)
