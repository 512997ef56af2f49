"""Matrix products of a few rows: both orders, and the processor that decides."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fleet.core.processor import processor_field
from fleet.engine.torch.linear import MOST_ROWS, linear

INFO = "processor\t: 0\nvendor_id\t: AuthenticAMD\nflags\t\t: fpu avx2\n\nvendor_id\t: Other\n"


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", range(MOST_ROWS + 2))
def test_both_orders_agree_and_only_amd_processors_turn_products_around(
    num_rows: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, weight = torch.randn(num_rows, 48), torch.randn(80, 48)
    offsets = torch.randn(80) if bias else None
    expected = F.linear(rows, weight, offsets)
    for is_amd in (False, True):
        monkeypatch.setattr("fleet.engine.torch.linear.IS_AMD", is_amd)
        got = linear(rows, weight, offsets)
        assert got.shape == expected.shape and got.is_contiguous()
        assert (
            torch.equal(got, expected) if not is_amd else torch.allclose(got, expected, atol=1e-4)
        )


def test_processor_field_is_that_of_the_first_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cpuinfo"
    monkeypatch.setattr("fleet.core.processor.CPU_INFO", path)
    assert processor_field("vendor_id") == ""
    path.write_text(INFO)
    assert processor_field("vendor_id") == "AuthenticAMD"
    assert processor_field("flags") == "fpu avx2" and processor_field("model name") == ""
