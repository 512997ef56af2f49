"""Causal language models on the torch engine, architecture by architecture, against `generate()` of `transformers`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from fleet.bench.twin import SlowTwin
from fleet.core.errors import ConfigError
from fleet.core.ids import EdgeName, RequestId, StageName
from fleet.core.request import RequestSpec, Sampling
from fleet.graphs import get_graph
from fleet.models.causal_lm.program import read_config
from fleet.models.causal_lm.tiny import write_tiny_checkpoint
from fleet.stages.base import BuildOptions, BuiltStage
from fleet.stages.text import build
from tests.oracle.oracle import from_pretrained
from tests.oracle.twins import assert_all_pages_free, tokens_of

LM, TEXT = StageName("lm"), EdgeName("text")
PROMPTS = ([5, 9, 200, 31], [77] * 3, list(range(40, 73)), [300, 2, 2, 2, 8, 100, 12, 13, 14], [11])
SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.3,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A class of `transformers` (its config and model), and what its config has beyond the small sizes."""

    name: str
    more: dict[str, Any]


FAMILIES = (
    Family(name="Llama", more={}),
    Family(name="Qwen2", more={"tie_word_embeddings": True}),
    Family(name="Qwen3", more={}),
    Family(name="Mistral", more={"sliding_window": 8}),
    Family(name="Gemma2", more={"sliding_window": 8, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 5.0}),
    Family(name="Qwen3Moe", more={"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
)


def write_model(family: Family, folder: Path) -> Path:
    transformers = import_module("transformers")
    torch.manual_seed(7)
    config = getattr(transformers, f"{family.name}Config")(**SMALL, **family.more)
    getattr(transformers, f"{family.name}ForCausalLM")(config).save_pretrained(folder)
    return folder


def greedy(folder: Path, prompts: Sequence[list[int]], max_tokens: int, **options: Any) -> list[list[int]]:
    """One `generate()` call a prompt, with the attention that masks the same way for every architecture."""
    model = from_pretrained("AutoModelForCausalLM", folder, dtype=torch.float32, attn_implementation="eager").eval()
    answers: list[list[int]] = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, **options)
        answers.append(made[0, len(prompt) :].tolist())
    return answers


def stage(folder: Path, **options: Any) -> BuiltStage:
    return build(BuildOptions(stage=LM, checkpoint=folder, **options))


def answers_of(built: BuiltStage, prompts: Sequence[list[int]], sampling: Callable[[int], Sampling]) -> list[list[int]]:
    specs = [
        RequestSpec(id=RequestId(f"r{n}"), graph="text", prompt_ids=tuple(prompt), outputs=(TEXT,), sampling={LM: sampling(n)})
        for n, prompt in enumerate(prompts)
    ]
    answers = SlowTwin(get_graph("text"), {LM: built}).run(specs)
    assert_all_pages_free({LM: built})
    return [tokens_of(answers, spec.id) for spec in specs]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("prefill_chunk_tokens", [3, 256])
def test_a_batch_equals_single_generate_calls(family: Family, prefill_chunk_tokens: int, tmp_path: Path) -> None:
    folder = write_model(family, tmp_path)
    built = stage(folder, prefill_chunk_tokens=prefill_chunk_tokens)
    assert answers_of(built, PROMPTS, lambda _: Sampling(max_tokens=24)) == greedy(folder, PROMPTS, 24)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.name != "Qwen3Moe"], ids=lambda family: family.name)
def test_invariant_numerics_do_not_depend_on_the_batch(family: Family, tmp_path: Path) -> None:
    folder = write_model(family, tmp_path)

    def sampling(n: int) -> Sampling:
        return Sampling(max_tokens=20, temperature=0.8 if n % 2 else 0.0, top_p=0.95, seed=n)

    together = answers_of(stage(folder, numerics="invariant", prefill_chunk_tokens=5), PROMPTS, sampling)
    alone = stage(folder, numerics="invariant")
    assert together == [answers_of(alone, [prompt], lambda _, n=n: sampling(n))[0] for n, prompt in enumerate(PROMPTS)]
    assert together[0] == greedy(folder, PROMPTS[:1], 20)[0]


def test_experts_have_no_invariant_numerics_here(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="qwen3_moe, which has experts"):
        stage(write_model(FAMILIES[-1], tmp_path), numerics="invariant")


def test_repetition_penalty_is_the_one_of_transformers(tmp_path: Path) -> None:
    folder = write_model(FAMILIES[0], tmp_path)
    penalised = answers_of(stage(folder), PROMPTS, lambda _: Sampling(max_tokens=24, repetition_penalty=1.7))
    assert penalised == greedy(folder, PROMPTS, 24, repetition_penalty=1.7)
    assert penalised != greedy(folder, PROMPTS, 24)


def test_layers_that_keep_another_kind_of_state_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_next", "num_hidden_layers": 4}')
    with pytest.raises(ConfigError, match="layers of kind linear_attention cannot be served"):
        read_config(tmp_path)


def test_the_tiny_model_is_varied_and_the_same_every_time(tmp_path: Path) -> None:
    one, two = write_tiny_checkpoint(tmp_path / "one"), write_tiny_checkpoint(tmp_path / "two")
    assert all((two / path.name).read_bytes() == path.read_bytes() for path in one.iterdir())
    answers = answers_of(stage(one), PROMPTS, lambda _: Sampling(max_tokens=40))
    assert answers == greedy(one, PROMPTS, 40)
    assert len({tuple(answer) for answer in answers}) == len(PROMPTS)
    assert all(len(set(answer)) > len(answer) // 2 for answer in answers)
