"""Keys of prompt rows: equal keys up to a row must mean equal rows up to that row."""

import numpy as np
import pytest
import torch

from fleet.engine.torch.kv_pool import KVPool, KVShape
from fleet.engine.torch.prefix import (
    Prefix,
    PrefixCache,
    content_key,
    content_keys,
    joined_keys,
    num_equal_keys,
)
from fleet.models.qwen3_omni.prefix_keys import keys_of_clips, prompt_keys

AUDIO = 9
IDS = np.array([1, 8, AUDIO, AUDIO, AUDIO, 7, 2, 8, AUDIO, AUDIO, 7, 3], np.int32)
AT_AUDIO = np.flatnonzero(IDS == AUDIO)


def keys(*clips: int) -> np.ndarray:
    return prompt_keys(IDS, AT_AUDIO, keys_of_clips(AT_AUDIO, np.array(clips, np.int64)))


def test_text_rows_are_keyed_by_id_and_audio_rows_by_clip() -> None:
    assert keys(-1, -2)[[0, 1, 5, 6, 11]].tolist() == [1, 8, 7, 2, 3]
    assert (keys(-1, -2)[AT_AUDIO] < 0).all(), "no id of a token is negative"
    assert num_equal_keys(keys(-1, -2), keys(-1, -2)) == len(IDS)
    assert num_equal_keys(keys(-1, -2), keys(-1, -3)) == 8
    assert num_equal_keys(keys(-1, -2), keys(-3, -2)) == 2


def test_clip_with_another_number_of_positions_has_other_keys() -> None:
    fewer = np.delete(AT_AUDIO, 2)
    short = prompt_keys(
        np.delete(IDS, 4),
        fewer - (fewer > 4),
        keys_of_clips(fewer - (fewer > 4), np.array([-1, -2], np.int64)),
    )
    assert num_equal_keys(keys(-1, -2), short) == 2


def test_positions_within_a_clip_have_different_keys() -> None:
    assert len(set(keys(-1, -1)[AT_AUDIO].tolist())) == len(AT_AUDIO)


@pytest.mark.parametrize("clips", [(-1,), (-1, -2, -3)])
def test_adjacent_clips_share_one_key(clips: tuple[int, ...]) -> None:
    """Adjacent audio clips share one key, since clips do not match the runs of audio positions:
    some touch, or one has no position.
    """
    assert num_equal_keys(keys(*clips), keys(*clips)) == len(IDS)
    assert num_equal_keys(keys(*clips), keys(*clips[:-1], -9)) == 2


def test_content_key_depends_on_the_row_bytes() -> None:
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert content_keys(rows).tolist() == [content_key(row.tobytes()) for row in rows]
    other = rows.copy()
    other[1, 3] = np.nextafter(other[1, 3], np.float32(99))
    assert num_equal_keys(content_keys(rows), content_keys(other)) == 1
    assert content_keys(rows[:, ::-1]).tolist() != content_keys(rows).tolist()
    assert content_keys(rows[:0]).dtype == np.int64 and len(content_keys(rows[:0])) == 0


def test_num_equal_keys_ends_at_the_shorter_sequence() -> None:
    one, two = np.array([1, 2, 3], np.int64), np.array([1, 2], np.int64)
    assert (
        num_equal_keys(one, two),
        num_equal_keys(one, one[:0]),
        num_equal_keys(one, joined_keys([two, one[2:]])),
    ) == (2, 0, 3)
    assert joined_keys([]).dtype == np.int64


def test_prefix_cache_keeps_rows_that_have_keys_and_were_computed() -> None:
    shape = KVShape(num_layers=1, num_kv_heads=1, head_dim=1)
    pool = KVPool(shape, num_pages=9, page_size=2, dtype=torch.float32, device=torch.device("cpu"))
    cache = PrefixCache(pool)
    rows = {position: np.full(2, position, np.float32) for position in (1, 4, 6)}
    for session, num_keys, num_computed in (("a", 5, 8), ("b", 8, 3), ("c", 0, 8), ("d", 8, 0)):
        table = pool.open_table()
        assert pool.grow(table, 8)
        cache.put(session, Prefix(keys=np.arange(num_keys), tapped=rows), table, num_computed)
        pool.check()
    assert [cache.num_rows(session) for session in "abcd"] == [5, 3, 0, 0]
    assert cache.num_pages == pool.num_used == 3 + 2
    first, none = cache.take("a"), cache.take("a")
    assert first is not None and none is None
    assert (set(first.prefix.tapped), cache.num_pages, pool.num_used) == ({1, 4}, 2, 5)
    assert cache.drop_oldest() and not cache.drop_oldest()
    assert pool.num_used == 3
