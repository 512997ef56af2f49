"""Conversion of hidden states to bytes on a connection, and back. Legend: N rows, H width."""

import torch
from torch import Tensor

from fleet.core.errors import BadInput
from fleet.engine.torch.build import DTYPES


def rows_to_wire(rows_NH: Tensor, wire_dtype: str) -> memoryview:
    """Return hidden states in dtype `wire_dtype` as bytes.

    The bytes share the tensor's memory if the tensor is in host memory, has this dtype and fills
    its storage contiguously; otherwise they are a copy. So bytes that are kept keep no other memory
    alive.
    """
    host_NH = rows_NH.to(device="cpu", dtype=DTYPES[wire_dtype]).contiguous()
    if host_NH.untyped_storage().nbytes() > host_NH.nbytes:
        host_NH = host_NH.clone()
    return host_NH.view(torch.uint8).numpy().data.cast("B") if host_NH.numel() else memoryview(b"")


def check_rows(data: memoryview, num_rows: int, wire_dtype: str) -> None:
    """Check that `data` has the size of `num_rows` rows of equal width; 0 rows have no bytes.

    Raises: BadInput.
    """
    itemsize = DTYPES[wire_dtype].itemsize
    if bool(len(data)) != bool(num_rows) or len(data) % (itemsize * max(1, num_rows)):
        raise BadInput(f"{len(data)} bytes are not {num_rows} rows in {wire_dtype}")


def rows_from_wire(data: memoryview, num_rows: int, wire_dtype: str, like: Tensor) -> Tensor:
    """Return received bytes as a tensor [num_rows, width] with the dtype and device of `like`.

    Raises: BadInput if the size does not fit.
    """
    check_rows(data, num_rows, wire_dtype)
    dtype = DTYPES[wire_dtype]
    rows = torch.frombuffer(data, dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)
    return rows.view(num_rows, len(rows) // max(1, num_rows)).to(
        device=like.device, dtype=like.dtype
    )
