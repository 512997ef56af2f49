"""The draft vocabulary: the target's token ids that a head can draft, as a sorted list."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from fleet.core.errors import ConfigError


def choose_vocabulary(
    answers: Iterable[Sequence[int]], end_ids: Collection[int], size: int, vocab_size: int
) -> Tensor:
    """Return the `size` most frequent token ids in `answers`, always including `end_ids`, sorted:
    int64 [D].

    Ties are resolved towards lower ids; if the answers have too few different ids, the lowest ids
    are added. Raises: ConfigError if the end ids do not fit, or if an id is outside the target's
    vocabulary.
    """
    if not len(end_ids) <= size <= vocab_size:
        raise ConfigError(
            f"draft_vocab_size: {size} is not between the number of end ids ({len(end_ids)}) "
            f"and vocab_size ({vocab_size})",
            param="draft_vocab_size",
        )
    counts = Counter(token for answer in answers for token in answer)
    strange = [token for token in (*counts, *end_ids) if not 0 <= token < vocab_size]
    if strange:
        raise ConfigError(
            f"answers: id {strange[0]} is outside 0..{vocab_size - 1}", param="answers"
        )
    by_frequency = sorted(counts, key=lambda token: (-counts[token], token))
    chosen = dict.fromkeys((*sorted(end_ids), *by_frequency))
    for token in range(vocab_size):
        if len(chosen) >= size:
            break
        chosen.setdefault(token)
    return torch.tensor(sorted(list(chosen)[:size]), dtype=torch.int64)


def check_vocabulary(ids_D: Tensor, size: int, vocab_size: int) -> None:
    """Check that `ids_D` is `size` different ids of the target's vocabulary, sorted. Raises:
    ConfigError.
    """
    is_valid = (
        ids_D.shape == (size,)
        and bool((ids_D.diff() > 0).all())
        and int(ids_D[0]) >= 0
        and int(ids_D[-1]) < vocab_size
    )
    if not is_valid:
        raise ConfigError(
            f"draft vocabulary: {tuple(ids_D.shape)} ids are not {size} ascending ids of "
            f"0..{vocab_size - 1}",
            param="vocabulary",
        )


def offsets_of(ids_D: Tensor) -> Tensor:
    """Return `d2t` as the formats of other programs have it: the target's id minus the draft id,
    int64 [D].

    Source: vLLM 0.32, `Eagle3LlamaForCausalLM.compute_logits`; SGLang,
    `LlamaForCausalLMEagle3.load_weights`.
    """
    return ids_D - torch.arange(len(ids_D), device=ids_D.device)


def ids_of(offsets_D: Tensor) -> Tensor:
    """Return the target's id of each draft id from `d2t`: the reverse of `offsets_of`."""
    return offsets_D.long() + torch.arange(len(offsets_D), device=offsets_D.device)


def mask_of(ids_D: Tensor, vocab_size: int) -> Tensor:
    """Return the `t2d` mask of other programs' formats: True at target ids in the draft vocabulary,
    bool [V].
    """
    mask_V = torch.zeros(vocab_size, dtype=torch.bool, device=ids_D.device)
    mask_V[ids_D] = True
    return mask_V
