"""Serving benchmark of `fleet bench`: the fleet compared with a reference implementation and the
slow twin.

The numbers are comparable only if all did the same work, so the report also shows how many answers
agree.
"""

from collections.abc import Iterator, Sequence

import msgspec
from rich.console import RenderableType
from rich.text import Text

from fleet.lab.measure.answer_timing import AnswerTiming
from fleet.lab.measure.deployment import TargetFleet, target_fleet
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.load import LoadPhase
from fleet.lab.measure.measurement import (
    BenchOptions,
    Context,
    Measurement,
    argument,
    whole_number,
)
from fleet.lab.measure.reference import ReferenceResult, ReferenceWork, run_reference
from fleet.lab.measure.serving import Serving, local_checkpoint, measure_serving, prepare
from fleet.lab.measure.serving_report import (
    against_baseline,
    against_twin,
    serving_panels,
    serving_table,
    twin_table,
)
from fleet.lab.report.machine import usable_cores
from fleet.lab.report.plot import Panel
from fleet.lab.report.result import NamedParts
from fleet.lab.report.stats import Ratio, Summary
from fleet.processing import Frontend

TWIN = "fleet.lab.measure.twin_run:run"


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """Agreement of `count` answers with another implementation: numbers of equal prompts (token
    ids), texts and audio lengths.
    """

    count: int
    same_prompt: int
    same_text: int
    same_length: int

    def line(self, name: str) -> str:
        return (
            f"same as the {name}: prompt ids {self.same_prompt}/{self.count}, text "
            f"{self.same_text}/{self.count}, "
            f"length of the audio {self.same_length}/{self.count}"
        )


def compare(
    timings: Sequence[AnswerTiming], other: ReferenceResult, work: ReferenceWork, frontend: Frontend
) -> Agreement:
    """Compare the fleet's answers with the answers of `other` to the same prompts.

    A prompt counts as equal if the gateway counted as many token ids as `other` received, and the
    tokenisation of `other`, if it has its own, gave the same ids.
    """
    same_prompt = same_text = same_length = 0
    for timing in timings:
        answered, spec = other.answers[timing.prompt], work.requests[timing.prompt]
        same_prompt += (
            timing.num_prompt_tokens == len(spec.prompt_ids) and answered.same_prompt is not False
        )
        same_text += timing.answer == _text(answered.answer_ids, frontend)
        same_length += timing.num_samples == answered.num_samples
    return Agreement(
        count=len(timings), same_prompt=same_prompt, same_text=same_text, same_length=same_length
    )


