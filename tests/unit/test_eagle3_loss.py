"""Loss of a draft head: its alignment on examples by hand, its counts against plain loops, masks,
refusals, and learning one sample.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from fleet.drafts.eagle3.head import Eagle3Head
from fleet.drafts.eagle3.loss import (
    DraftCounts,
    TargetRows,
    TrainingRows,
    UnrolledSteps,
    divergences,
    unrolled_loss,
)
from tests.draft_heads import HIDDEN, VOCAB, VOCABULARY, embedding, make_head, make_sample, train

STEPS = 3


def silent_head() -> Eagle3Head:
    """Return a head whose decoder layer adds nothing, so that its output is what `fuse` returns."""
    head = make_head()
    with torch.no_grad():
        for weight in (head.fc, head.qkv, head.out, head.gate_up, head.down, head.lm_head):
            weight.zero_()
        head.norm.fill_(1.0)
    return head


def sample_of(
    ids: list[int], taps_NT: Tensor | None = None, *, answer_start: int = 2
) -> TrainingRows:
    """Return a sample whose target gives its own tokens probability one, and whose embeddings are
    unit vectors by draft id.
    """
    logits_NV = torch.full((len(ids), VOCAB), -20.0, dtype=torch.float64)
    logits_NV[torch.arange(len(ids)), torch.tensor([*ids[1:], 0])] = 20.0
    draft_ids = torch.searchsorted(VOCABULARY, torch.tensor(ids))
    return TrainingRows(
        embeddings_NH=torch.eye(HIDDEN, dtype=torch.float64)[draft_ids],
        taps_NT=torch.zeros(len(ids), 3 * HIDDEN, dtype=torch.float64)
        if taps_NT is None
        else taps_NT,
        target=TargetRows.of_logits(logits_NV, VOCABULARY),
        is_answer_N=torch.arange(len(ids)) >= answer_start,
    )


def test_first_draft_of_taps_at_a_position_is_the_token_after_the_next() -> None:
    """The first draft of the taps at position i is token i + 2, which the middle tap names here:
    the first draft is right, and the second repeats it and is wrong.
    """
    ids = [3, 6, 9, 12, 15, 18, 21]
    taps = torch.zeros(len(ids), 3, HIDDEN, dtype=torch.float64)
    for position in range(len(ids) - 2):
        taps[position, 1, (ids[position + 2] - 3) // 3] = 1.0
    head = silent_head()
    with torch.no_grad():
        head.fc[:, HIDDEN : 2 * HIDDEN] = torch.eye(HIDDEN)
        head.lm_head[:] = torch.eye(len(VOCABULARY), HIDDEN)
    counts = unrolled_loss(head, [sample_of(ids, taps.flatten(1))], num_steps=2).counts
    assert counts.reached == (5, 4), "rows 0 to 4 draft tokens 2 to 6, rows 0 to 3 also 3 to 6"
    assert counts.accepted == (5, 0)


def test_first_draft_reads_the_embedding_of_the_next_token() -> None:
    """The first draft reads the embedding of the next token. A row attends only to itself: token 1
    of (6, 12, 9) makes the head draft 9; token 0 would make it draft 3.
    """
    head = silent_head()
    first_value = (head.config.num_heads + head.config.num_kv_heads) * head.config.head_dim
    with torch.no_grad():
        head.qkv[first_value : first_value + 8, :8] = torch.eye(8)
        head.out[:8, :8] = torch.eye(8)
        head.embedding_norm.fill_(1.0)
        head.lm_head[2, 3], head.lm_head[0, 1] = 1.0, 1.0
    assert unrolled_loss(head, [sample_of([6, 12, 9])], num_steps=1).counts.accepted == (1,)
    assert unrolled_loss(head, [sample_of([12, 6, 9])], num_steps=1).counts.accepted == (0,)


def plain_counts(head: Eagle3Head, sample: TrainingRows, num_steps: int) -> DraftCounts:
    """Return the loss's counts, computed row by row."""
    steps = UnrolledSteps(head, [sample], num_steps)
    logits = [head.logits(hidden) for hidden in steps.hidden_rows()]
    reached, accepted, trained = ([0] * num_steps for _ in range(3))
    loss = [0.0] * num_steps
    for at, row in enumerate(steps.kept[0].tolist()):
        goes_well = True
        for step in range(num_steps):
            token = row + 2 + step
            if token >= len(sample.taps_NT) or not sample.is_answer_N[token]:
                goes_well = False
                continue
            greedy = int(sample.target.greedy_N[token - 1])
            if greedy in VOCABULARY.tolist():
                trained[step] += 1
                target = sample.target.logits_ND[token - 1].softmax(-1)
                loss[step] += float(
                    (target * (target.log() - logits[step][at].log_softmax(-1))).sum()
                )
            reached[step] += goes_well
            goes_well = goes_well and int(VOCABULARY[logits[step][at].argmax()]) == greedy
            accepted[step] += goes_well
    return DraftCounts(
        reached=tuple(reached),
        accepted=tuple(accepted),
        trained=tuple(trained),
        loss_sum=tuple(loss),
    )


