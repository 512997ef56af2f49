"""All stages of a fleet in one process, with one request at a time, timed. Knows no model.

The difference from the fleet's times is the cost of separate processes.
"""

import time
from pathlib import Path

import msgspec

from fleet.config import FleetConfig
from fleet.core.request import RequestSpec
from fleet.lab.measure.reference import ReferenceAnswer, ReferenceResult, ReferenceWork
from fleet.lab.measure.twin import SlowTwin
from fleet.stages.builders import build_options
from fleet.worker.main import build_stage

AUDIO, TEXT = "audio", "text"


def run(config: FleetConfig, work: ReferenceWork) -> ReferenceResult:
    """Build every stage in this process, warm up, run the requests one at a time, and return their
    answers and times.
    """
    graph = config.graph_declaration()
    began_s = time.perf_counter()
    checkpoint = Path(config.checkpoint)
    built = {stage.name: build_stage(config, stage.name, checkpoint) for stage in graph.stages}
    twin = SlowTwin(graph, built, config.policy_of)
    load_s = time.perf_counter() - began_s
    for index in range(work.warm_up):
        _answer(
            twin,
            config,
            msgspec.structs.replace(work.requests[0], id=f"warm-up-{index}"),
            rate_hz=1,
        )
    answers: list[ReferenceAnswer] = []
    for spec in work.requests:
        answers.append(_answer(twin, config, spec, rate_hz=work.sample_rate_hz))
        print(f"{len(answers)}/{len(work.requests)}")
    options = build_options(config, graph.stages[0].name, checkpoint)
    return ReferenceResult(
        answers=tuple(answers),
        load_s=load_s,
        num_threads=work.num_threads[0],
        device=options.device,
        dtype=options.dtype,
    )


def _answer(
    twin: SlowTwin, config: FleetConfig, spec: RequestSpec, *, rate_hz: int
) -> ReferenceAnswer:
    """Run one request and return its timing. `rate_hz`: sample rate of the audio. Raises:
    FleetError if a stage fails the request.
    """
    media = config.graph_declaration().media
    ids: list[int] = []
    first_audio_s: float | None = None
    num_samples, last_s = 0, 0.0
    for chunk in twin.stream([spec]):
        if chunk.edge not in media:
            continue
        for array in chunk.arrays.values():
            if media[chunk.edge] == TEXT:
                ids += [int(token) for token in array.ravel()]
            elif array.size:
                first_audio_s = first_audio_s or chunk.at_s
                num_samples += array.size
        last_s = chunk.at_s
    if spec.id in twin.errors:
        raise twin.errors[spec.id]
    return ReferenceAnswer(
        seconds=last_s,
        first_audio_s=first_audio_s,
        num_samples=num_samples,
        sample_rate_hz=rate_hz,
        answer_ids=tuple(ids),
    )
