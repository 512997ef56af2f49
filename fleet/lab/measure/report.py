"""Results of one run of the benchmark: as JSON, as tables for the terminal, and as one picture.
Measures nothing.
"""

from pathlib import Path

import msgspec
from rich.console import Console

from fleet.lab.measure.agreement import Agreement
from fleet.lab.measure.barge_in import BargeInResult
from fleet.lab.measure.engines import EngineComparison
from fleet.lab.measure.hand_off import HandOffResult
from fleet.lab.measure.hop import HopResult
from fleet.lab.measure.interference import Interference
from fleet.lab.measure.links_result import LinksResult
from fleet.lab.measure.load import LoadPhase
from fleet.lab.measure.reference import ReferenceResult
from fleet.lab.measure.scale_result import ScaleResult
from fleet.lab.measure.serving import Serving
from fleet.lab.measure.serving_report import (
    against_baseline,
    against_twin,
    serving_panels,
    serving_table,
    twin_table,
)
from fleet.lab.measure.span_hops import SpanHopsResult
from fleet.lab.measure.spans_memory import TooLargeResult
from fleet.lab.measure.spans_result import SpansResult
from fleet.lab.measure.speculation_result import SpeculationResult
from fleet.lab.measure.training_result import TrainingCosts
from fleet.lab.measure.transfer import TransferResult
from fleet.lab.measure.voice import VoiceResult
from fleet.lab.measure.voice_sessions_result import VoiceSessionsResult
from fleet.lab.report.files import write_json
from fleet.lab.report.machine import Machine
from fleet.lab.report.plot import draw_panels
from fleet.lab.report.result import Result, machine_line
from fleet.lab.report.stats import Ratio, Summary
from fleet.lab.report.tables import print_line, ratio_table

NOISY_CORES = 0.2
PANEL_INCHES = (6.0, 3.8)


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """One run; a measurement that was not requested is None. `command`: its arguments; `began`:
    local time, ISO 8601.
    """

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
    engines: EngineComparison | None = None
    spans: SpansResult | None = None
    span_hops: SpanHopsResult | None = None
    too_large: TooLargeResult | None = None
    links: LinksResult | None = None
    speculation: SpeculationResult | None = None
    training: TrainingCosts | None = None
    voice: VoiceResult | None = None
    voice_sessions: VoiceSessionsResult | None = None
    barge_in: BargeInResult | None = None
    ratios: tuple[Ratio, ...] = ()

    @property
    def parts(self) -> list[Result]:
        """The results of the measurements of parts, in the order of the report."""
        parts = (
            self.hops,
            self.transfer,
            self.scale,
            self.hand_offs,
            self.interference,
            self.engines,
            self.spans,
        )
        parts = (
            *parts,
            self.span_hops,
            self.too_large,
            self.links,
            self.speculation,
            self.training,
            self.voice,
            self.voice_sessions,
            self.barge_in,
        )
        return [part for part in parts if part is not None]

    @property
    def phases(self) -> tuple[LoadPhase, ...]:
        return (self.serving.single, self.serving.concurrent) if self.serving else ()

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
    file = BenchFile(
        percentiles={phase.name: _percentiles(phase) for phase in report.phases},
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


def judge(report: BenchReport) -> BenchReport:
    """Return the report with the numbers that have a target."""
    ratios = [ratio for part in report.parts for ratio in part.targets()]
    if report.serving and report.baseline:
        ratios += against_baseline(report.serving, report.baseline)
    if report.serving and report.twin:
        ratios += against_twin(report.serving, report.twin)
    return msgspec.structs.replace(report, ratios=tuple(ratios))


def draw(report: BenchReport, path: Path) -> None:
    """Write the picture; a report without anything to draw makes none."""
    serving, machine = report.serving, report.machine
    panels = serving_panels(serving, report.baseline, report.twin) if serving else []
    panels += [panel for part in report.parts for panel in part.panels()]
    model = f"{serving.model}, " if serving else ""
    title = (
        f"{model}{machine.processor}, {machine.cores} cores, load {machine.load_1min} "
        f"before, {report.began}"
    )
    draw_panels(panels, path, title, PANEL_INCHES)


def show(report: BenchReport, console: Console) -> None:
    print_line(console, machine_line(report.machine))
    if report.serving:
        console.print(serving_table(report.serving, report.baseline))
    for name, agreement in (("baseline", report.agreement), ("twin", report.twin_agreement)):
        if agreement:
            print_line(console, agreement.line(name))
    if report.baseline:
        console.print(f"baseline: {report.baseline.device_line}", highlight=False)
    if report.twin:
        console.print(twin_table(report.twin))
    for part in report.parts:
        console.print(*part.tables())
    if report.ratios:
        console.print(ratio_table(report.ratios))
    references = [
        each.others_cores for each in (*report.phases, report.baseline, report.twin) if each
    ]
    loads = [*references, *(cores for part in report.parts for cores in part.background_loads())]
    if (others_cores := max((cores or 0.0 for cores in loads), default=0.0)) > NOISY_CORES:
        line = (
            f"background load of up to {others_cores:.1f} cores: measure again on a quiet machine"
        )
        print_line(console, line, style="yellow")
