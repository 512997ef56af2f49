"""The Thinker on vLLM over two processes of one worker, on a CPU. Run as a module: answers prompts,
loses a rank, and prints a `RanksReport`.

Argument: the checkpoint's folder. vLLM imports this file in each rank, so it is not a test module.
"""

import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import psutil

from fleet.core.errors import EngineStopped
from fleet.core.ids import PREFILL, RequestId, StageName
from fleet.core.request import Sampling
from fleet.engine.base import NUM_POSITIONS, TOKEN, Engine, EngineInput, EngineRequest
from fleet.models.qwen3_omni.thinker import WITH_ROWS
from fleet.stages.qwen3_omni import thinker
from tests.stage_options import stage_options

PROMPTS = ([30, 40, 50, 60], list(range(100, 190)))
PATIENCE_S = 60.0


class RanksReport(msgspec.Struct):
    """Printed report. `tokens`: tokens of each answer. `num_ranks`: number of ranks that ran.
    `error`: error found by the engine's health check after a rank was killed.
    """

    tokens: list[list[int]]
    num_ranks: int
    error: str


def build(checkpoint: Path, engine: str, num_ranks: int = 1) -> Engine:
    options = stage_options(
        stage=StageName("thinker"),
        checkpoint=checkpoint,
        engine=engine,
        vllm={"kv_mib": 32, "tensor_parallel_size": num_ranks},
        kv_pages=64,
        page_size_tokens=32,
    )
    return thinker.build(options).engine


def answers(engine: Engine) -> list[list[int]]:
    for number, ids in enumerate(PROMPTS):
        params = {NUM_POSITIONS: "512", WITH_ROWS: "yes"}
        sampling = Sampling(max_tokens=16, temperature=0.0, ignore_eos=True)
        engine.submit(
            EngineRequest(request_id=RequestId(str(number)), sampling=sampling, params=params)
        )
        arrays = {"ids": np.array(ids, np.int32)}
        engine.feed(RequestId(str(number)), EngineInput(walk=PREFILL, arrays=arrays, final=True))
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    while engine.is_ready():
        for output in engine.step():
            assert output.error is None, output.error
            tokens[int(output.request_id)] += output.arrays.get(
                TOKEN, np.empty(0, np.int32)
            ).tolist()
    return tokens


def error_of_check(engine: Engine) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            engine.check()
        except EngineStopped as stopped:
            return stopped.message
    return ""


def main(checkpoint: Path) -> None:
    engine = build(checkpoint, "vllm", num_ranks=2)
    tokens = answers(engine)
    ranks = [
        child for child in psutil.Process().children() if "Worker" in " ".join(child.cmdline())
    ]
    ranks[1].kill()
    report = RanksReport(tokens=tokens, num_ranks=len(ranks), error=error_of_check(engine))
    print(msgspec.json.encode(report).decode(), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
