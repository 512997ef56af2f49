"""Pieces of memory to read so that one KV pool's pages become another pool's pages."""

import random

import msgspec
import pytest

from fleet.core.pages import PagesRef, Span, decode_pages, encode_pages, spans_between

BLOCK_BYTES, NUM_LAYERS = 8, 3


def pages(
    *numbers: int, address: int = 0, num_pages: int = 10, num_layers: int = NUM_LAYERS
) -> PagesRef:
    return PagesRef(
        address=address,
        num_layers=num_layers,
        layer_bytes=num_pages * BLOCK_BYTES,
        block_bytes=BLOCK_BYTES,
        pages=numbers,
    )


def test_pages_adjacent_on_both_sides_are_read_together() -> None:
    assert spans_between(pages(2, 3, 4), pages(5, 6, 7, address=1000, num_layers=NUM_LAYERS)) == [
        Span(layer * 80 + 16, 1000 + layer * 80 + 40, 24) for layer in range(NUM_LAYERS)
    ]


@pytest.mark.parametrize(
    ("remote", "local"), [((2, 3), (5, 7)), ((2, 4), (5, 6)), ((3, 2), (7, 6))]
)
def test_pages_apart_on_one_side_are_read_block_by_block(
    remote: tuple[int, ...], local: tuple[int, ...]
) -> None:
    spans = spans_between(pages(*remote), pages(*local))
    assert [span.length_bytes for span in spans] == [BLOCK_BYTES] * 2 * NUM_LAYERS


def test_spans_name_the_devices_of_both_sides() -> None:
    remote, local = msgspec.structs.replace(pages(1, 5), device=3), pages(2, 6)
    assert {(span.remote_device, span.local_device) for span in spans_between(remote, local)} == {
        (3, None)
    }
    assert {(span.remote_device, span.local_device) for span in spans_between(local, remote)} == {
        (None, 3)
    }
    assert decode_pages(encode_pages(remote)) == remote


def test_each_block_arrives_at_its_place_for_any_pages() -> None:
    chance = random.Random(7)
    for _ in range(50):
        count = chance.randrange(1, 8)
        remote, local = (pages(*chance.sample(range(num), count), num_pages=num) for num in (9, 12))
        theirs, ours = (
            chance.randbytes(NUM_LAYERS * remote.layer_bytes),
            bytearray(NUM_LAYERS * local.layer_bytes),
        )
        for there, here, length, *_ in spans_between(remote, local):
            ours[here : here + length] = theirs[there : there + length]
        for layer in range(NUM_LAYERS):
            for there, here in zip(remote.pages, local.pages, strict=True):
                begin, end = (
                    at * BLOCK_BYTES + layer * ref.layer_bytes
                    for at, ref in ((there, remote), (here, local))
                )
                assert ours[end : end + BLOCK_BYTES] == theirs[begin : begin + BLOCK_BYTES]


def test_pools_that_are_not_alike_have_nothing_in_common() -> None:
    assert spans_between(pages(1, 2), pages(1)) == []
    assert spans_between(pages(1), pages(1, num_layers=2)) == []
    other = PagesRef(address=0, num_layers=NUM_LAYERS, layer_bytes=160, block_bytes=16, pages=(1,))
    assert spans_between(pages(1), other) == []


def test_they_cross_the_wire() -> None:
    assert decode_pages(encode_pages(pages(4, 2))) == pages(4, 2)


def test_blocks_that_are_read_otherwise_have_no_place_however_large_they_are() -> None:
    """KV blocks of another layout have no place in the pool, even if sizes match: a page of 16
    positions in float32 is as large as a page of 32 in bfloat16.
    """
    wide, narrow = (
        msgspec.structs.replace(pages(1), layout=layout)
        for layout in ("float32, 16", "bfloat16, 32")
    )
    assert spans_between(wide, narrow) == []
    assert spans_between(wide, wide) != []
