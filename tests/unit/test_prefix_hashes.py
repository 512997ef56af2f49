"""Hashes of a request's first rows: equal for equal rows however they arrived, and different for
any others.
"""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fleet.spans.torch.prefix_hashes import Keys, PrefixHashes, RowKeys

NUMBERS = st.integers(0, 2**64 - 1)
KEYS = st.lists(NUMBERS, max_size=40)
CUTS = st.lists(st.integers(0, 40), max_size=6)


def keys_of(numbers: Sequence[int]) -> Keys:
    return np.array(numbers, np.uint64)


def hashes_of(numbers: Sequence[int], cuts: Sequence[int] = ()) -> PrefixHashes:
    """Return the hashes of rows with the keys `numbers`, which arrive in parts cut at `cuts`."""
    hashes, ends = PrefixHashes(), sorted({min(cut, len(numbers)) for cut in cuts} | {len(numbers)})
    for start, stop in zip([0, *ends[:-1]], ends, strict=True):
        hashes.extend(start, keys_of(numbers[start:stop]))
    return hashes


def listed(hashes: PrefixHashes) -> list[int | None]:
    return [hashes.before(start) for start in range(hashes.num_rows + 1)]


@given(KEYS, CUTS)
def test_hashes_do_not_depend_on_how_rows_were_cut_into_passes(
    numbers: list[int], cuts: list[int]
) -> None:
    assert listed(hashes_of(numbers, cuts)) == listed(hashes_of(numbers))


@given(KEYS, KEYS)
def test_different_prefixes_of_a_length_have_different_hashes(
    first: list[int], second: list[int]
) -> None:
    one, other = hashes_of(first), hashes_of(second)
    for length in range(min(len(first), len(second)) + 1):
        assert (one.before(length) == other.before(length)) == (first[:length] == second[:length])


ORDERED_TWICE = st.lists(NUMBERS, min_size=2, max_size=20, unique=True).flatmap(
    lambda numbers: st.tuples(st.just(numbers), st.permutations(numbers))
)


@given(ORDERED_TWICE)
def test_rows_in_another_order_have_another_hash(orders: tuple[list[int], list[int]]) -> None:
    first, second = orders
    assert (hashes_of(first).before(len(first)) == hashes_of(second).before(len(first))) == (
        first == second
    )


@given(KEYS, st.integers(0, 40), KEYS)
def test_rows_that_are_computed_again_replace_those_that_follow(
    first: list[int], start: int, second: list[int]
) -> None:
    start = min(start, len(first))
    hashes = hashes_of(first)
    hashes.extend(start, keys_of(second))
    replaced = first[:start] + second
    assert hashes.num_rows == len(replaced)
    assert listed(hashes) == listed(hashes_of(replaced))
    assert hashes.before(len(replaced) + 1) is None


def test_rows_beyond_the_present_ones_are_refused() -> None:
    with pytest.raises(AssertionError, match="row 3 of 2"):
        hashes_of([1, 2]).extend(3, keys_of([4]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_key_of_a_row_does_not_depend_on_the_rows_beside_it(dtype: torch.dtype) -> None:
    rows_NH = torch.randint(0, 256, (12, 96 * dtype.itemsize), dtype=torch.uint8).view(dtype)
    keys = RowKeys()
    whole = keys.of(rows_NH)
    assert (whole.dtype, whole.shape) == (np.uint64, (12,))
    for size in (1, 5, 12):
        parts = [keys.of(part) for part in rows_NH.split(size)]
        assert np.array_equal(np.concatenate(parts), whole)
    assert np.array_equal(keys.of(rows_NH.T.contiguous().T), whole), (
        "the layout in memory is no part of a row"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_changed_bit_of_a_row_changes_its_key(dtype: torch.dtype) -> None:
    row_1H, keys = torch.randn(1, 32).to(dtype), RowKeys()
    bytes_1B = row_1H.view(torch.uint8)
    seen = {int(keys.of(row_1H)[0])}
    for at in range(bytes_1B.shape[1]):
        for bit in range(8):
            changed = bytes_1B.clone()
            changed[0, at] ^= 1 << bit
            seen.add(int(keys.of(changed.view(dtype))[0]))
    assert len(seen) == 1 + 8 * bytes_1B.shape[1]


def test_rows_with_exchanged_values_have_different_keys() -> None:
    row_1H = torch.arange(64, dtype=torch.float32)[None]
    keys = RowKeys()
    assert len({int(keys.of(row_1H.roll(by, 1))[0]) for by in range(64)}) == 64
