"""Small draft heads for speculative decoding, and training samples, for tests."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fleet.drafts.eagle3.config import Eagle3Config
from fleet.drafts.eagle3.head import Eagle3Head
from fleet.drafts.eagle3.loss import TargetRows, TrainingRows, unrolled_loss

HIDDEN, VOCAB = 16, 40
CONFIG = Eagle3Config(
    hidden_size=HIDDEN,
    num_layers=8,
    layer_ids=(2, 4, 5),
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=24,
    rope_theta=10_000.0,
    norm_eps=1e-6,
    vocab_size=VOCAB,
    draft_vocab_size=12,
    max_positions=64,
    target_hash="target-1",
    dtype="float64",
)
VOCABULARY = torch.arange(3, 39, 3)
"""Draft vocabulary: target token ids 3, 6, ..., 36."""


def make_head(seed: int = 1, **changes: Any) -> Eagle3Head:
    config = replace(CONFIG, **changes)
    vocabulary = (
        VOCABULARY
        if config.draft_vocab_size == len(VOCABULARY)
        else torch.arange(config.draft_vocab_size)
    )
    head = Eagle3Head(config, vocabulary, seed=seed)
    with torch.no_grad():
        for name, weight in head.named_parameters():
            if name.endswith("norm"):
                weight.copy_(torch.linspace(0.5, 1.5, len(weight)))
    return head


def embedding(seed: int = 7) -> Tensor:
    return torch.randn(
        VOCAB, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def make_sample(
    length: int, answer_start: int, *, seed: int = 3, in_vocabulary: bool = True
) -> TrainingRows:
    """Return a training sample whose target samples the recorded tokens greedily. Without
    `in_vocabulary`, the target's best token is outside the draft vocabulary at every third
    position.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = VOCABULARY[torch.randint(len(VOCABULARY), (length + 1,), generator=generator)]
    logits_NV = torch.randn(length, VOCAB, generator=generator, dtype=torch.float64)
    logits_NV[torch.arange(length), ids[1:]] += 9.0
    if not in_vocabulary:
        logits_NV[::3, 1] += 30.0
    return TrainingRows(
        embeddings_NH=embedding()[ids[:length]],
        taps_NT=torch.randn(length, 3 * HIDDEN, generator=generator, dtype=torch.float64),
        target=TargetRows.of_logits(logits_NV, VOCABULARY),
        is_answer_N=torch.arange(length) >= answer_start,
    )


def train(
    head: Eagle3Head, samples: list[TrainingRows], num_updates: int, *, num_steps: int
) -> None:
    optimizer = torch.optim.AdamW(head.parameters(), lr=5e-3)
    for _ in range(num_updates):
        optimizer.zero_grad()
        unrolled_loss(head, samples, num_steps=num_steps).loss.backward()
        optimizer.step()
