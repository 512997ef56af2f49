"""Runs functions that launch Triton kernels in Triton's interpreter, on a CPU, whose arithmetic in
bfloat16 is corrected to that of a GPU, and whose sort is made faster.
"""

import importlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.support import REPO

Call = tuple[str, tuple[Any, ...]]
"""Function as `module:name`, and its arguments: tensors, numbers, dtypes and None."""


def interpret(calls: Sequence[Call], folder: Path) -> list[tuple[Any, tuple[Any, ...]]]:
    """Return the result of each call, and the arguments as the call left them. All calls are made
    in one process of their own, with `folder` for its files: the interpreter is chosen when a
    kernel is defined.
    """
    torch.save(list(calls), folder / "calls.pt")
    subprocess.run(
        [sys.executable, "-m", __name__, folder / "calls.pt", folder / "outs.pt"],
        check=True,
        cwd=REPO,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )
    return torch.load(folder / "outs.pt", weights_only=True)


def _nearest_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    return torch.from_numpy(np.ascontiguousarray(values)).bfloat16().view(torch.uint16).numpy()


def _from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return torch.from_numpy(np.ascontiguousarray(bits)).view(torch.bfloat16).float().numpy()


def _correct_bfloat16() -> None:
    """Round casts to bfloat16 to the nearest value, where the interpreter cuts the last bits off,
    and multiply matrices of bfloat16 by their values, not their bits.
    """
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    language: Any = importlib.import_module("triton.language")
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    cast, dot = builder.cast_impl, builder.create_dot

    def rounded_cast(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar == language.float32 and dst_type.scalar == language.bfloat16:
            return handle(_nearest_bfloat16(src.data), dst_type.scalar)
        return cast(self, src, dst_type)

    def widened(side: Any) -> Any:
        if side.dtype.scalar == language.bfloat16:
            return handle(_from_bfloat16(side.data), language.float32)
        return side

    def widened_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return dot(self, widened(a), widened(b), *others)

    builder.cast_impl, builder.create_dot = rounded_cast, widened_dot


def _reduce_xor_at_once() -> None:
    """Compute the exclusive or along an axis, which `tl.sort` consists of, by NumPy: a sort of
    2,048 numbers takes milliseconds instead of a minute.
    """
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    standard: Any = importlib.import_module("triton.language.standard")
    generic_reduce = interpreter.ReduceOps.generic_reduce

    def reduce(self: Any, given: Any) -> Any:
        if self.combine_fn is not standard._xor_combine:
            return generic_reduce(self, given)
        bits = np.bitwise_xor.reduce(given[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
        return [self.to_tensor(bits, given[0].dtype)]

    interpreter.ReduceOps.generic_reduce = reduce


def _run(calls_path: str, outs_path: str) -> None:
    _correct_bfloat16()
    _reduce_xor_at_once()
    outs: list[tuple[Any, tuple[Any, ...]]] = []
    for function, arguments in torch.load(calls_path, weights_only=True):
        module, _, name = function.partition(":")
        outs.append((getattr(importlib.import_module(module), name)(*arguments), arguments))
    torch.save(outs, outs_path)


if __name__ == "__main__":
    _run(*sys.argv[1:])
