"""The draft head: shapes, seeds, and stepwise drafting over pages against the unrolled steps of
training.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fleet.core.errors import ConfigError
from fleet.drafts.eagle3.config import default_layer_ids
from fleet.drafts.eagle3.drafting import draft_tokens, read_taps
from fleet.drafts.eagle3.head import Eagle3Head
from fleet.drafts.eagle3.loss import TrainingRows, UnrolledSteps, unrolled_loss
from fleet.drafts.eagle3.vocabulary import choose_vocabulary, ids_of, mask_of, offsets_of
from fleet.engine.torch.attention_fast import FastLayout
from fleet.engine.torch.attention_rows import RowLayout
from fleet.engine.torch.kv_pool import KVPool, KVShape, PageTable
from fleet.engine.torch.layout import Extent, Layout
from tests.draft_heads import CONFIG, HIDDEN, VOCABULARY, embedding, make_head, make_sample, train

LAYER, NUM_STEPS, LENGTH = 1, 4, 13
"""The head's layer in the KV pool (which has two layers), number of drafting steps, and sample
length.
"""
MakeLayout = Callable[[KVPool, list[Extent]], Layout]


def rows_layout(pool: KVPool, extents: list[Extent]) -> Layout:
    return RowLayout(pool, extents, sum(extent.num_rows for extent in extents))


def make_pool(
    num_tables: int = 1,
    *,
    dtype: torch.dtype = torch.float64,
    num_positions: int = LENGTH + NUM_STEPS,
) -> tuple[KVPool, list[PageTable]]:
    shape = KVShape(num_layers=2, num_kv_heads=CONFIG.num_kv_heads, head_dim=CONFIG.head_dim)
    pool = KVPool(shape, num_pages=24, page_size=4, dtype=dtype, device=torch.device("cpu"))
    tables = [pool.open_table() for _ in range(num_tables)]
    for table in tables:
        assert pool.grow(table, num_positions)
    return pool, tables


def unrolled_logits(head: Eagle3Head, sample: TrainingRows) -> list[dict[int, Tensor]]:
    """Return the logits of each unrolled training step, by row."""
    steps = UnrolledSteps(head, [sample], NUM_STEPS)
    rows = steps.kept[0].tolist()
    return [dict(zip(rows, head.logits(hidden), strict=True)) for hidden in steps.hidden_rows()]


@torch.inference_mode()
@pytest.mark.parametrize(
    ("make_layout", "dtype", "tolerance"),
    [(FastLayout, "float64", 1e-10), (rows_layout, "float32", 1e-5)],
    ids=["fast", "rows"],
)
@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_drafting_over_pages_equals_the_unrolled_steps(
    make_layout: MakeLayout, dtype: str, tolerance: float, norm_before_residual: bool
) -> None:
    """Drafting over KV pages equals the unrolled training steps: from every row, with cached keys,
    the engine's steps give the logits that training computes for all rows together.
    """
    head, sample = (
        make_head(norm_before_residual=norm_before_residual, dtype=dtype),
        make_sample(LENGTH, answer_start=2),
    )
    sample = replace(
        sample,
        embeddings_NH=sample.embeddings_NH.to(head.fc.dtype),
        taps_NT=sample.taps_NT.to(head.fc.dtype),
    )
    unrolled = unrolled_logits(head, sample)
    for row in (0, 1, 5, LENGTH - NUM_STEPS - 1):
        pool, (table,) = make_pool(dtype=head.fc.dtype)
        extents = [
            Extent(table=table, start=start, stop=min(start + 3, row + 1))
            for start in range(0, row + 1, 3)
        ]
        hidden = torch.empty(0)
        for extent in extents:
            after, read = (
                sample.embeddings_NH[extent.start + 1 : extent.stop + 1],
                sample.taps_NT[extent.start : extent.stop],
            )
            hidden = read_taps(head, after, read, make_layout(pool, [extent]), LAYER)[-1:]
        torch.testing.assert_close(head.logits(hidden)[0], unrolled[0][row], rtol=0, atol=tolerance)
        for step in range(1, NUM_STEPS):
            layout = make_layout(pool, [Extent(table=table, start=row + step, stop=row + step + 1)])
            next_embedding = sample.embeddings_NH[row + step + 1][None]
            hidden = head(next_embedding, hidden, layout.positions, partial(layout.attend, LAYER))
            torch.testing.assert_close(
                head.logits(hidden)[0], unrolled[step][row], rtol=0, atol=tolerance
            )


@torch.inference_mode()
def test_taps_of_accepted_tokens_replace_the_keys_of_drafted_rows() -> None:
    head, sample = make_head(), make_sample(LENGTH, answer_start=2)
    pool, (table,) = make_pool()
    read = partial(read_taps, head)
    hidden = read(
        sample.embeddings_NH[1:6],
        sample.taps_NT[:5],
        FastLayout(pool, [Extent(table=table, start=0, stop=5)]),
        LAYER,
    )
    layouts = [FastLayout(pool, [Extent(table=table, start=at, stop=at + 1)]) for at in (5, 6, 7)]
    drafts = draft_tokens(head, hidden[-1:], layouts, LAYER, lambda ids: embedding()[ids])
    assert drafts.shape == (1, 4) and set(drafts[0].tolist()) <= set(VOCABULARY.tolist())
    again = FastLayout(pool, [Extent(table=table, start=5, stop=8)])
    hidden = read(sample.embeddings_NH[6:9], sample.taps_NT[5:8], again, LAYER)
    torch.testing.assert_close(
        head.logits(hidden)[-1], unrolled_logits(head, sample)[0][7], rtol=0, atol=1e-9
    )


def test_batched_drafts_equal_single_ones() -> None:
    head, samples = make_head(), [make_sample(LENGTH, 2, seed=seed) for seed in (3, 4)]

    def drafts_of(chosen: list[TrainingRows]) -> Tensor:
        pool, tables = make_pool(len(chosen))
        extents = [Extent(table=table, start=0, stop=6 + at) for at, table in enumerate(tables)]
        after = torch.cat(
            [
                sample.embeddings_NH[1 : e.stop + 1]
                for sample, e in zip(chosen, extents, strict=True)
            ]
        )
        taps = torch.cat(
            [sample.taps_NT[: e.stop] for sample, e in zip(chosen, extents, strict=True)]
        )
        hidden = read_taps(head, after, taps, FastLayout(pool, extents), LAYER)
        last = torch.tensor([extent.num_rows for extent in extents]).cumsum(0) - 1
        layouts = [
            FastLayout(
                pool,
                [
                    Extent(table=e.table, start=e.stop + step, stop=e.stop + step + 1)
                    for e in extents
                ],
            )
            for step in range(3)
        ]
        return draft_tokens(head, hidden[last], layouts, LAYER, lambda ids: embedding()[ids])

    assert torch.equal(drafts_of(samples)[:1], drafts_of(samples[:1]))


def test_acceptance_of_drafts_over_pages_is_the_simulated_one() -> None:
    """The acceptance of drafts over KV pages is the simulated one: a draft follows the head's own
    earlier drafts, as in serving, while training feeds the sample's tokens.
    """
    head, sample = make_head(), make_sample(LENGTH + 20, answer_start=4)
    train(head, [sample], 14, num_steps=NUM_STEPS)
    reached, accepted = [0] * NUM_STEPS, [0] * NUM_STEPS
    for row in range(2, LENGTH + 18):
        pool, (table,) = make_pool(num_positions=LENGTH + 24)
        whole = FastLayout(pool, [Extent(table=table, start=0, stop=row + 1)])
        hidden = read_taps(
            head, sample.embeddings_NH[1 : row + 2], sample.taps_NT[: row + 1], whole, LAYER
        )
        layouts = [
            FastLayout(pool, [Extent(table=table, start=at, stop=at + 1)])
            for at in range(row + 1, row + NUM_STEPS)
        ]
        drafts = draft_tokens(head, hidden[-1:], layouts, LAYER, lambda ids: embedding()[ids])[0]
        for step, (draft, greedy) in enumerate(
            zip(drafts, sample.target.greedy_N[row + 1 : -1], strict=False)
        ):
            reached[step] += 1
            accepted[step] += bool(draft == greedy)
            if draft != greedy:
                break
    counts = unrolled_loss(head, [sample], num_steps=NUM_STEPS).counts
    assert (counts.reached, counts.accepted) == (tuple(reached), tuple(accepted))
    assert 0 < accepted[2] < accepted[1] < accepted[0] < reached[0], "drafts are right and wrong"


def test_head_has_the_shapes_of_its_configuration() -> None:
    head = make_head()
    layer_rows = torch.zeros(5, HIDDEN, dtype=torch.float64)
    fused = head.fuse(torch.zeros(5, 3 * HIDDEN, dtype=torch.float64))
    out = head(
        layer_rows,
        fused,
        torch.arange(5),
        lambda q, kv, params: q.new_zeros(len(q), q.shape[1] * q.shape[2]),
    )
    assert out.shape == (5, HIDDEN)
    assert head.logits(out).shape == (5, len(VOCABULARY))
    assert head.qkv.shape == ((4 + 2 * 2) * 8, 2 * HIDDEN)
    assert sum(weight.numel() for weight in head.parameters()) < 5_000, (
        "the embedding is the target's"
    )


def test_equal_seeds_give_equal_heads_and_others_differ() -> None:
    one, same, other = (dict(make_head(seed=seed).named_parameters()) for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one if not name.endswith("norm"))


def test_new_head_begins_with_the_targets_rows_of_its_vocabulary() -> None:
    target = torch.randn(40, HIDDEN, dtype=torch.float64)
    head = Eagle3Head(CONFIG, VOCABULARY, target_head_VH=target, target_norm_H=target[0])
    assert torch.equal(head.lm_head, target[VOCABULARY]) and torch.equal(head.norm, target[0])


@pytest.mark.parametrize(
    ("num_layers", "layer_ids"),
    [
        (32, (2, 16, 29)),
        (48, (2, 24, 45)),
        (7, (2, 3, 4)),
        (6, (1, 3, 5)),
        (5, (1, 2, 4)),
        (4, (1, 2, 3)),
        (3, (0, 1, 2)),
    ],
)
def test_default_layers_are_low_middle_and_high(
    num_layers: int, layer_ids: tuple[int, int, int]
) -> None:
    assert default_layer_ids(num_layers) == layer_ids


def test_target_with_two_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="the target has 2"):
        default_layer_ids(2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_ids", (2, 2, 5)),
        ("layer_ids", (5, 4, 2)),
        ("layer_ids", (2, 4, 8)),
        ("num_heads", 3),
        ("head_dim", 7),
        ("draft_vocab_size", 41),
        ("dtype", "int8"),
        ("hidden_size", 0),
    ],
)
def test_wrong_field_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field) as refused:
        make_head(**{field: value})
    assert refused.value.param == field


def test_vocabulary_has_the_most_frequent_ids_and_always_the_end_ids() -> None:
    chosen = choose_vocabulary(
        [[9, 9, 9, 4, 4, 30], [4, 30, 2]], end_ids=[38], size=4, vocab_size=40
    )
    assert chosen.tolist() == [4, 9, 30, 38]
    assert choose_vocabulary([[9]], end_ids=[38], size=4, vocab_size=40).tolist() == [
        0,
        1,
        9,
        38,
    ], "filled from below"


def test_vocabulary_without_room_for_the_end_ids_or_with_unknown_ids_is_refused() -> None:
    with pytest.raises(ConfigError, match="number of end ids"):
        choose_vocabulary([], end_ids=[1, 2, 3], size=2, vocab_size=40)
    with pytest.raises(ConfigError, match="id 40 is outside"):
        choose_vocabulary([[40]], end_ids=[1], size=2, vocab_size=40)


def test_vocabulary_maps_hold_offsets_and_a_mask() -> None:
    assert offsets_of(VOCABULARY).tolist() == [3 * (at + 1) - at for at in range(12)]
    assert torch.equal(ids_of(offsets_of(VOCABULARY)), VOCABULARY)
    assert mask_of(VOCABULARY, 40).nonzero()[:, 0].tolist() == VOCABULARY.tolist()


def test_vocabulary_that_is_not_sorted_is_refused() -> None:
    with pytest.raises(ConfigError, match="ascending ids"):
        Eagle3Head(CONFIG, VOCABULARY.flip(0))
