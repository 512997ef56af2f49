"""Runs functions that launch Triton kernels in Triton's interpreter, on a CPU."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

Call = tuple[str, tuple[Any, ...]]
"""Function as `module:name`, and its arguments: tensors, numbers and None."""
RUN = """
import importlib, sys, torch
outs = []
for function, arguments in torch.load(sys.argv[1], weights_only=True):
    module, _, name = function.partition(":")
    outs.append(getattr(importlib.import_module(module), name)(*arguments))
torch.save(outs, sys.argv[2])
"""


def run_interpreted(calls: Sequence[Call], folder: Path) -> list[Any]:
    """Return the result of each call, all made in one process of their own, with `folder` for its
    files: the interpreter is chosen when a kernel is defined.
    """
    torch.save(list(calls), folder / "calls.pt")
    subprocess.run(
        [sys.executable, "-c", RUN, folder / "calls.pt", folder / "outs.pt"],
        check=True,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )
    return torch.load(folder / "outs.pt", weights_only=True)