def test_batch_of_samples_equals_plain_loops_over_rows() -> None:
    head = make_head(seed=5)
    samples = [
        make_sample(40, 4, seed=11),
        make_sample(30, 18, seed=12, in_vocabulary=False),
        make_sample(3, 2, seed=13),
    ]
    train(head, samples, 12, num_steps=STEPS)
    with torch.inference_mode():
        done = unrolled_loss(head, samples, num_steps=STEPS, decay=0.8)
        one, two, three = (plain_counts(head, sample, STEPS) for sample in samples)
    plain = one + two + three
    assert (done.counts.reached, done.counts.accepted, done.counts.trained) == (
        plain.reached,
        plain.accepted,
        plain.trained,
    )
    assert 0 < plain.accepted[2] < plain.accepted[1] < plain.accepted[0] < plain.reached[0], (
        "drafts are right and wrong"
    )
    assert done.counts.loss_sum == pytest.approx(plain.loss_sum)
    means = [total / rows for total, rows in zip(plain.loss_sum, plain.trained, strict=True)]
    assert float(done.loss) == pytest.approx(means[0] + 0.8 * means[1] + 0.64 * means[2])


def test_acceptance_length_is_computed_from_summed_counts() -> None:
    one = DraftCounts(reached=(10, 6), accepted=(6, 3), trained=(10, 9), loss_sum=(5.0, 9.0))
    two = DraftCounts(reached=(10, 2), accepted=(2, 1), trained=(10, 1), loss_sum=(15.0, 1.0))
    both = one + two
    assert both.acceptance_by_position == (0.4, 0.5)
    assert both.simulated_acceptance_length == pytest.approx(0.4 + 0.4 * 0.5)
    assert (both.loss_sum, both.trained) == ((20.0, 10.0), (20, 10))


def with_noise(sample: TrainingRows, position: int) -> TrainingRows:
    logits = sample.target.logits_ND.clone()
    logits[position] += torch.linspace(0, 5, logits.shape[1])
    return replace(sample, target=replace(sample.target, logits_ND=logits))


@torch.inference_mode()
@pytest.mark.parametrize(
    ("position", "counts"), [(5, False), (7, False), (8, True), (14, True), (15, False)]
)
def test_only_predictions_of_answer_tokens_count(position: int, counts: bool) -> None:
    """Only predictions of answer tokens count. Tokens 9 to 15 are the answer, which the target
    predicts at positions 8 to 14.
    """
    head, sample = make_head(), make_sample(16, 9)
    losses = [
        float(unrolled_loss(head, [given], num_steps=STEPS).loss)
        for given in (sample, with_noise(sample, position))
    ]
    assert (losses[0] != losses[1]) is counts


@torch.inference_mode()
def test_target_tokens_outside_the_vocabulary_are_not_trained_and_count_as_rejected() -> None:
    head, sample = make_head(), make_sample(16, 2)
    outside = replace(
        sample, target=replace(sample.target, greedy_N=torch.ones_like(sample.target.greedy_N))
    )
    counts = unrolled_loss(head, [outside], num_steps=STEPS).counts
    assert (counts.trained, counts.reached, counts.accepted) == ((0, 0, 0), (14, 0, 0), (0, 0, 0))


def test_sample_without_an_answer_has_no_loss() -> None:
    done = unrolled_loss(make_head(), [make_sample(16, 16)], num_steps=STEPS)
    done.loss.backward()
    assert done.loss.item() == 0.0 and done.counts.trained == (0, 0, 0)


def test_target_rows_of_hidden_rows_equal_those_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.drafts.eagle3.loss.CHUNK_ROWS", 4)
    hidden, head_VH = torch.randn(11, HIDDEN, dtype=torch.float64), embedding()
    chunked = TargetRows.of_hidden(hidden, lambda rows: rows @ head_VH.T, VOCABULARY)
    whole = TargetRows.of_logits(hidden @ head_VH.T, VOCABULARY)
    torch.testing.assert_close(chunked.logits_ND, whole.logits_ND)
    assert torch.equal(chunked.greedy_N, whole.greedy_N)


def test_loss_that_is_not_finite_is_an_error() -> None:
    head = make_head()
    with torch.no_grad():
        head.lm_head[0, 0] = torch.nan
    with pytest.raises(ArithmeticError, match="not finite"):
        unrolled_loss(head, [make_sample(8, 2)])


def test_divergence_of_equal_distributions_is_zero_and_in_at_least_float32() -> None:
    logits = torch.randn(4, 12).to(torch.bfloat16)
    losses = divergences(logits, logits + 3.0)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(divergences(logits, logits), torch.zeros(4))


def test_later_steps_train_the_layer_through_the_earlier_ones() -> None:
    head, sample = make_head(), make_sample(16, 2)
    grads: list[Tensor] = []
    for num_steps in (1, 3):
        head.zero_grad()
        unrolled_loss(head, [sample], num_steps=num_steps).loss.backward()
        assert head.fc.grad is not None
        grads.append(head.fc.grad.clone())
        assert all(
            weight.grad is not None and bool(weight.grad.abs().sum() > 0)
            for weight in head.parameters()
        )
    assert not torch.allclose(grads[0], grads[1])


def test_head_learns_one_sample_until_every_draft_is_accepted() -> None:
    head, sample = make_head(dtype="float32"), make_sample(24, 3)
    run = partial(unrolled_loss, head, [sample], num_steps=STEPS)
    first = run()
    assert first.counts.simulated_acceptance_length < 0.5
    train(head, [sample], 80, num_steps=STEPS)
    last = run()
    assert last.loss.item() < 0.05 * first.loss.item()
    assert last.counts.simulated_acceptance_length == pytest.approx(STEPS, abs=0.05)
