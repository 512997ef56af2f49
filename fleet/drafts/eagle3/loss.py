"""Training loss of a draft head over whole samples: several drafted tokens from every position, as
in serving ("training-time test").

Row i of step s, counted from 0, reads the embedding of token i + 1 + s and predicts token i + 2 +
s, which the target predicts at position i + 1 + s. A row is trained if the predicted token belongs
to an answer and exists in the sample, and if the target's most likely token is in the draft
vocabulary; a token that the vocabulary lacks counts as a wrong draft. The first token of an answer
counts too, although in serving the target samples it before the head is asked.
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
"""Most rows whose logits over the target's vocabulary are in memory at one time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRows:
    """The target's predictions at each position of a sample.

    `logits_ND`: logits of the draft vocabulary. `greedy_N`: most likely token, int64.
    """

    logits_ND: Tensor
    greedy_N: Tensor

    @staticmethod
    def of_hidden(
        last_NH: Tensor, target_head: Callable[[Tensor], Tensor], vocabulary_D: Tensor
    ) -> "TargetRows":
        """Compute predictions from hidden states *after* the final norm. `target_head`: maps hidden
        states [n, H] to logits [n, V].
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
    """A training sample on the trainer's device, with the target's predictions.

    `embeddings_NH`: inputs of the target's first layer; for audio, embeddings of its clips.
    `taps_NT`: the target's taps, low to high. `is_answer_N`: True at tokens of an answer, bool.
    Greedy answers of the target are best: in other answers a step follows a token that the head
    could not have drafted.
    """

    embeddings_NH: Tensor
    taps_NT: Tensor
    target: TargetRows
    is_answer_N: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCounts:
    """Sums over training or evaluation rows, by draft position; add sums of batches before
    computing rates.

    `reached`: rows whose earlier drafts were all right. `accepted`: reached rows whose draft is
    right too. `trained`: rows in the loss. `loss_sum`: sum of their losses, in nats.
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
        """Rate at which the draft at each position equals the target's greedy token, given that all
        earlier drafts do.
        """
        return tuple(
            right / max(tried, 1) for right, tried in zip(self.accepted, self.reached, strict=True)
        )

    @property
    def simulated_acceptance_length(self) -> float:
        """Mean number of accepted drafts per step, a0 + a0 a1 + ..., without the token that the
        target samples itself.
        """
        return sum(
            itertools.accumulate(self.acceptance_by_position, lambda product, rate: product * rate)
        )


Number = TypeVar("Number", int, float)


def _added(one: tuple[Number, ...], other: tuple[Number, ...]) -> tuple[Number, ...]:
    return tuple(a + b for a, b in zip(one, other, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class UnrolledLoss:
    """Loss of a batch of samples. `loss`: scalar to differentiate. `counts`: statistics of the
    batch.
    """

    loss: Tensor
    counts: DraftCounts


def unrolled_loss(
    head: Eagle3Head, samples: Sequence[TrainingRows], *, num_steps: int = 5, decay: float = 0.8
) -> UnrolledLoss:
    """Compute the loss of a batch of samples: the sum over draft steps s of `decay`**s times the
    mean loss of the step's rows.

    A row's loss is the Kullback-Leibler divergence of the head's distribution from the target's,
    restricted to the draft vocabulary. The samples must have passed `DraftSample.check`.
    `num_steps`: number of draft steps.
    Raises: ArithmeticError if the loss is not finite.
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
    """Return the Kullback-Leibler divergence of each row of drafted logits from the target's: [n],
    in at least float32.
    """
    wide = torch.promote_types(drafted_nD.dtype, torch.float32)
    target = target_nD.to(wide).log_softmax(-1)
    return F.kl_div(
        drafted_nD.to(wide).log_softmax(-1), target, reduction="none", log_target=True
    ).sum(-1)


class UnrolledSteps:
    """The draft head's rows in each draft step of training. A sample of N positions has N - 1 rows;
    only rows that reach an answer within the steps are kept.

    `kept`: indices of the kept rows of each sample, ascending.
    """

    def __init__(self, head: Eagle3Head, samples: Sequence[TrainingRows], num_steps: int) -> None:
        self._head = head
        self._samples = samples
        self._num_steps = num_steps
        self._in_vocabulary_V = mask_of(head.vocabulary_D, head.config.vocab_size)
        self._lengths = [len(sample.taps_NT) - 1 for sample in samples]
        self.kept = [_rows_before(sample.is_answer_N, num_steps) for sample in samples]

    def hidden_rows(self) -> list[Tensor]:
        """Return the head's hidden states of the kept rows after each step: [n, H] per step."""
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
        """Return three tensors with one entry per kept row, to compare a step's drafts with:
        whether the drafted token belongs to an answer, the target's logits [n, D], and its greedy
        token.
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
        """Return the index of the token that each row reads in a step. Rows beyond the sample's end
        read the last token, and do not count.
        """
        return (rows_n + 1 + step).clamp(max=len(sample.taps_NT) - 1)


def _rows_before(is_answer_N: Tensor, num_steps: int) -> Tensor:
    """Return the rows of a sample that draft at least one token of an answer. Row i drafts tokens i
    + 2 to i + 1 + `num_steps`.
    """
    reaches_N = is_answer_N.clone()
    for step in range(1, num_steps):
        reaches_N[:-step] |= is_answer_N[step:]
    return reaches_N[2:].nonzero()[:, 0]
