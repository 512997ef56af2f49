"""The loss of a head over whole samples: several drafted tokens from every position, as in serving
("training-time test").

Row i of step s, counted from 0, reads the embedding of token i + 1 + s and predicts token i + 2 +
s, which the target predicts at position i + 1 + s. A row is trained if that token belongs to an
answer and exists in the sample, and if the target's most likely token is in the draft vocabulary; a
draft that the vocabulary lacks is counted as a wrong one. The first token of an answer counts too,
although in serving the target samples it before the head is asked.
Source: SpecForge, `specforge/core/eagle3.py`; speculators 0.9, `models/eagle3/metrics.py`. Legend:
see the package; n rows kept.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fleet.drafts.eagle3.head import Eagle3Head
from fleet.drafts.eagle3.unrolled import UnrolledAttention
from fleet.drafts.eagle3.vocabulary import mask_of

CHUNK_ROWS = 256
"""Rows whose logits over the target's vocabulary exist at one time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRows:
    """Predictions of the target at each position: its logits of the draft vocabulary [N, D], its
    most likely token int64 [N].
    """

    logits_ND: Tensor
    greedy_N: Tensor

    @staticmethod
    def of_hidden(
        last_NH: Tensor, target_head: Callable[[Tensor], Tensor], vocabulary_D: Tensor
    ) -> "TargetRows":
        """Build from the final hidden rows, *after* the final norm, which `target_head` maps to
        logits [n, V].
        """
        parts = [
            TargetRows.of_logits(target_head(rows_nH), vocabulary_D)
            for rows_nH in last_NH.split(CHUNK_ROWS)
        ]
        return TargetRows(
            logits_ND=torch.cat([part.logits_ND for part in parts]),
            greedy_N=torch.cat([part.greedy_N for part in parts]),
        )

    @staticmethod
    def of_logits(logits_NV: Tensor, vocabulary_D: Tensor) -> "TargetRows":
        return TargetRows(logits_ND=logits_NV[:, vocabulary_D], greedy_N=logits_NV.argmax(-1))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRows:
    """A sample on the trainer's device.

    `embeddings_NH`: rows that enter the target's first layer; for audio, embeddings of its clips.
    `taps_NT`: low to high. `is_answer_N`: True at tokens of an answer, bool. Answers are best the
    target's greedy ones: in others a step follows a token that the head could not have drafted.
    """

    embeddings_NH: Tensor
    taps_NT: Tensor
    target: TargetRows
    is_answer_N: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCounts:
    """Sums over rows, by step, which add up over batches; rates are computed from the sums.

    `reached`: rows whose earlier drafts were all right. `accepted`: reached rows whose draft is
    right too. `trained`, `loss_sum`: rows in the loss, and its sum in nats.
    """

    reached: tuple[int, ...]
    accepted: tuple[int, ...]
    trained: tuple[int, ...]
    loss_sum: tuple[float, ...]

    def __add__(self, other: "DraftCounts") -> "DraftCounts":
        return DraftCounts(
            reached=_added(self.reached, other.reached),
            accepted=_added(self.accepted, other.accepted),
            trained=_added(self.trained, other.trained),
            loss_sum=_added(self.loss_sum, other.loss_sum),
        )

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Rate at which the draft of a step equals the target's greedy token, given that all
        earlier ones do.
        """
        return tuple(
            right / max(tried, 1) for right, tried in zip(self.accepted, self.reached, strict=True)
        )

    @property
    def simulated_acceptance_length(self) -> float:
        """Mean number of accepted drafts, a0 + a0 a1 + ...; the token that the target adds to them
        is not counted.
        """
        return sum(
            itertools.accumulate(self.acceptance_by_position, lambda product, rate: product * rate)
        )

    @property
    def loss_by_position(self) -> tuple[float, ...]:
        return tuple(
            total / max(rows, 1) for total, rows in zip(self.loss_sum, self.trained, strict=True)
        )


Number = TypeVar("Number", int, float)


def _added(one: tuple[Number, ...], other: tuple[Number, ...]) -> tuple[Number, ...]:
    return tuple(a + b for a, b in zip(one, other, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class UnrolledLoss:
    """Loss of samples. `loss`: a scalar to differentiate. `counts`: sums, on the host."""

    loss: Tensor
    counts: DraftCounts


def unrolled_loss(
    head: Eagle3Head, samples: Sequence[TrainingRows], *, num_steps: int = 5, decay: float = 0.8
) -> UnrolledLoss:
    """Compute the loss of samples: the mean over the rows of each step, times `decay` to the power
    of the step, summed.

    A row's loss is the Kullback-Leibler divergence of the head's distribution from the target's,
    restricted to the draft vocabulary.
    The samples were checked (`DraftSample.check`). Raises: ArithmeticError if the loss is not
    finite.
    """
    steps = UnrolledSteps(head, samples, num_steps)
    loss, sums = head.fc.new_zeros(()), list[tuple[int, int, int, float]]()
    is_reached_n: Tensor | None = None
    for step, hidden_nH in enumerate(steps.hidden_rows()):
        is_counted_n, logits_nD, greedy_n = steps.targets(step)
        drafted_nD = head.logits(hidden_nH)
        is_reached_n = is_counted_n if is_reached_n is None else is_reached_n & is_counted_n
        is_trained_n = is_counted_n & steps.in_vocabulary(greedy_n)
        losses = divergences(drafted_nD[is_trained_n], logits_nD[is_trained_n])
        loss = loss + decay**step * losses.sum() / max(len(losses), 1)
        is_right_n = is_reached_n & (head.vocabulary_D[drafted_nD.argmax(-1)] == greedy_n)
        sums.append(
            (
                int(is_reached_n.sum()),
                int(is_right_n.sum()),
                len(losses),
                float(losses.detach().sum()),
            )
        )
        is_reached_n = is_right_n
    if not bool(loss.isfinite()):
        raise ArithmeticError("the loss of the draft head is not finite")
    counts = DraftCounts(
        reached=tuple(each[0] for each in sums),
        accepted=tuple(each[1] for each in sums),
        trained=tuple(each[2] for each in sums),
        loss_sum=tuple(each[3] for each in sums),
    )
    return UnrolledLoss(loss=loss, counts=counts)


def divergences(drafted_nD: Tensor, target_nD: Tensor) -> Tensor:
    """Return the divergence of each row, from logits: [n], in at least float32."""
    wide = torch.promote_types(drafted_nD.dtype, torch.float32)
    target = target_nD.to(wide).log_softmax(-1)
    return F.kl_div(
        drafted_nD.to(wide).log_softmax(-1), target, reduction="none", log_target=True
    ).sum(-1)


class UnrolledSteps:
    """The rows of each step. A sample of N positions has N - 1 rows; those that reach an answer
    within the steps are kept.

    `kept`: the kept rows of each sample, ascending.
    """

    def __init__(self, head: Eagle3Head, samples: Sequence[TrainingRows], num_steps: int) -> None:
        self._head = head
        self._samples = samples
        self._num_steps = num_steps
        self._in_vocabulary_V = mask_of(head.vocabulary_D, head.config.vocab_size)
        self._lengths = [len(sample.taps_NT) - 1 for sample in samples]
        self.kept = [_rows_before(sample.is_answer_N, num_steps) for sample in samples]

    def hidden_rows(self) -> list[Tensor]:
        """Return the kept rows' hidden rows after each step: [n, H]."""
        head, dtype = self._head, self._head.fc.dtype
        attend = UnrolledAttention(self._lengths, self.kept)
        embeddings_NH = torch.cat([sample.embeddings_NH[1:] for sample in self._samples]).to(dtype)
        taps_NT = torch.cat([sample.taps_NT[:-1] for sample in self._samples]).to(dtype)
        positions_N = torch.cat(
            [torch.arange(length, device=taps_NT.device) for length in self._lengths]
        )
        rows_NH = head(embeddings_NH, head.fuse(taps_NT), positions_N, attend)
        firsts = itertools.accumulate(self._lengths, initial=0)
        kept_n = torch.cat([rows + first for rows, first in zip(self.kept, firsts, strict=False)])
        done = [rows_NH[kept_n]]
        for step in range(1, self._num_steps):
            embeddings_nH = torch.cat(
                [
                    sample.embeddings_NH[self._tokens(rows, sample, step)]
                    for rows, sample in zip(self.kept, self._samples, strict=True)
                ]
            ).to(dtype)
            done.append(head(embeddings_nH, done[-1], positions_N[kept_n] + step, attend))
        return done

    def targets(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return for the kept rows: whether their draft counts, and the target's logits and greedy
        token for it.
        """
        pairs = [
            (sample, rows, self._tokens(rows, sample, step))
            for rows, sample in zip(self.kept, self._samples, strict=True)
        ]
        # A row that reads the last token predicts one beyond the sample, and so does a row beyond
        # the end.
        counted = [
            F.pad(sample.is_answer_N, (0, step + 2))[rows + 2 + step] for sample, rows, _ in pairs
        ]
        logits_nD = torch.cat([sample.target.logits_ND[read] for sample, _, read in pairs])
        greedy_n = torch.cat([sample.target.greedy_N[read] for sample, _, read in pairs])
        return torch.cat(counted), logits_nD, greedy_n

    def in_vocabulary(self, ids_n: Tensor) -> Tensor:
        return self._in_vocabulary_V[ids_n]

    @staticmethod
    def _tokens(rows_n: Tensor, sample: TrainingRows, step: int) -> Tensor:
        """Return the index of the token that each row reads; rows beyond the end read the last one,
        and do not count.
        """
        return (rows_n + 1 + step).clamp(max=len(sample.taps_NT) - 1)


def _rows_before(is_answer_N: Tensor, num_steps: int) -> Tensor:
    """Return the rows of a sample that draft at least one token of an answer: row i drafts tokens i
    + 2 to i + 1 + steps.
    """
    reaches_N = is_answer_N.clone()
    for step in range(1, num_steps):
        reaches_N[:-step] |= is_answer_N[step:]
    return reaches_N[2:].nonzero()[:, 0]
