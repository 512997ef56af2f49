"""Runs a single engine in a process: batches of requests that begin together, each batch timed to
its end. Knows no model.
"""

import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

from fleet.config import FleetConfig
from fleet.core.request import RequestSpec
from fleet.lab.measure.engine_answers import Answers, answer
from fleet.lab.measure.reference import ReferenceAnswer, ReferenceResult, ReferenceWork
from fleet.lab.measure.vllm_generate import make_generate
from fleet.stages.builders import build_options
from fleet.worker.main import build_stage

Generate = Callable[[Sequence[RequestSpec]], Answers]
"""Function that computes the answers to requests together and returns the tokens of each."""


def run(config: FleetConfig, engine: str, runs: list[int], work: ReferenceWork) -> ReferenceResult:
    """Run the requests in order on one engine, in batches. `runs`: number of requests in each
    batch. Every answer gets the duration of its whole batch.
    """
    began_s = time.perf_counter()
    generate = _vllm(config) if engine == "vllm" else _torch(config)
    load_s = time.perf_counter() - began_s
    requests, answers = iter(work.requests), list[ReferenceAnswer]()
    for batch in runs:
        specs = list(islice(requests, batch))
        began_s = time.perf_counter()
        tokens = generate(specs)
        seconds = time.perf_counter() - began_s
        answers += [
            ReferenceAnswer(
                seconds=seconds,
                first_audio_s=None,
                num_samples=0,
                sample_rate_hz=0,
                answer_ids=tuple(ids),
            )
            for ids in tokens
        ]
        print(f"{len(answers)}/{len(work.requests)}")
    return ReferenceResult(
        answers=tuple(answers),
        load_s=load_s,
        num_threads=work.num_threads[0],
        device=work.device,
        dtype=work.dtype,
    )


def _torch(config: FleetConfig) -> Generate:
    stage = config.graph_declaration().stages[0].name
    own = config.stage(stage).model_copy(update={"engine": "torch"})
    of_torch = config.model_copy(update={"stages": {**config.stages, stage: own}})
    built = build_stage(of_torch, stage, Path(config.checkpoint))
    return lambda specs: answer(built, specs, len(specs))


def _vllm(config: FleetConfig) -> Generate:
    stage = config.graph_declaration().stages[0].name
    return make_generate(build_options(config, stage, Path(config.checkpoint)))
