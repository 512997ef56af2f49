"""A trained draft head in the format of `speculators` serves on vLLM itself; its draft tokens equal
the torch engine's.
"""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from fleet.core.request import Sampling
from fleet.drafts.eagle3.config import Eagle3Config, default_layer_ids
from fleet.drafts.eagle3.files import save_head
from fleet.drafts.eagle3.head import Eagle3Head
from fleet.drafts.eagle3.speculators import export_speculators
from fleet.drafts.eagle3.vocabulary import choose_vocabulary
from fleet.drafts.speculation import Speculation
from fleet.drafts.trainer.replay import ReplayBuffer
from fleet.drafts.trainer.samples import DraftSample, TargetParts
from fleet.drafts.trainer.trainer import Trainer, TrainerSettings
from fleet.engine.torch.lm_engine import LMEngine
from fleet.models.causal_lm.tiny import write_tiny_checkpoint
from fleet.models.target_hash import hash_of_target
from fleet.processing.end_ids import read_end_ids
from tests.oracle.oracle import from_pretrained
from tests.oracle.test_text_engine import answers_of, greedy, stage
from tests.support import REPO
from tests.vllm.drafted_answers import DraftedAnswers, DraftedWork

NUM_LAYERS, NUM_DRAFTS, NUM_TOKENS = 8, 3, 64
PROMPTS = [[40 + 7 * number, 300, 90 + number, 55, 200 - 3 * number] for number in range(10)]
NUM_TRAINED = 8
"""Number of answers that the head is trained on. Of other answers it drafts little, so that
acceptance is between 0 and 1.
"""
WINDOWS = 200
NEAR = 0.05
"""Largest difference between two shares of accepted draft tokens that count as equal."""


@dataclass(frozen=True, slots=True)
class Exported:
    """A target model, and a draft head for it in Fleet's files and in the format of `speculators`,
    without and with the target's embedding.

    `answers`: greedy answers of the target to the prompts, computed by `transformers`.
    """

    target: Path
    head: Path
    alone: Path
    with_embedding: Path
    answers: list[list[int]]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    folder = tmp_path_factory.mktemp("head")
    target = write_tiny_checkpoint(folder / "target", num_layers=NUM_LAYERS)
    answers = greedy(target, PROMPTS, NUM_TOKENS)
    model: Any = from_pretrained("AutoModelForCausalLM", target, dtype=torch.float32).eval()
    head = train_head(model, answers, hash_of_target(target))
    save_head(head, folder / "head")
    for name, embedding_VH in (
        ("alone", None),
        ("with_embedding", model.model.embed_tokens.weight),
    ):
        export_speculators(
            head,
            folder / name,
            target=str(target),
            target_architectures=["Qwen3ForCausalLM"],
            num_drafts=NUM_DRAFTS,
            embedding_VH=embedding_VH,
        )
    return Exported(target, folder / "head", folder / "alone", folder / "with_embedding", answers)


def train_head(model: Any, answers: list[list[int]], target_hash: str) -> Eagle3Head:
    config = Eagle3Config(
        hidden_size=96,
        num_layers=NUM_LAYERS,
        layer_ids=default_layer_ids(NUM_LAYERS),
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        intermediate_size=192,
        rope_theta=10_000.0,
        norm_eps=1e-6,
        vocab_size=model.config.vocab_size,
        draft_vocab_size=256,
        max_positions=32_768,
        target_hash=target_hash,
    )
    vocabulary = choose_vocabulary(
        answers, [model.config.eos_token_id], config.draft_vocab_size, config.vocab_size
    )
    head = Eagle3Head(
        config,
        vocabulary,
        seed=1,
        target_head_VH=model.lm_head.weight,
        target_norm_H=model.model.norm.weight,
    )
    trainer = Trainer(
        head,
        TargetParts(embed=model.model.embed_tokens, head=model.lm_head),
        TrainerSettings(
            window_samples=4, batch_samples=4, num_steps=NUM_DRAFTS, learning_rate=3e-3
        ),
        ReplayBuffer(max_samples=NUM_TRAINED, max_bytes=1 << 24),
    )
    for number in range(NUM_TRAINED):
        trainer.add(sample_of(model, config, number, answers[number]))
    for _ in range(WINDOWS):
        trainer.train_window()
    return head


