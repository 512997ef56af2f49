"""Matrix products of a few rows, as in decode steps.

Legend: N rows, H inputs, O outputs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fleet.core.processor import processor_field

MOST_ROWS = 4
"""Largest number of float32 rows that an AMD CPU multiplies as weight x rows instead of by
`F.linear` (rows x weight); a single row is computed twice. With MKL, weight x rows is 1.5 to 3
times as fast on such CPUs if the weights fit into the cache; with 1,024 inputs four rows took a
sixth longer (measured). On a Xeon with AVX-512 `F.linear` is 3 to 6 times as fast if the weights
fit into the second-level cache, and 2 to 3 times (four rows: 1.2) with 1,024 inputs and outputs.
"""
IS_AMD = processor_field("vendor_id") == "AuthenticAMD"
"""True on AMD CPUs, for which `linear` uses the order weight x rows. The maker of the processor
decides and not a measurement, so that processes on equal machines compute alike.
"""


def linear(rows_NH: Tensor, weight_OH: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return `F.linear` of the arguments up to rounding: [N, O]. The order of operations depends on
    N and the processor's maker only.
    """
    num_rows, is_float32 = len(rows_NH), rows_NH.dtype == weight_OH.dtype == torch.float32
    if (
        not IS_AMD
        or not is_float32
        or rows_NH.device.type != "cpu"
        or rows_NH.dim() != 2
        or not 1 <= num_rows <= MOST_ROWS
    ):
        return F.linear(rows_NH, weight_OH, bias_O)
    doubled_NH = torch.cat([rows_NH, rows_NH]) if num_rows == 1 else rows_NH
    out_NO = torch.mm(weight_OH, doubled_NH.t()).t()[:num_rows].contiguous()
    return out_NO if bias_O is None else out_NO.add_(bias_O)
