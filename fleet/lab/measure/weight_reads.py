"""Counter of the weight bytes that a computation reads, operation by operation. Of a layer's
experts only the chosen ones count.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

GATHERS = ("embedding", "index_select", "index")
"""Operations that read as many bytes of their table as they return."""
GROUPED = "grouped_mm"


class WeightReads(TorchDispatchMode):
    """Dispatch mode that adds the weight bytes read by operations inside its `with` block to
    `num_bytes`. A weight that is read twice counts twice, since large weights do not fit a cache.

    `is_weight`: returns True for weights and their views. The mode slows every operation, and
    synchronizes with the device.
    """

    def __init__(self, is_weight: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self._is_weight = is_weight
        self.num_bytes = 0

    def __torch_dispatch__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        func: torch._ops.OpOverload,  # pyright: ignore[reportPrivateUsage]
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        out = func(*args, **given)
        if not func.is_view:
            self.num_bytes += self._bytes_read(
                func.overloadpacket.__name__, (*args, *given.values()), out
            )
        return out

    def _bytes_read(self, operation: str, given: Sequence[Any], out: Any) -> int:
        tensors = [value for value in tree_iter(given) if isinstance(value, Tensor)]
        weights = [tensor for tensor in tensors if self._is_weight(tensor)]
        if not weights:
            return 0
        if operation in GATHERS:
            return out.nbytes
        if operation.endswith(GROUPED):
            return sum(_share_of_groups(tensors) * weight.nbytes for weight in weights).__ceil__()
        return sum(weight.nbytes for weight in weights)


def _share_of_groups(tensors: Sequence[Tensor]) -> float:
    """Return the share of the matrices in a grouped product that have rows. The only int32 tensor
    of `tensors` has the end row of each group.
    """
    (ends,) = (tensor for tensor in tensors if tensor.dtype == torch.int32)
    sizes = ends.diff(prepend=ends.new_zeros(1))
    return (sizes > 0).float().mean().item()