@torch.no_grad()
def sample_of(model: Any, config: Eagle3Config, number: int, answer: list[int]) -> DraftSample:
    ids = torch.tensor([PROMPTS[number] + answer])
    done = model.model(input_ids=ids, use_cache=False, output_hidden_states=True)
    return DraftSample(
        sample_id=str(number),
        ids_N=ids[0],
        answer_start=len(PROMPTS[number]),
        layer_ids=config.layer_ids,
        target_hash=config.target_hash,
        taps_NT=torch.cat([done.hidden_states[layer][0] for layer in config.layer_ids], -1),
        last_NH=done.last_hidden_state[0],
    )


@pytest.fixture(scope="module")
def own_shares(exported: Exported) -> tuple[float, ...]:
    """Shares of accepted draft tokens in the torch engine, whose answers are checked too."""
    options = {"drafter": "eagle3", "num_drafts": NUM_DRAFTS, "head": exported.head}
    built = stage(exported.target, speculation=options)
    assert isinstance(built.engine, LMEngine)
    assert isinstance(built.engine.speculation, Speculation)
    built.engine.speculation.follows_times = False
    answers = answers_of(built, PROMPTS, lambda _: Sampling(max_tokens=NUM_TOKENS, temperature=0.0))
    assert answers == exported.answers
    shares = built.engine.speculation.figures().shares
    assert 0.3 < shares[0] < 0.95, "a share of 0 or 1 would show no difference"
    return shares


def answer_on_vllm(exported: Exported, head: Path) -> DraftedAnswers:
    (end_id,) = read_end_ids(exported.target)
    work = DraftedWork(prompts=PROMPTS, num_tokens=NUM_TOKENS, end_id=end_id, num_drafts=NUM_DRAFTS)
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.drafted_answers", str(exported.target), str(head)],
        cwd=REPO,
        input=msgspec.json.encode(work).decode(),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    reports = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert reports, done.stdout[-2000:] + done.stderr[-4000:]
    return msgspec.json.decode(reports[-1], type=DraftedAnswers)


def differences(
    on_vllm: DraftedAnswers, own: tuple[float, ...], capsys: pytest.CaptureFixture[str]
) -> list[float]:
    with capsys.disabled():
        print(f"\naccepted by position: vLLM {on_vllm.shares}, torch {list(own)}")
    return [abs(one - other) for one, other in zip(on_vllm.shares, own, strict=True)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("folder", ["alone", "with_embedding"])
def test_exported_head_drafts_on_vllm_as_on_the_torch_engine(
    folder: str,
    exported: Exported,
    own_shares: tuple[float, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    on_vllm = answer_on_vllm(exported, getattr(exported, folder))
    assert on_vllm.tokens == exported.answers
    assert max(differences(on_vllm, own_shares, capsys)) <= NEAR


@pytest.mark.timeout(300)
def test_head_with_layer_ids_off_by_one_drafts_otherwise(
    exported: Exported,
    own_shares: tuple[float, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A head with layer ids off by one drafts differently: the comparison detects an export that
    counts layers as SGLang does. Answers stay the same.
    """
    shifted = shutil.copytree(exported.alone, tmp_path / "shifted")
    settings = json.loads((shifted / "config.json").read_text())
    settings["eagle_aux_hidden_state_layer_ids"] = [
        layer - 1 for layer in settings["eagle_aux_hidden_state_layer_ids"]
    ]
    (shifted / "config.json").write_text(json.dumps(settings))
    on_vllm = answer_on_vllm(exported, shifted)
    assert on_vllm.tokens == exported.answers
    assert max(differences(on_vllm, own_shares, capsys)) > NEAR
