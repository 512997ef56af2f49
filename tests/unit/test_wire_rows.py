"""Encoding of rows (hidden states) as bytes between processes."""

import torch

from fleet.spans.torch.wire_rows import rows_from_wire, rows_to_wire


def test_rows_of_a_padded_tile_are_copied_so_that_the_tile_is_free() -> None:
    tile = torch.ones(16, 4)
    whole, part = rows_to_wire(tile, "float32"), rows_to_wire(tile[:1], "float32")
    tile.zero_()
    assert not any(whole), "all rows of a tensor are not copied"
    assert torch.equal(rows_from_wire(part, 1, "float32", tile), torch.ones(1, 4))


def test_rows_return_in_the_dtype_of_the_process() -> None:
    rows = torch.tensor([[1.0, 2.5], [3.0, -0.125]])
    data = rows_to_wire(rows, "bfloat16")
    assert len(data) == 2 * rows.numel()
    assert torch.equal(rows_from_wire(data, 2, "bfloat16", rows), rows)
    assert rows_from_wire(memoryview(b""), 0, "bfloat16", rows).shape == (0, 0)
