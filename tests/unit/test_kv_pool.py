"""KV pages are allocated and freed; no page is ever lost, or in two page tables."""

import ctypes
import random

import pytest
import torch

from fleet.engine.torch.kv_pool import KVPool, KVShape, PageTable


def make_pool(num_pages: int = 8, page_size: int = 4, dtype: torch.dtype = torch.float32) -> KVPool:
    shape = KVShape(num_layers=2, num_kv_heads=1, head_dim=2)
    return KVPool(
        shape, num_pages=num_pages, page_size=page_size, dtype=dtype, device=torch.device("cpu")
    )


def test_table_grows_by_whole_pages() -> None:
    pool = make_pool()
    table = pool.open_table()
    assert pool.grow(table, 1)
    assert len(table.pages) == 1
    assert pool.grow(table, 4)
    assert len(table.pages) == 1
    assert pool.grow(table, 9)
    assert len(table.pages) == 3
    assert pool.grow(table, 2), "growing never shrinks"
    assert pool.num_used == 3
    pool.check()


def test_grow_takes_no_page_when_too_few_are_free() -> None:
    pool = make_pool(num_pages=3)
    one, two = pool.open_table(), pool.open_table()
    assert pool.grow(one, 8)
    assert not pool.grow(two, 8)
    assert (pool.num_free, two.pages) == (1, [])
    pool.check()


def test_allocated_page_is_zero() -> None:
    pool = make_pool(num_pages=1)
    table = pool.open_table()
    pool.grow(table, 4)
    pool.data[:, 0] = torch.nan
    pool.close_table(table)
    assert pool.grow(pool.open_table(), 4)
    assert not pool.data[:, 0].any()


def test_pages_are_not_lost_when_zeroing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool()
    table = pool.open_table()
    with monkeypatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(pool, "data", None)
        pool.grow(table, 8)
    pool.check()
    pool.close_table(table)
    assert pool.num_free == 8


def test_pages_are_not_zeroed_without_clean() -> None:
    pool = make_pool(num_pages=1)
    pool.data[:, 0] = 7
    assert pool.grow(pool.open_table(), 4, clean=False)
    assert bool((pool.data[:, 0] == 7).all())


def test_page_lies_at_its_located_address() -> None:
    pool = make_pool()
    others, table = pool.open_table(), pool.open_table()
    for positions in (4, 8):
        assert pool.grow(others, positions) and pool.grow(table, positions)
    pool.data[:] = torch.arange(pool.data.numel(), dtype=torch.float32).view_as(pool.data)
    place, memory = pool.locate(table), pool.memory
    assert memory is not None and place.length_bytes == pool.read(table, 8).nbytes
    for layer in range(place.num_layers):
        for page in place.pages:
            at = place.address + layer * place.layer_bytes + page * place.block_bytes
            assert (
                memory.address
                <= at
                <= at + place.block_bytes
                <= memory.address + memory.length_bytes
            )
            assert (
                ctypes.string_at(at, place.block_bytes) == pool.data[layer, page].numpy().tobytes()
            )


def held_by(pool: KVPool, num_positions: int) -> PageTable:
    table = pool.open_table()
    assert pool.grow(table, num_positions)
    return table


@pytest.mark.parametrize("num_positions", [6, 4])
def test_pages_read_from_one_pool_can_be_written_to_another(num_positions: int) -> None:
    """Pages read from one pool can be written to another, even if fewer positions are written than
    read, or the source table has room for more.
    """
    source, target = make_pool(), make_pool()
    theirs, ours = held_by(source, 12), held_by(target, num_positions)
    source.data[:] = torch.rand_like(source.data)
    assert target.write(ours, source.read(theirs, 6), 6)
    assert torch.equal(target.data[:, ours.pages], source.data[:, theirs.pages[: len(ours.pages)]])


@pytest.mark.parametrize(
    ("dtype", "page_size"),
    [(torch.float32, 4), (torch.float32, 8), (torch.bfloat16, 8)],
    ids=["wider", "both", "longer pages"],
)
def test_write_refuses_bytes_of_another_dtype_or_page_size(
    dtype: torch.dtype, page_size: int
) -> None:
    source, target = make_pool(page_size=page_size, dtype=dtype), make_pool(dtype=torch.bfloat16)
    theirs, ours = held_by(source, 6), held_by(target, 1)
    source.data[:] = 7
    assert not target.write(ours, source.read(theirs, 1), 1)
    assert not target.data.any(), "nothing is written"
    assert source.locate(theirs).layout != target.locate(ours).layout


def test_shrink_frees_whole_pages_and_zeroes_the_rest_of_the_last() -> None:
    pool = make_pool()
    table = pool.open_table()
    pool.grow(table, 16)
    pool.data[:, table.pages] = 7.0
    first, second, *_ = table.pages
    pool.shrink(table, 6)
    assert (table.pages, pool.num_used) == ([first, second], 2)
    assert (
        (pool.data[:, first] == 7).all()
        and (pool.data[:, second, :2] == 7).all()
        and not pool.data[:, second, 2:].any()
    )
    pool.shrink(table, 4)
    assert table.pages == [first] and (pool.data[:, first] == 7).all()
    pool.shrink(table, 0)
    assert (table.pages, pool.num_free) == ([], 8)
    pool.check()


def test_scratch_page_is_never_allocated() -> None:
    pool = make_pool(num_pages=2)
    table = pool.open_table()
    assert pool.grow(table, 8)
    assert pool.scratch_page not in table.pages
    assert pool.data.shape[1] == 3


def test_check_finds_a_shared_page_and_a_lost_page() -> None:
    pool = make_pool()
    table = pool.open_table()
    pool.grow(table, 8)
    table.pages[1] = table.pages[0]
    with pytest.raises(AssertionError, match="lost or in two tables"):
        pool.check()
    table.pages.pop()
    with pytest.raises(AssertionError, match="2 pages used, 1 held"):
        pool.check()


def test_any_order_of_allocation_and_release_keeps_the_pool_consistent() -> None:
    chance = random.Random(3)
    pool = make_pool(num_pages=13, page_size=3)
    lent: list[PageTable] = []
    for _ in range(500):
        action = chance.choice(("borrow", "grow", "grow", "shrink", "give back"))
        if action == "borrow" or not lent:
            lent.append(pool.open_table())
        elif action == "grow":
            pool.grow(chance.choice(lent), chance.randrange(1, 20))
        elif action == "shrink":
            table = chance.choice(lent)
            pool.shrink(table, chance.randrange(len(table.pages) * pool.page_size + 1))
        else:
            pool.close_table(lent.pop(chance.randrange(len(lent))))
        pool.check()
    for table in lent:
        pool.close_table(table)
    assert pool.num_free == 13
