"""Precisions of a language model's weights, and the fastest one on this machine, measured."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from fleet.models.causal_lm.load import read_config
from fleet.models.causal_lm.quantized import int8_layer, widen_products

FLOAT32, BFLOAT16, INT8, INT4 = "float32", "bfloat16", "int8", "int4"
WEIGHT_BITS = {INT8: 8, INT4: 4}
BUDGET_S, LIMIT_S = 0.15, 1.0
"""Seconds of CPU time for each measurement, and seconds of wall time after which a measurement ends
on a busy machine.
"""
MAX_NUMBERS = 1 << 22
"""Largest number of elements of a measured weight matrix: 4 MiB in 8 bits."""
ALL_NUMBERS = 1 << 26
"""Largest number of elements of all measured weights together: more than caches hold, since a model
reads each weight from memory once per token.
"""
PROMPT_ROWS, NUM_TOKENS = 32, 16
"""Numbers of prompt positions and of generated tokens in the short answer that is measured."""
GAINS = {INT8: 1.25, BFLOAT16: 1.1}
"""Least speedup for which a less exact precision is chosen instead of a more exact one."""


def measure_precisions(folder: Path, threads: int) -> dict[str, float]:
    """Return the CPU time of one linear layer, of the size of the model's layers, in a short
    answer: milliseconds by precision, divided by `threads`. Takes seconds, and sets the number of
    torch's threads to `threads`. Raises: ConfigError if the folder has no configuration.
    """
    config = read_config(folder)
    width = int(config.hidden_size)
    inner = int(getattr(config, "intermediate_size", None) or 4 * width)
    torch.set_num_threads(threads)
    shape = (min(inner, max(1, MAX_NUMBERS // width)), width)
    num_of_model = 4 * int(config.num_hidden_layers)
    num_weights = max(1, min(num_of_model, ALL_NUMBERS // (shape[0] * width)))
    weights = [torch.randn(shape) for _ in range(num_weights)]
    prompt, row = torch.randn(PROMPT_ROWS, width), torch.randn(1, width)
    layers: Mapping[str, Callable[[nn.Linear], nn.Module]] = {
        FLOAT32: lambda linear: linear,
        BFLOAT16: lambda linear: _in_bfloat16(linear),
        INT8: int8_layer,
    }
    times_ms: dict[str, float] = {}
    with torch.inference_mode():
        for name, layer in layers.items():
            dtype = torch.float32 if name == FLOAT32 else torch.bfloat16
            built = [layer(_linear(weight)) for weight in weights]
            prompt_ms, token_ms = (_time_ms(built, rows.to(dtype)) for rows in (prompt, row))
            times_ms[name] = (prompt_ms + NUM_TOKENS * token_ms) / max(1, threads)
    return times_ms


def choose_precision(times_ms: Mapping[str, float]) -> str:
    """Return the precision to use: bfloat16 instead of float32, and then int8 instead of either,
    each only if faster by its factor in `GAINS`. `times_ms`: result of `measure_precisions`.
    """
    floating = FLOAT32
    if times_ms[BFLOAT16] * GAINS[BFLOAT16] < times_ms[FLOAT32]:
        floating = BFLOAT16
    return INT8 if times_ms[INT8] * GAINS[INT8] < times_ms[floating] else floating


def _linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def _in_bfloat16(linear: nn.Linear) -> nn.Module:
    model = nn.Sequential(linear.bfloat16())
    widen_products(model)
    return model


def _time_ms(layers: Sequence[nn.Module], rows: Tensor) -> float:
    """Return the shortest CPU time of a round of all layers, in milliseconds per layer."""
    best, stop_s, give_up_s = math.inf, time.process_time() + BUDGET_S, time.monotonic() + LIMIT_S
    while math.isinf(best) or (time.process_time() < stop_s and time.monotonic() < give_up_s):
        began_s = time.process_time()
        for layer in layers:
            layer(rows)
        best = min(best, time.process_time() - began_s)
    return best * 1000 / len(layers)
