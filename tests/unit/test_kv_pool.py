"""Pages are lent, grown and given back; none is ever lost or lent twice."""

import random

import pytest
import torch

from fleet.engine.torch.kv_pool import KVPool, KVShape, PageTable


def make_pool(num_pages: int = 8, page_size: int = 4) -> KVPool:
    shape = KVShape(num_layers=2, num_kv_heads=1, head_dim=2)
    return KVPool(shape, num_pages=num_pages, page_size=page_size, dtype=torch.float32, device=torch.device("cpu"))


def test_a_table_grows_by_whole_pages() -> None:
    pool = make_pool()
    table = pool.borrow()
    assert pool.grow(table, 1)
    assert len(table.pages) == 1
    assert pool.grow(table, 4)
    assert len(table.pages) == 1
    assert pool.grow(table, 9)
    assert len(table.pages) == 3
    assert pool.grow(table, 2), "growing never shrinks"
    assert pool.num_used == 3
    pool.check()


def test_nothing_is_taken_when_too_few_are_free() -> None:
    pool = make_pool(num_pages=3)
    one, two = pool.borrow(), pool.borrow()
    assert pool.grow(one, 8)
    assert not pool.grow(two, 8)
    assert (pool.num_free, two.pages) == (1, [])
    pool.check()


def test_a_lent_page_is_clean_whatever_its_last_holder_left() -> None:
    pool = make_pool(num_pages=1)
    table = pool.borrow()
    pool.grow(table, 4)
    pool.data[:, 0] = torch.nan
    pool.give_back(table)
    assert pool.grow(pool.borrow(), 4)
    assert not pool.data[:, 0].any()


def test_the_scratch_page_is_never_lent() -> None:
    pool = make_pool(num_pages=2)
    table = pool.borrow()
    assert pool.grow(table, 8)
    assert pool.scratch_page not in table.pages
    assert pool.data.shape[1] == 3


def test_check_finds_a_page_lent_twice_and_a_page_lost() -> None:
    pool = make_pool()
    table = pool.borrow()
    pool.grow(table, 8)
    table.pages[1] = table.pages[0]
    with pytest.raises(AssertionError, match="lost or lent twice"):
        pool.check()
    table.pages.pop()
    with pytest.raises(AssertionError, match="2 pages used, 1 held"):
        pool.check()


def test_any_order_of_lending_and_giving_back_keeps_the_books() -> None:
    chance = random.Random(3)
    pool = make_pool(num_pages=13, page_size=3)
    lent: list[PageTable] = []
    for _ in range(500):
        action = chance.choice(("borrow", "grow", "grow", "give back"))
        if action == "borrow" or not lent:
            lent.append(pool.borrow())
        elif action == "grow":
            pool.grow(chance.choice(lent), chance.randrange(1, 20))
        else:
            pool.give_back(lent.pop(chance.randrange(len(lent))))
        pool.check()
    for table in lent:
        pool.give_back(table)
    assert pool.num_free == 13