def _text(ids: Sequence[int], frontend: Frontend) -> str:
    detokenizer = frontend.detokenizer()
    return detokenizer.add(ids) + detokenizer.finish()


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Summaries of a load phase, which precede the raw numbers in the JSON report. Units:
    seconds.
    """

    first_text_s: Summary | None
    first_audio_s: Summary | None
    last_sample_s: Summary | None
    rtf: Summary | None
    gap_s: Summary | None
    viability: Summary | None
    throughput_audio_s_per_s: float
    requests_per_s: float


class ServingComparison(NamedParts, frozen=True, kw_only=True):
    """Serving results of the fleet, and of the reference implementation and the twin if they were
    requested.
    """

    serving: Serving
    baseline: ReferenceResult | None = None
    agreement: Agreement | None = None
    twin: ReferenceResult | None = None
    twin_agreement: Agreement | None = None

    @property
    def phases(self) -> tuple[LoadPhase, LoadPhase]:
        return self.serving.single, self.serving.concurrent

    def tables(self) -> Iterator[RenderableType]:
        yield serving_table(self.serving, self.baseline)
        for name, agreement in (("baseline", self.agreement), ("twin", self.twin_agreement)):
            if agreement:
                yield Text(agreement.line(name))
        if self.baseline:
            yield Text(f"baseline: {self.baseline.device_line}")
        if self.twin:
            yield twin_table(self.twin)

    def panels(self) -> list[Panel]:
        return serving_panels(self.serving, self.baseline, self.twin)

    def targets(self) -> list[Ratio]:
        ratios = against_baseline(self.serving, self.baseline) if self.baseline else []
        return [*ratios, *(against_twin(self.serving, self.twin) if self.twin else [])]

    def background_loads(self) -> list[float | None]:
        measured = (*self.phases, self.baseline, self.twin)
        return [each.others_cores for each in measured if each]

    def percentiles(self) -> dict[str, msgspec.Struct]:
        summaries = ("first_text_s", "first_audio_s", "last_sample_s", "rtf", "viability")
        return {
            phase.name: Percentiles(
                **{field: phase.summary(field) for field in summaries},
                gap_s=phase.gap_summary(),
                throughput_audio_s_per_s=phase.throughput,
                requests_per_s=phase.requests_per_s,
            )
            for phase in self.phases
        }


def measure_fleet(context: Context) -> ServingComparison:
    """Measure the fleet; then measure the other implementations, while the fleet is idle or
    stopped.

    Raises: BenchError, ConfigError, ApiError.
    """
    options = context.options
    graph = context.resolve().graph_declaration()
    if options.baseline and graph.baseline is None:
        raise BenchError(
            f"graph {graph.name} declares no reference implementation; leave out --baseline",
            param="--baseline",
        )
    with target_fleet(context) as target:
        if options.baseline or options.twin:
            local_checkpoint(target.config)
        result = ServingComparison(serving=measure_serving(target, context))
        if not options.up:
            result = _compare(result, target, context)
    return _compare(result, target, context) if options.up else result


def _compare(result: ServingComparison, target: TargetFleet, context: Context) -> ServingComparison:
    options, serving, config = context.options, result.serving, target.config
    graph = config.graph_declaration()
    if options.baseline:
        num_threads = (
            (options.baseline_threads,)
            if options.baseline_threads
            else tuple(sorted({1, usable_cores()}))
        )
        work, frontend = prepare(target, options, serving.prompts, num_threads)
        step = context.steps("the reference implementation", len(serving.prompts))
        function = f"{graph.baseline}:run"
        baseline = run_reference(function, work, config.checkpoint, advance=step)
        agreement = compare(serving.concurrent.timings, baseline, work, frontend)
        result = msgspec.structs.replace(result, baseline=baseline, agreement=agreement)
    if options.twin:
        threads = max(config.stage(stage.name).threads for stage in graph.stages)
        work, frontend = prepare(target, options, serving.prompts[: options.requests], (threads,))
        step = context.steps("the same stages in one process", len(work.requests))
        twin = run_reference(TWIN, config, work, advance=step, num_threads=threads)
        agreement = compare(serving.single.timings, twin, work, frontend)
        result = msgspec.structs.replace(result, twin=twin, twin_agreement=agreement)
    return result


def _is_requested(options: BenchOptions) -> bool:
    return bool(options.baseline or options.twin)


MEASUREMENT = Measurement(
    place=0,
    key="serving",
    run=measure_fleet,
    is_default=True,
    is_requested=_is_requested,
    of_gateway=True,
    about={
        "serving": "streamed chat completions over HTTP, greedy, every stage bounded: first text, "
        "first audio, last sample, gaps between chunks, and stalls of a client that plays from the "
        "first chunk on; first one request at a time, then --concurrency at a time",
        "--baseline": "the same prompts and bounds on the reference implementation, one after "
        "another, while the fleet is idle; and if both gave the same answers",
        "--twin": "the fleet's stages in one process, without Redis or transfers: the cost of "
        "separate processes",
    },
    arguments=(
        argument(
            "--baseline",
            choices=["transformers"],
            help="compare with the reference implementation",
        ),
        argument(
            "--baseline-threads",
            type=whole_number(),
            metavar="N",
            help="its CPU threads (default: one or all)",
        ),
        argument("--twin", action="store_true", help="compare with the same stages in one process"),
    ),
)
