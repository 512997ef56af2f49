"""The EAGLE-3 draft head in the engine: a head trained on one answer drafts that answer, and
answers never depend on the head.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from fleet.core.errors import ConfigError
from fleet.core.ids import StageName
from fleet.core.request import Sampling
from fleet.drafts.drafters import ComputedRows
from fleet.drafts.eagle3.config import Eagle3Config, default_layer_ids
from fleet.drafts.eagle3.drafter import HeadDrafter
from fleet.drafts.eagle3.files import save_head
from fleet.drafts.eagle3.head import Eagle3Head
from fleet.drafts.speculation import Speculation
from fleet.drafts.trainer.replay import ReplayBuffer
from fleet.drafts.trainer.samples import DraftSample, TargetParts
from fleet.drafts.trainer.trainer import Trainer, TrainerSettings
from fleet.engine.torch.lm_engine import LMEngine
from fleet.graphs import get_graph
from fleet.models.target_hash import hash_of_target
from fleet.stages.base import BuiltStage
from tests.oracle.oracle import from_pretrained
from tests.oracle.test_text_engine import FAMILIES, PROMPTS, SMALL, answers_of, stage, write_model
from tests.oracle.twins import (
    Truth,
    ask,
    assert_all_pages_free,
    build_stage,
    speaking_stages,
    speaking_twin,
    tokens_of,
)
from tests.stage_options import stage_options

pytestmark = pytest.mark.one_file_in(4, "engines of one process")

QWEN3 = next(family for family in FAMILIES if family.name == "Qwen3")
THINKER = StageName("thinker")
NUM_TOKENS, NUM_DRAFTS = 40, 3
GREEDY = Sampling(max_tokens=NUM_TOKENS, ignore_eos=True)
CONFIG = Eagle3Config(
    hidden_size=SMALL["hidden_size"],
    num_layers=3,
    layer_ids=(0, 1, 2),
    num_heads=4,
    num_kv_heads=2,
    head_dim=12,
    intermediate_size=96,
    rope_theta=10_000.0,
    norm_eps=1e-6,
    vocab_size=SMALL["vocab_size"],
    draft_vocab_size=SMALL["vocab_size"],
    max_positions=512,
    target_hash="target",
)


@dataclass(frozen=True, slots=True)
class Heads:
    """A target model, and the folders of a random head and of a head trained on the target's answer
    to the first prompt.
    """

    target: Path
    random: Path
    trained: Path


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Heads:
    folder = tmp_path_factory.mktemp("heads")
    target = write_model(QWEN3, folder / "target")
    config, every_id = (
        replace(CONFIG, target_hash=hash_of_target(target)),
        torch.arange(CONFIG.vocab_size),
    )
    save_head(Eagle3Head(config, every_id, seed=5), folder / "random")
    model = from_pretrained("AutoModelForCausalLM", target, dtype=torch.float32).eval()
    head = Eagle3Head(
        config,
        every_id,
        seed=1,
        target_head_VH=model.lm_head.weight,
        target_norm_H=model.model.norm.weight,
    )
    trainer = Trainer(
        head,
        TargetParts(embed=model.model.embed_tokens, head=model.lm_head),
        TrainerSettings(
            window_samples=1, batch_samples=1, num_steps=3, learning_rate=5e-3, warmup_windows=2
        ),
        ReplayBuffer(max_samples=1, max_bytes=1 << 24),
    )
    trainer.add(
        replace(sample_of(model, list(PROMPTS[0]), answer(target)), target_hash=config.target_hash)
    )
    for _ in range(400):
        trainer.train_window()
    save_head(head, folder / "trained")
    return Heads(target, folder / "random", folder / "trained")


@cache
def answer(target: Path) -> list[int]:
    return answers_of(stage(target), PROMPTS[:1], lambda _: GREEDY)[0]


@torch.no_grad()
def sample_of(model: Any, prompt: list[int], tokens: list[int]) -> DraftSample:
    ids = torch.tensor([prompt + tokens])
    done = model.model(input_ids=ids, use_cache=False, output_hidden_states=True)
    return DraftSample(
        sample_id="one",
        ids_N=ids[0],
        answer_start=len(prompt),
        layer_ids=CONFIG.layer_ids,
        target_hash="target",
        taps_NT=torch.cat([done.hidden_states[layer][0] for layer in CONFIG.layer_ids], -1),
        last_NH=done.last_hidden_state[0],
    )


def drafting(heads: Heads, head: Path, **options: Any) -> BuiltStage:
    built = stage(
        heads.target,
        speculation={"drafter": "eagle3", "num_drafts": NUM_DRAFTS, "head": head},
        **options,
    )
    speculation = engine(built).speculation
    assert isinstance(speculation, Speculation)
    speculation.follows_times = False
    return built


def engine(built: BuiltStage) -> LMEngine[Any]:
    assert isinstance(built.engine, LMEngine)
    return built.engine


def shares(built: BuiltStage) -> Sequence[float]:
    figures = engine(built).stats().speculation
    assert figures is not None and figures.drafter == "eagle3"
    return figures.shares


def test_head_trained_on_an_answer_guesses_it(heads: Heads) -> None:
    """A head trained on an answer drafts it: at least nine of ten of the tokens that can be
    accepted. The prompt's step has no drafts.
    """
    built = drafting(heads, heads.trained)
    assert answers_of(built, PROMPTS[:1], lambda _: GREEDY) == [answer(heads.target)]
    figures = engine(built).stats().speculation
    assert figures is not None and figures.acceptance_length is not None
    most = NUM_TOKENS / (1 - (1 - NUM_TOKENS) // (NUM_DRAFTS + 1))
    assert figures.acceptance_length >= 0.9 * most, figures


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
@pytest.mark.parametrize("chunk", [3, 256])
def test_answers_do_not_depend_on_the_head(heads: Heads, numerics: str, chunk: int) -> None:
    def sampling(number: int) -> Sampling:
        return Sampling(
            max_tokens=24, temperature=0.8 if number % 2 else 0.0, top_p=0.95, seed=number
        )

    expected = answers_of(stage(heads.target, numerics=numerics), PROMPTS, sampling)
    for head in (heads.random, heads.trained):
        built = drafting(heads, head, numerics=numerics, prefill_chunk_tokens=chunk)
        assert answers_of(built, PROMPTS, sampling) == expected
        assert len(shares(built)) == NUM_DRAFTS


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
def test_head_reads_the_rows_that_enter_its_layers(
    heads: Heads, numerics: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft head reads the hidden states that enter its layers: of every accepted token once, in
    position order, equal to `transformers`.
    """
    built = drafting(heads, heads.trained, numerics=numerics, prefill_chunk_tokens=3)
    read: list[ComputedRows] = []
    real = HeadDrafter.on_computed

    def recording(drafter: HeadDrafter, rows: Sequence[ComputedRows]) -> None:
        read.extend(rows)
        real(drafter, rows)

    monkeypatch.setattr(HeadDrafter, "on_computed", recording)
    (tokens,) = answers_of(built, PROMPTS[:1], lambda _: GREEDY)
    starts = [each.start for each in read]
    assert (
        starts == [0, *(each.stop for each in read[:-1])]
        and read[-1].stop >= len(PROMPTS[0]) + NUM_TOKENS - 1
    )
    model = from_pretrained("AutoModelForCausalLM", heads.target, dtype=torch.float32).eval()
    expected = sample_of(model, list(PROMPTS[0]), tokens).taps_NT
    got = torch.cat([each.features_NT for each in read])
    torch.testing.assert_close(got, expected[: len(got)], rtol=1e-3, atol=1e-4)


