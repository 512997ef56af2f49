"""Fused operations as torch sees them: one operation each, with the shapes and the changed
arguments that they declare.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fleet.engine.torch.kernels.draw_codes import draw_codes
from fleet.engine.torch.kernels.frame_attention import attend_frame
from fleet.engine.torch.kernels.heads import heads_to_slots
from fleet.engine.torch.kernels.paged_attention import attend_in_place, attend_parts, join_parts
from tests.unit.kernels import test_draw_codes as draws
from tests.unit.kernels import test_frame_attention as frames
from tests.unit.kernels import test_heads as heads
from tests.unit.kernels import test_paged_attention as pages

DTYPE = torch.float32
PAGES = pages.prompt_arguments(3, DTYPE)
HEADS = heads.make_arguments(3, 4, 2, 8, DTYPE)
FRAMES = frames.make_arguments(3, 5, 1, 2, 4, 2, 8, DTYPE)
DRAWS = draws.make_arguments(3, 20, 8, 4, 0.8, DTYPE)


class OperationNames(TorchDispatchMode):
    """Torch dispatch mode that collects the names of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("operation", "arguments", "names"),
    [
        (heads_to_slots, HEADS, ["heads_to_slots"]),
        (attend_in_place, PAGES, ["attend_parts", "join_parts"]),
        (attend_frame, FRAMES, ["attend_frame"]),
        (draw_codes, DRAWS, ["draw_codes"]),
    ],
)
@pytest.mark.parametrize("inference", [True, False])
def test_fused_operation_is_dispatched_as_one(
    operation: Any, arguments: tuple[Any, ...], names: list[str], inference: bool
) -> None:
    with torch.inference_mode(inference), OperationNames() as dispatched:
        operation(*arguments)
    assert dispatched.names == [f"fleet::{name}" for name in names]


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        (heads_to_slots, HEADS),
        (attend_parts, PAGES),
        (join_parts, (*attend_parts(*PAGES), torch.bfloat16)),
        (attend_frame, FRAMES),
        (draw_codes, DRAWS),
    ],
)
def test_fused_operation_has_the_shapes_and_changes_that_it_declares(
    operation: Any, arguments: tuple[Any, ...]
) -> None:
    torch.library.opcheck(operation, arguments, test_utils=("test_schema", "test_faketensor"))
