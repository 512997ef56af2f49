"""Random weights instead of a checkpoint, generated directly in their place, so that a model of any
size needs no files.

Knows no model: the caller gives the shapes, and the function that fills a weight.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fleet.models.checkpoint import WeightReader

Fill = Callable[[str, Tensor], None]
"""Function that fills a weight (name, tensor) in place."""


class RandomWeightReader(WeightReader):
    """Reader that generates random weights. `shapes`: shape of each weight by name; `fill`:
    function that fills a weight. `num_bytes`: size of all weights generated so far, before any were
    rounded.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        fill: Fill,
        *,
        device: torch.device,
        dtype: torch.dtype,
        fp8_experts: bool = False,
    ) -> None:
        super().__init__(
            "random weights", shapes, device=device, dtype=dtype, fp8_experts=fp8_experts
        )
        self._shapes, self._fill = shapes, fill
        self._storages: dict[int, int] = {}
        """Address and size of the memory of each weight; memory that was freed since may have been
        reused, in another size.
        """
        self.num_bytes = 0

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise self._missing(name)
        return self._shapes[name]

    def holds(self, tensor: Tensor) -> bool:
        """Return True if the tensor is a weight of this reader, one rounded from its weights, or a
        view of one.
        """
        storage = tensor.untyped_storage()
        held = self._storages.get(storage.data_ptr()) == storage.nbytes()
        return held or any(_share_memory(tensor, rounded) for rounded in self.rounded)

    def _write(self, out: Tensor, name: str, part: int | None = None) -> None:
        expected = self.shape(name) if part is None else self.shape(name)[1:]
        assert tuple(out.shape) == expected, (
            f"{name} has the shape {expected}, not {tuple(out.shape)}"
        )
        self._fill(name if part is None else f"{name}.{part}", out)
        storage = out.untyped_storage()
        self._storages[storage.data_ptr()] = storage.nbytes()
        self.num_bytes += out.nbytes


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
