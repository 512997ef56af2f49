"""Computes decode steps of a tiny Thinker and Talker by kernels in Triton's interpreter, in a
process of its own: `python -m tests.unit.kernels.interpreted_step OUT`, with TRITON_INTERPRET=1.
"""

import importlib
import sys
from typing import Any

import torch
from torch import Tensor

from fleet.engine.torch.attention_step import StepLayout
from fleet.engine.torch.experts import grouped_experts
from fleet.engine.torch.kv_pool import KVPool
from fleet.engine.torch.program import GraphProgram
from fleet.engine.torch.step_forms import trial_inputs
from fleet.engine.torch.step_inputs import DrawInputs
from fleet.models.qwen3_omni.talker import Talker
from fleet.models.qwen3_omni.thinker import Thinker
from tests.decoder_weights import random_model

KERNELS = "fleet.engine.torch.kernels"
OPERATIONS = (
    ("row_product", "_row_product"),
    ("routed_experts", "_route"),
    ("routed_experts", "_expert_gate_up"),
    ("routed_experts", "_expert_down"),
    ("routed_experts", "_combine_experts"),
    ("heads", "heads_to_slots"),
    ("paged_attention", "attend_parts"),
    ("paged_attention", "join_parts"),
    ("frame_attention", "attend_frame"),
    ("draw_codes", "draw_codes"),
)
"""Modules and names of all operations. What they run on a GPU is named `_NAME_on_gpu`."""
NUM_ROWS = (1, 3)
PAGE_SIZE = 16


def make_program(name: str, *, invariant: bool = False) -> GraphProgram[Any]:
    model = random_model({})
    if name == "talker":
        return Talker(*model, grouped_experts, 64, tiled=invariant)
    return Thinker(*model, frozenset([2]), grouped_experts, 64, one_by_one=invariant)


def draws_of(program: GraphProgram[Any], num_rows: int) -> DrawInputs:
    """Return parameters of rows of which every other one samples."""
    shape = program.step_shape
    numbers_B1 = torch.arange(num_rows)[:, None]
    keys_BQ = numbers_B1 * 7919 + torch.arange(shape.num_codes)
    ones_B1 = torch.ones(num_rows, 1)
    return DrawInputs(
        top_k=torch.full((num_rows, 1), 50),
        is_sampled=numbers_B1 % 2,
        bans_end=torch.ones(num_rows, 1, dtype=torch.int64),
        temperature=ones_B1,
        top_p=ones_B1 * 0.9,
        repetition=ones_B1,
        frequency=ones_B1 * 0,
        presence=ones_B1 * 0,
        noise_low_BQ=keys_BQ,
        noise_high_BQ=keys_BQ + 1,
        counts_BV=torch.zeros(num_rows, shape.num_ids, dtype=torch.int16),
        allowed_BW=torch.full((num_rows, -(-shape.num_ids // 8)), 255, dtype=torch.uint8),
    )


def compute_step(
    program: GraphProgram[Any], num_rows: int, *, is_fused: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the final hidden states, the sampled codes, and the next input rows of a step."""
    pool = KVPool(
        program.kv_shape,
        num_pages=2,
        page_size=PAGE_SIZE,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    inputs = trial_inputs(pool, program.step_shape.hidden_size, num_rows)
    with torch.inference_mode():
        layout = StepLayout(pool, inputs, is_fused=is_fused)
        last_BH = program.forward(inputs.rows_BH, layout, ()).last_NH
        sampled = program.sample_step(last_BH, draws_of(program, num_rows), is_fused=is_fused)
    return last_BH, sampled.codes_BQ, sampled.rows_BH


def interpret_on_cpu() -> None:
    """Run on a CPU what the operations run on a GPU, instead of their slow twins."""
    for module_name, name in OPERATIONS:
        module: Any = importlib.import_module(f"{KERNELS}.{module_name}")
        launch = getattr(module, f"_{name.removeprefix('_')}_on_gpu")
        getattr(module, name).register_kernel("cpu", launch)


def main(out: str) -> None:
    interpret_on_cpu()
    steps = {
        (name, num_rows): compute_step(program, num_rows, is_fused=True)
        for name, program in {each: make_program(each) for each in ("thinker", "talker")}.items()
        for num_rows in NUM_ROWS
    }
    torch.save(steps, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
