"""Answers of a tiny Thinker by fused kernels alone, in Triton's interpreter, in a process of its
own: `python -m tests.unit.kernels.interpreted_answers OUT`, with TRITON_INTERPRET=1.
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fleet.core.ids import RequestId, Walk
from fleet.core.request import Sampling
from fleet.engine.base import NUM_POSITIONS, EngineInput, EngineRequest
from fleet.engine.torch.graph_runner import GraphRunner
from fleet.engine.torch.kv_pool import KVPool
from fleet.engine.torch.layout import Extent, slots_of
from fleet.engine.torch.lm_engine import LMEngine, LoopLimits
from fleet.engine.torch.pass_queue import LocalPasses
from fleet.engine.torch.passes import PassDone
from fleet.engine.torch.program import GraphProgram
from tests.unit.kernels.interpreted_step import interpret_on_cpu, make_program

NUM_ROWS, NUM_TOKENS = 5, 2


class WatchedRunner(GraphRunner[Any]):
    """Runner that keeps the keys and values of all layers that its steps write for the first
    request, by position.
    """

    def __init__(self, program: GraphProgram[Any], pool: KVPool) -> None:
        super().__init__(program, pool, [1, 4], prompt_buckets=[2, 8], is_fused=True)
        self.pool, self.rows = pool, dict[int, Tensor]()

    def forward(self, entries: Sequence[tuple[Any, Extent]]) -> PassDone:
        done = super().forward(entries)
        layers = range(self.pool.shape.num_layers)
        for task, extent in entries:
            if len(task.prompt_ids) == NUM_ROWS:
                slots = slots_of([extent], self.pool)
                for position, slot in zip(range(extent.start, extent.stop), slots, strict=True):
                    kv = [self.pool.slots_of_layer[layer][slot] for layer in layers]
                    self.rows[position] = torch.stack(kv).clone()
        return done


def answer(num_requests: int, chunk: int) -> tuple[list[Any], dict[int, Tensor]]:
    """Answer requests side by side; return the first one's outputs and what was written for it.
    `chunk`: most rows of a prompt in one step.
    """
    program = make_program("thinker", invariant=True)
    pool = KVPool(
        program.kv_shape,
        num_pages=16,
        page_size=16,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    runner = WatchedRunner(program, pool)
    limits = LoopLimits(max_batch=4, prefill_chunk_tokens=chunk)
    engine = LMEngine(program, pool, LocalPasses(runner), limits)
    for seed in range(num_requests):
        request = RequestId(str(seed))
        sampling = Sampling(
            temperature=0.9,
            top_k=50 * (seed % 2),
            top_p=0.9,
            seed=seed,
            max_tokens=NUM_TOKENS + 1,
            ignore_eos=True,
        )
        params = {NUM_POSITIONS: "64"}
        engine.submit(EngineRequest(request_id=request, sampling=sampling, params=params))
        ids = np.random.default_rng(seed).integers(5, 500, NUM_ROWS + seed, dtype=np.int32)
        engine.feed(request, EngineInput(walk=Walk("prefill"), arrays={"ids": ids}, final=True))
    outputs: list[Any] = []
    while engine.is_ready():
        outputs += [
            {key: array.tolist() for key, array in output.arrays.items()}
            for output in engine.step()
            if output.request_id == "0"
        ]
    return outputs, runner.rows


def main(out: str) -> None:
    interpret_on_cpu()
    answers = answer(1, 64), answer(2, 3)
    torch.save(answers, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
