"""One engine in one process, as a script: runs of requests that begin together, each timed to its
end. Knows no model.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import msgspec

from fleet.config import FleetConfig, load_config
from fleet.core.request import RequestSpec
from fleet.lab.measure.reference import ReferenceAnswer, ReferenceResult, ReferenceWork

Generate = Callable[[Sequence[RequestSpec]], Sequence[Sequence[int]]]
"""Answers requests together; returns the tokens of each."""


def run(
    config: FleetConfig, engine: str, runs: Sequence[int], work: ReferenceWork
) -> ReferenceResult:
    """Run the requests in order, `runs` of them at a time. The duration of an answer is that of its
    whole run.
    """
    # OpenMP reads this once, when torch is first imported.
    os.environ["OMP_NUM_THREADS"] = str(work.num_threads[0])
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
        print(f"{len(answers)}/{len(work.requests)}", flush=True)
    return ReferenceResult(
        answers=tuple(answers),
        load_s=load_s,
        num_threads=work.num_threads[0],
        device=work.device,
        dtype=work.dtype,
    )


def _torch(config: FleetConfig) -> Generate:
    from fleet.engine.base import TOKEN
    from fleet.worker.main import build_stage

    stage = config.graph_declaration().stages[0].name
    own = config.stage(stage).model_copy(update={"engine": "torch"})
    built = build_stage(
        config.model_copy(update={"stages": {**config.stages, stage: own}}),
        stage,
        Path(config.checkpoint),
    )

    def generate(specs: Sequence[RequestSpec]) -> list[list[int]]:
        """Raises: FleetError if the engine fails a request."""
        tokens: dict[str, list[int]] = {spec.id: [] for spec in specs}
        for spec in specs:
            request, pieces = built.adapter(spec, None).open()
            built.engine.submit(request)
            for piece in pieces:
                built.engine.feed(spec.id, piece)
        while built.engine.is_ready():
            for output in built.engine.step():
                if output.error is not None:
                    raise output.error
                tokens[output.request_id] += output.arrays[TOKEN].tolist()
        return list(tokens.values())

    return generate


def _vllm(config: FleetConfig) -> Generate:
    from fleet.lab.measure.vllm_generate import make_generate
    from fleet.stages.builders import build_options

    stage = config.graph_declaration().stages[0].name
    return make_generate(build_options(config, stage, Path(config.checkpoint)))


def main() -> int:
    parser = argparse.ArgumentParser(description="Run requests on one engine, and time each run.")
    parser.add_argument(
        "--config", type=Path, required=True, metavar="FILE", help="resolved configuration"
    )
    parser.add_argument("--engine", choices=["torch", "vllm"], required=True)
    parser.add_argument(
        "--runs", required=True, metavar="N,N", help="number of requests of each run"
    )
    parser.add_argument(
        "--requests",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSON: requests and their bounds",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="JSON: duration and tokens of each"
    )
    options = parser.parse_args()
    work = msgspec.json.decode(options.requests.read_bytes(), type=ReferenceWork)
    runs = [int(count) for count in options.runs.split(",")]
    options.out.write_bytes(
        msgspec.json.encode(run(load_config(options.config), options.engine, runs, work))
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
