"""The measurements of a fleet and of its parts: runs those that are requested, and reports. Each is
a module of its own.
"""

import copy
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import yaml
from rich.console import Console

from fleet.lab.client.client import ApiClient
from fleet.lab.measure.agreement import compare
from fleet.lab.measure.barge_in import measure_barge_in
from fleet.lab.measure.deployment import TargetFleet, own_fleet, resolve_config, running_fleet
from fleet.lab.measure.engines import measure_engines
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.hand_off import HandOffResult, measure_hand_offs
from fleet.lab.measure.hop import measure_hops
from fleet.lab.measure.interference import measure_interference
from fleet.lab.measure.links import measure_links
from fleet.lab.measure.load import with_background_load
from fleet.lab.measure.options import BenchOptions
from fleet.lab.measure.reference import ReferenceResult, ReferenceWork, run_in_subprocess
from fleet.lab.measure.report import BenchReport, draw, judge, show, write_report
from fleet.lab.measure.scale import measure_scale
from fleet.lab.measure.serving import Serving, local_checkpoint, measure_serving, prepare
from fleet.lab.measure.span_hops import measure_span_hops
from fleet.lab.measure.spans import measure_spans
from fleet.lab.measure.spans_memory import measure_too_large
from fleet.lab.measure.speculation import measure_speculation
from fleet.lab.measure.training import measure_training
from fleet.lab.measure.transfer import measure_transfer
from fleet.lab.measure.voice import measure_voice, read_question, spoken_questions
from fleet.lab.measure.voice_sessions import (
    fake_overrides,
    measure_voice_sessions,
    recorded_question,
    session_limit,
)
from fleet.lab.measure.voice_sessions_result import VoiceSessionsResult
from fleet.lab.report.machine import describe_machine, usable_cores
from fleet.lab.report.progress import Meter, meter

DEFAULT_PORT = 8000
TWIN_MODULE = "fleet.lab.measure.twin_run"

replace = msgspec.structs.replace


def perform(options: BenchOptions, args: list[str]) -> bool:
    """Measure, show and write the report; return True if no target was missed. Raises:
    FleetError.
    """
    _check(options)
    report = judge(_measure(options, args))
    show(report, Console())
    if options.json:
        write_report(report, options.json)
    if options.png:
        draw(report, options.png)
    return not report.missed


def _check(options: BenchOptions) -> None:
    """Check what would fail only after minutes. Raises: BenchError, ConfigError."""
    if options.serving:
        graph = resolve_config(options.config, options.overrides).graph_declaration()
        if options.baseline and graph.baseline is None:
            raise BenchError(
                f"graph {graph.name} declares no reference implementation; leave out --baseline",
                param="--baseline",
            )


def _measure(options: BenchOptions, args: list[str]) -> BenchReport:
    report = BenchReport(
        began=time.strftime("%Y-%m-%dT%H:%M:%S%z"), command=tuple(args), machine=describe_machine()
    )
    with meter("fleet bench") as progress:
        if options.hop:
            report = replace(
                report, hops=measure_hops(options.hops, progress.counted("hops", options.hops))
            )
        if options.transfer:
            done = progress.steps("tensor reads", 1)
            report = replace(report, transfer=measure_transfer())
            done()
        if options.scale:
            counts, base = options.streams, resolve_config(options.config, options.overrides)
            step = progress.steps("streams", len(counts) + 2)
            report = replace(report, scale=measure_scale(base, counts, options.scale_seconds, step))
        if options.hand_off:
            report = replace(report, hand_offs=_measure_hand_offs(options, progress))
        if options.interference:
            report = replace(report, interference=measure_interference(options, progress.steps))
        if options.engines:
            report = replace(report, engines=measure_engines(options, progress.steps))
        if options.spans:
            report = replace(report, spans=measure_spans(options, progress.steps))
        if options.span_hops:
            report = replace(
                report, span_hops=measure_span_hops(progress.steps, small=options.small)
            )
        if options.too_large:
            report = replace(report, too_large=measure_too_large(options, progress.steps))
        if options.links:
            report = replace(report, links=measure_links(options, progress.steps))
        if options.speculation:
            report = replace(report, speculation=measure_speculation(options, progress.steps))
        if options.training:
            report = replace(report, training=measure_training(options, progress.steps))
        if options.sessions > 1:
            report = replace(report, voice_sessions=_measure_voice_sessions(options, progress))
        elif options.voice or options.barge_in:
            report = _measure_voice(report, options, progress)
        if options.serving:
            report = _measure_fleet(report, options, progress)
    return report