def test_head_drafts_in_the_dtype_of_its_stage(heads: Heads) -> None:
    built = drafting(heads, heads.trained, dtype="bfloat16")
    (tokens,) = answers_of(built, PROMPTS[:1], lambda _: GREEDY)
    assert len(tokens) == NUM_TOKENS and len(shares(built)) == NUM_DRAFTS


def test_head_of_another_size_is_refused(heads: Heads, tmp_path: Path) -> None:
    other = replace(CONFIG, num_kv_heads=4, target_hash=hash_of_target(heads.target))
    save_head(Eagle3Head(other, torch.arange(CONFIG.vocab_size)), tmp_path)
    with pytest.raises(
        ConfigError, match="the draft head is made for num_kv_heads 4, this model has 2"
    ):
        drafting(heads, tmp_path)


def test_head_of_another_target_is_refused(heads: Heads, tmp_path: Path) -> None:
    save_head(Eagle3Head(CONFIG, torch.arange(CONFIG.vocab_size)), tmp_path)
    with pytest.raises(ConfigError, match="the draft head belongs to the target target, not"):
        drafting(heads, tmp_path)


@pytest.mark.parametrize("part", ["propose", "on_computed"])
def test_error_of_the_head_ends_drafting_and_no_answer(
    heads: Heads, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError("out of memory")

    built = drafting(heads, heads.trained)
    monkeypatch.setattr(HeadDrafter, part, failing)
    assert answers_of(built, PROMPTS[:1], lambda _: GREEDY) == [answer(heads.target)]
    figures = engine(built).stats().speculation
    assert (
        figures is not None
        and (figures.drafter, figures.failed) == ("off", "eagle3")
        and "out of memory" in figures.failure
    )


def test_thinker_answers_equal_with_a_head(
    tiny_checkpoint: Path, truth: Truth, tmp_path: Path
) -> None:
    """A Thinker with a draft head gives equal answers: with audio in the prompt, many requests, and
    prompts in chunks.
    """
    plain = speaking_stages(tiny_checkpoint)[THINKER]
    program: Any = engine(plain).program
    pool = engine(plain).pool
    config = Eagle3Config(
        hidden_size=program.step_shape.hidden_size,
        num_layers=pool.shape.num_layers,
        layer_ids=default_layer_ids(pool.shape.num_layers),
        num_heads=2 * pool.shape.num_kv_heads,
        num_kv_heads=pool.shape.num_kv_heads,
        head_dim=pool.shape.head_dim,
        intermediate_size=64,
        rope_theta=10_000.0,
        norm_eps=1e-6,
        vocab_size=program.step_shape.num_ids,
        draft_vocab_size=64,
        max_positions=4096,
        target_hash=hash_of_target(tiny_checkpoint),
    )
    save_head(Eagle3Head(config, torch.arange(64)), tmp_path)
    own = {"drafter": "eagle3", "num_drafts": NUM_DRAFTS, "head": tmp_path}
    options = stage_options(
        stage=THINKER, checkpoint=tiny_checkpoint, speculation=own, prefill_chunk_tokens=7
    )
    built = {THINKER: build_stage(get_graph("qwen3_omni"), options)}
    speculation = engine(built[THINKER]).speculation
    assert isinstance(speculation, Speculation)
    speculation.follows_times = False
    asked = ask(tiny_checkpoint)
    answers = speaking_twin(built).run(asked.specs, asked.blobs)
    for case, spec in zip(asked.cases, asked.specs, strict=True):
        assert tokens_of(answers, spec.id) == truth[case.name].token_ids, case.name
    assert len(shares(built[THINKER])) == NUM_DRAFTS
    assert_all_pages_free(built)
