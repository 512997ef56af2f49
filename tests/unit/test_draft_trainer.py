"""Draft-head training: admission of samples, the replay buffer, optimizer windows, and a head that
learns a real target's answer.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from fleet.core.errors import ConfigError, SampleRefused
from fleet.drafts.eagle3.config import Eagle3Config
from fleet.drafts.eagle3.files import load_head
from fleet.drafts.eagle3.head import Eagle3Head
from fleet.drafts.eagle3.vocabulary import choose_vocabulary
from fleet.drafts.trainer.replay import ReplayBuffer
from fleet.drafts.trainer.samples import DraftSample, TargetParts
from fleet.drafts.trainer.state import MANIFEST_FILE, MOMENTS_FILE, restore_trainer, save_trainer
from fleet.drafts.trainer.trainer import Trainer, TrainerSettings

CONFIG = Eagle3Config(
    hidden_size=32,
    num_layers=7,
    layer_ids=(2, 3, 4),
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    rope_theta=10_000.0,
    norm_eps=1e-6,
    vocab_size=64,
    draft_vocab_size=24,
    max_positions=128,
    target_hash="target-1",
)
SETTINGS = TrainerSettings(
    window_samples=1, batch_samples=1, num_steps=3, learning_rate=5e-3, warmup_windows=2
)
PROMPT = [5, 9, 2, 7]


@cache
def make_target() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = Qwen3ForCausalLM(config).eval()
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.3) if weight.dim() > 1 else None
    return model


@torch.no_grad()
def greedy_sample(prompt: list[int], length: int = 28, **changes: Any) -> DraftSample:
    """Return a training sample of a greedy answer of the small target, with the hidden states and
    logits computed for it.
    """
    target, ids = make_target(), list(prompt)
    while len(ids) < length:
        ids.append(
            int(target(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
        )
    done = target.model(input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True)
    sample = DraftSample(
        sample_id=repr(prompt),
        ids_N=torch.tensor(ids),
        answer_start=len(prompt),
        layer_ids=CONFIG.layer_ids,
        target_hash="target-1",
        taps_NT=torch.cat([done.hidden_states[layer][0] for layer in CONFIG.layer_ids], -1),
        last_NH=done.last_hidden_state[0],
    )
    return replace(sample, **changes)


def make_trainer(samples: list[DraftSample], settings: TrainerSettings = SETTINGS) -> Trainer:
    vocabulary = choose_vocabulary(
        [sample.ids_N.tolist() for sample in samples], [63], CONFIG.draft_vocab_size, 64
    )
    target = make_target()
    parts = TargetParts(embed=target.model.embed_tokens, head=target.lm_head)
    buffer = ReplayBuffer(max_samples=8, max_bytes=1 << 20)
    trainer = Trainer(Eagle3Head(CONFIG, vocabulary, seed=1), parts, settings, buffer)
    assert all(trainer.add(sample) for sample in samples)
    return trainer


def test_trained_head_drafts_its_sample_after_saving_and_loading(tmp_path: Path) -> None:
    sample = greedy_sample(PROMPT)
    trainer = make_trainer([sample])
    before = trainer.evaluate([sample])
    records = [trainer.train_window() for _ in range(120)]
    assert [record.window for record in records] == list(range(1, 121))
    assert records[-1].loss < 0.2 * records[0].loss
    save_trainer(trainer, tmp_path)
    loaded = make_trainer([sample])
    loaded.head.load_state_dict(load_head(tmp_path, target_hash="target-1").state_dict())
    after = loaded.evaluate([sample])
    assert before.simulated_acceptance_length < 1.0
    assert after.simulated_acceptance_length > 0.85 * SETTINGS.num_steps


def test_window_of_batches_makes_the_step_of_one_batch() -> None:
    """A window of several batches makes the same optimizer step as one batch. The samples have
    equal numbers of rows, so that the mean of batch means is the mean of the window.
    """
    samples = [greedy_sample([first, 9, 2, 7]) for first in (1, 2, 3, 4)]
    samples = [
        replace(sample, logits_NV=replaced_logits(sample), last_NH=None) for sample in samples
    ]
    whole, split = (
        make_trainer(samples, replace(SETTINGS, window_samples=4, batch_samples=batch))
        for batch in (4, 2)
    )
    one, two = whole.train_window(), split.train_window()
    assert one.counts.reached == two.counts.reached and one.loss == pytest.approx(
        two.loss, rel=1e-5
    )
    assert one.grad_norm == pytest.approx(two.grad_norm, rel=1e-4)
    assert one.num_positions == 4 * 28


def replaced_logits(sample: DraftSample) -> Tensor:
    """Return logits that make the first draft id certain at every row of the answer, so that all
    rows are trained.
    """
    logits = torch.zeros(len(sample.ids_N), 64)
    logits[:, 63] = 9.0
    return logits


def test_restored_trainer_continues_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    sample = greedy_sample(PROMPT)
    straight, stopped = make_trainer([sample]), make_trainer([sample])
    for _ in range(3):
        straight.train_window()
        stopped.train_window()
    save_trainer(stopped, tmp_path)
    resumed = make_trainer([sample])
    restore_trainer(resumed, tmp_path)
    for _ in range(3):
        straight.train_window()
        resumed.train_window()
    assert resumed.num_windows == 6
    pairs = zip(straight.head.parameters(), resumed.head.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_state_of_two_saves_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer([greedy_sample(PROMPT)])
    trainer.train_window()
    save_trainer(trainer, tmp_path)
    old = (tmp_path / MOMENTS_FILE).read_bytes()
    trainer.train_window()
    save_trainer(trainer, tmp_path)
    (tmp_path / MOMENTS_FILE).write_bytes(old)
    with pytest.raises(ConfigError, match="not of one save"):
        restore_trainer(trainer, tmp_path)
    (tmp_path / MANIFEST_FILE).unlink()
    with pytest.raises(ConfigError, match=f"{MANIFEST_FILE}: cannot be read"):
        restore_trainer(trainer, tmp_path)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda s: {"target_hash": "target-2"}, "computed by the target target-2"),
        (lambda s: {"layer_ids": (1, 3, 4)}, r"taps of the layers \(1, 3, 4\)"),
        (
            lambda s: {"taps_NT": s.taps_NT[:, :64]},
            r"taps have the shape \(28, 64\), not \(28, 96\)",
        ),
        (lambda s: {"taps_NT": s.taps_NT[:-1]}, r"taps have the shape \(27, 96\)"),
        (lambda s: {"last_NH": s.last_NH[:-1]}, "last hidden rows have the shape"),
        (lambda s: {"last_NH": None}, "either last hidden rows or logits"),
        (lambda s: {"embeddings_NH": torch.zeros(28, 31)}, "embeddings have the shape"),
        (
            lambda s: {"taps_NT": s.taps_NT.clone().index_fill_(0, torch.tensor([3]), torch.nan)},
            "taps are not finite",
        ),
        (lambda s: {"ids_N": s.ids_N + 60}, r"an id is outside of 0\.\.63"),
        (lambda s: {"answer_start": 28}, "the answer starts at 28"),
        (
            lambda s: {"ids_N": s.ids_N[:2], "taps_NT": s.taps_NT[:2], "last_NH": s.last_NH[:2]},
            "needs at least 3",
        ),
    ],
)
def test_sample_that_does_not_fit_is_refused_at_the_door(
    change: Callable[[DraftSample], dict[str, Any]], cause: str
) -> None:
    trainer, sample = make_trainer([]), greedy_sample(PROMPT)
    with pytest.raises(SampleRefused, match=cause):
        trainer.add(replace(sample, **change(sample)))
    assert len(trainer.buffer) == 0


def test_sample_is_added_once() -> None:
    sample = greedy_sample(PROMPT)
    trainer = make_trainer([sample])
    assert not trainer.add(sample)
    assert len(trainer.buffer) == 1


def test_buffer_drops_the_oldest_sample_beyond_its_number_and_its_bytes() -> None:
    sample = greedy_sample(PROMPT)
    for limits in (
        {"max_samples": 2, "max_bytes": 1 << 30},
        {"max_samples": 99, "max_bytes": 2 * sample.num_bytes},
    ):
        buffer = ReplayBuffer(**limits)
        assert all(buffer.add(replace(sample, sample_id=name)) for name in "ab")
        assert not buffer.add(replace(sample, sample_id="c")), (
            "no sample is dropped before it was drawn"
        )
        assert [fresh.sample_id for fresh in buffer.draw(1)] == ["a"]
        assert buffer.add(replace(sample, sample_id="c"))
        assert {kept.sample_id for kept in buffer.draw(2)} == {"b", "c"}
        assert (buffer.num_bytes, buffer.num_dropped, len(buffer)) == (2 * sample.num_bytes, 1, 2)


def test_buffer_refuses_a_sample_that_exceeds_it_and_keeps_the_others() -> None:
    sample = greedy_sample(PROMPT)
    buffer = ReplayBuffer(max_samples=9, max_bytes=sample.num_bytes)
    buffer.add(sample)
    assert not buffer.add(greedy_sample(PROMPT, length=29, sample_id="longer"))
    assert len(buffer) == 1


def test_equal_seeds_draw_equal_windows() -> None:
    def drawn(seed: int) -> list[str]:
        buffer = ReplayBuffer(max_samples=9, max_bytes=1 << 30, seed=seed)
        for name in "abcdefgh":
            buffer.add(greedy_sample(PROMPT, length=5, sample_id=name))
        return [sample.sample_id for _ in range(3) for sample in buffer.draw(4)]

    assert drawn(1) == drawn(1) != drawn(2)


def test_gradient_that_is_not_finite_makes_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer([greedy_sample(PROMPT)])
    before = trainer.head.fc.detach().clone()
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(torch.nan))
    with pytest.raises(ArithmeticError, match="window 1: the gradient"):
        trainer.train_window()
    assert torch.equal(trainer.head.fc, before) and trainer.num_windows == 0


@pytest.mark.parametrize(
    ("field", "value"), [("num_steps", 0), ("learning_rate", -1.0), ("batch_samples", 3)]
)
def test_wrong_setting_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        replace(TrainerSettings(window_samples=8), **{field: value})


def test_head_in_few_bits_is_not_trained() -> None:
    head = Eagle3Head(replace(CONFIG, dtype="bfloat16"), torch.arange(CONFIG.draft_vocab_size))
    parts = TargetParts(embed=lambda ids: ids, head=lambda rows: rows)
    with pytest.raises(ConfigError, match="trained in float32 or float64, not bfloat16"):
        Trainer(head, parts, SETTINGS, ReplayBuffer(max_samples=1, max_bytes=1))