def _measure_voice_sessions(options: BenchOptions, progress: Meter) -> VoiceSessionsResult:
    """Run `--sessions`. A fleet that is started here admits exactly as many, and one more is
    tried.
    """
    questions = [read_question(path) for path in options.wavs] or [recorded_question()]
    own = session_limit(options.sessions) if options.up else ()
    if options.engine:
        own = (*fake_overrides(options.config, options.overrides, options.sessions), *own)
    limited = copy.copy(options)
    limited.overrides = (*options.overrides, *own)
    with _target(limited, progress) as target:
        return measure_voice_sessions(
            target, questions, options, progress.steps("voice sessions", options.sessions)
        )


def _measure_voice(report: BenchReport, options: BenchOptions, progress: Meter) -> BenchReport:
    recorded, count = [read_question(path) for path in options.wavs], options.requests
    with _target(options, progress) as target:
        api = target.api
        done = progress.steps("questions, spoken by the fleet", 1)
        questions = recorded or spoken_questions(api, api.model(), count)
        done()
        if options.voice:
            step = progress.steps("voice turns", count + 1)
            voice = with_background_load(
                options.up, lambda: measure_voice(api, questions, count, step)
            )
            report = replace(report, voice=voice)
        if options.barge_in:
            step = progress.steps("interruptions", count + 1)
            barge_in = with_background_load(
                options.up, lambda: measure_barge_in(api, questions[0], count, step)
            )
            report = replace(report, barge_in=barge_in)
    return report


def _measure_hand_offs(options: BenchOptions, progress: Meter) -> HandOffResult:
    """Measure the KV blocks first, since the fleet's processes would slow them."""
    # Imported here: it needs torch, which no other measurement does.
    from fleet.lab.measure.kv_pages import measure_pages

    done = progress.steps("reads of keys and values", 1)
    pages = measure_pages()
    done()
    return replace(measure_hand_offs(options, progress.steps), pages=pages)


def _measure_fleet(report: BenchReport, options: BenchOptions, progress: Meter) -> BenchReport:
    """Measure the fleet, then, while it is idle or stopped, the implementations that it is compared
    with.
    """
    with _target(options, progress) as target:
        if options.baseline or options.twin:
            local_checkpoint(target.config)
        serving = measure_serving(target.api, target.config, options, progress.steps)
        report = replace(report, serving=serving)
        if not options.up:
            report = _compare(report, serving, target, options, progress)
    return _compare(report, serving, target, options, progress) if options.up else report


@contextmanager
def _target(options: BenchOptions, progress: Meter) -> Iterator[TargetFleet]:
    if options.up:
        done = progress.steps("starting the fleet", 1)
        with own_fleet(options.config, options.overrides) as target:
            done()
            yield target
        return
    config = resolve_config(options.config, options.overrides)
    url = options.url or f"{config.web.scheme}://127.0.0.1:{config.web.port or DEFAULT_PORT}"
    yield running_fleet(url, ApiClient(url).port, config)


def _compare(
    report: BenchReport,
    serving: Serving,
    target: TargetFleet,
    options: BenchOptions,
    progress: Meter,
) -> BenchReport:
    graph = target.config.graph_declaration()
    if options.baseline and graph.baseline is not None:
        num_threads = (
            (options.baseline_threads,)
            if options.baseline_threads
            else tuple(sorted({1, usable_cores()}))
        )
        work, frontend = prepare(target, options, serving.prompts, num_threads)
        done = progress.steps("the reference implementation", len(serving.prompts))
        baseline = run_in_subprocess(
            graph.baseline, ["--checkpoint", target.config.checkpoint], work, done
        )
        agreement = compare(serving.concurrent.timings, baseline, work, frontend)
        report = replace(report, baseline=baseline, agreement=agreement)
    if options.twin:
        threads = max(target.config.stage(stage.name).threads for stage in graph.stages)
        work, frontend = prepare(target, options, serving.prompts[: options.requests], (threads,))
        twin = _run_twin(target, work, progress)
        agreement = compare(serving.single.timings, twin, work, frontend)
        report = replace(report, twin=twin, twin_agreement=agreement)
    return report


def _run_twin(target: TargetFleet, work: ReferenceWork, progress: Meter) -> ReferenceResult:
    with tempfile.TemporaryDirectory(prefix="fleet-bench-") as folder:
        resolved = Path(folder, "resolved.yaml")
        resolved.write_text(yaml.safe_dump(target.config.model_dump(mode="json"), sort_keys=False))
        done = progress.steps("the same stages in one process", len(work.requests))
        return run_in_subprocess(TWIN_MODULE, ["--config", str(resolved)], work, done)
