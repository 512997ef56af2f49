"""Precisions of a language model's weights, and the fastest one on this machine, measured."""

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fleet.models.causal_lm.load import read_config
from fleet.models.causal_lm.quantized import int8_layer

FLOAT32, BFLOAT16, INT8, INT4 = "float32", "bfloat16", "int8", "int4"
WEIGHT_BITS = {INT8: 8, INT4: 4}
BUDGET_S, LIMIT_S = 0.25, 2.0
"""CPU time of each measurement, and the time after which it ends on a busy machine."""
NUM_WEIGHTS = 4
MAX_NUMBERS = 1 << 22
"""Numbers of a measured weight: 4 MiB in 8 bits."""
GAINS = {INT8: 1.25, BFLOAT16: 1.1}
"""Speed over the next more exact precision from which the less exact one is worth it."""


def measure_precisions(folder: Path, threads: int) -> dict[str, float]:
    """Return the time of a matrix product of one row, of the size of a model's layers, for each
    precision: milliseconds. Takes a second, at most six. Raises: ConfigError if the folder has no
    configuration.
    """
    config = read_config(folder)
    width = int(config.hidden_size)
    inner = int(getattr(config, "intermediate_size", None) or 4 * width)
    torch.set_num_threads(threads)
    shape = (min(inner, max(1, MAX_NUMBERS // width)), width)
    weights = [torch.randn(shape) for _ in range(NUM_WEIGHTS)]
    row = torch.randn(1, width)
    products: Mapping[str, Callable[[Tensor], Callable[[], Tensor]]] = {
        FLOAT32: lambda weight: lambda: F.linear(row, weight),
        BFLOAT16: lambda weight: _in_bfloat16(row, weight),
        INT8: lambda weight: _in_int8(row, weight),
    }
    with torch.inference_mode():
        return {
            name: _time_ms([product(weight) for weight in weights]) / max(1, threads)
            for name, product in products.items()
        }


def choose_precision(times_ms: Mapping[str, float]) -> str:
    """Return the most exact precision that no other one beats by its gain in `GAINS`."""
    floating = FLOAT32
    if times_ms[BFLOAT16] * GAINS[BFLOAT16] < times_ms[FLOAT32]:
        floating = BFLOAT16
    return INT8 if times_ms[INT8] * GAINS[INT8] < times_ms[floating] else floating


def _in_bfloat16(row: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    row, weight = row.bfloat16(), weight.bfloat16()
    return lambda: F.linear(row, weight)


def _in_int8(row: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    layer, row = int8_layer(linear), row.bfloat16()
    return lambda: layer(row)


def _time_ms(products: list[Callable[[], Tensor]]) -> float:
    """Return the shortest CPU time of a round of all products, in milliseconds per product."""
    best, stop_s, give_up_s = math.inf, time.process_time() + BUDGET_S, time.monotonic() + LIMIT_S
    while math.isinf(best) or (time.process_time() < stop_s and time.monotonic() < give_up_s):
        began_s = time.process_time()
        for product in products:
            product()
        best = min(best, time.process_time() - began_s)
    return best * 1000 / len(products)
