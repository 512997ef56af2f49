"""Import hook that lets a CUDA build of torchvision be imported beside a CPU build of torch.

There the compiled library of torchvision cannot be loaded, and its import fails at the first
operator to which it adds gradients or shapes. The hook declares the schemas of these operators
before the import; nothing here calls them. A `.pth` file of the test environment imports this
module in every process, because vLLM inspects models in processes of its own.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

NAMES = """
nms qnms roi_align qroi_align _roi_align_backward ps_roi_align _ps_roi_align_backward
roi_pool _roi_pool_backward ps_roi_pool _ps_roi_pool_backward deform_conv2d _deform_conv2d_backward
""".split()


class DeclareFirst:
    """Import finder that finds no module itself: it declares the operators when torchvision is
    about to be imported.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            declare()
        return None


def declare() -> None:
    import torch

    for name in NAMES:
        torch.library.define(f"torchvision::{name}", "(Tensor x) -> Tensor")


if importlib.util.find_spec("torchvision") is not None:
    sys.meta_path.insert(0, DeclareFirst())
