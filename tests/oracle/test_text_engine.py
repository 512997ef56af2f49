"""Causal language models on the torch engine compared with `generate()` of `transformers`, for each
architecture.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fleet.core.errors import BadInput, ConfigError
from fleet.core.ids import EdgeName, RequestId, StageName
from fleet.core.request import RequestSpec, Sampling
from fleet.graphs import get_graph
from fleet.lab.measure.twin import SlowTwin
from fleet.models.causal_lm.load import load_model, read_config
from fleet.models.causal_lm.paged import paged_attention
from fleet.models.causal_lm.parts import Parts
from fleet.models.causal_lm.probe import ProbeLayout, probe
from fleet.models.causal_lm.tiny import write_tiny_checkpoint
from fleet.stages.base import BuiltStage
from fleet.stages.text import build
from tests.oracle.oracle import from_pretrained
from tests.oracle.twins import assert_all_pages_free, tokens_of
from tests.stage_options import stage_options

pytestmark = pytest.mark.one_file_in(6, "engines")

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
    """A model architecture of `transformers`, by its config's name, with settings in addition to
    the small sizes.
    """

    name: str
    more: dict[str, Any]


FAMILIES = (
    Family(name="Llama", more={}),
    Family(name="Qwen2", more={"tie_word_embeddings": True}),
    Family(name="Qwen3", more={}),
    Family(name="Mistral", more={"sliding_window": 8}),
    Family(
        name="Gemma2",
        more={"sliding_window": 8, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 5.0},
    ),
    Family(
        name="Gemma3Text",
        more={
            "sliding_window": 8,
            "query_pre_attn_scalar": 12,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    Family(name="GPT2", more={}),
    Family(name="GPTNeoX", more={}),
    Family(name="GPTBigCode", more={}),
    Family(name="BioGpt", more={}),
    Family(name="OPT", more={"word_embed_proj_dim": 24, "ffn_dim": 96}),
    Family(name="GraniteSWA", more={"sliding_window": 8}),
    Family(
        name="GptOss", more={"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    Family(
        name="Qwen3Moe",
        more={"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
)
DENSE = [family for family in FAMILIES if family.name not in ("GptOss", "Qwen3Moe")]
REFUSED = {
    "XGLM": "its 3 layers make 0 calls",
    "Bloom": "its 3 layers make 0 calls",
    "Mpt": "mpt cannot be served: ",
    "CodeGen": "codegen cannot be served: ",
    "CTRL": "it computes positions by itself",
    "Mamba": "mamba|linear_attention",
    "Bert": "its attention asks for what comes later in the text",
    "Camembert": "results differ from those for ids",
    "Doge": "its attention asks for attention_mask",
    "MiniCPM3": "keys and values differ in size",
    "Qwen2Moe": "does not pass its sliding window to its attention",
}
MORE = {
    "Camembert": {"is_decoder": True},
    "Mpt": {"d_model": 48, "n_heads": 4, "n_layers": 3},
    "Qwen2Moe": {
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 3,
        "num_experts": 4,
    },
}
"""Further settings of the architectures that Fleet refuses."""


def write_model(family: Family, folder: Path) -> Path:
    """Write random weights with which every part of the model affects the answers."""
    transformers = import_module("transformers")
    torch.manual_seed(7)
    config = getattr(transformers, f"{family.name}Config")(**{**SMALL, **family.more})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def greedy(
    folder: Path, prompts: Sequence[list[int]], max_tokens: int, **options: Any
) -> list[list[int]]:
    """Return greedy answers by one `generate()` call per prompt, with the attention implementation
    that masks the same way for every architecture.
    """
    model = from_pretrained(
        "AutoModelForCausalLM", folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    answers: list[list[int]] = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            **options,
        )
        answers.append(made[0, len(prompt) :].tolist())
    return answers


def stage(folder: Path, **options: Any) -> BuiltStage:
    return build(stage_options(stage=LM, checkpoint=folder, **options))


def answers_of(
    built: BuiltStage, prompts: Sequence[list[int]], sampling: Callable[[int], Sampling]
) -> list[list[int]]:
    specs = [
        RequestSpec(
            id=RequestId(f"r{n}"),
            graph="text",
            prompt_ids=tuple(prompt),
            outputs=(TEXT,),
            sampling={LM: sampling(n)},
        )
        for n, prompt in enumerate(prompts)
    ]
    answers = SlowTwin(get_graph("text"), {LM: built}).run(specs)
    assert_all_pages_free({LM: built})
    return [tokens_of(answers, spec.id) for spec in specs]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("prefill_chunk_tokens", [3, 256])
def test_batch_matches_single_generate_calls(
    family: Family, prefill_chunk_tokens: int, tmp_path: Path
) -> None:
    folder = write_model(family, tmp_path)
    built = stage(folder, prefill_chunk_tokens=prefill_chunk_tokens)
    assert answers_of(built, PROMPTS, lambda _: Sampling(max_tokens=24)) == greedy(
        folder, PROMPTS, 24
    )


@pytest.mark.parametrize("family", DENSE, ids=lambda family: family.name)
def test_invariant_numerics_do_not_depend_on_the_batch(family: Family, tmp_path: Path) -> None:
    folder = write_model(family, tmp_path)

    def sampling(n: int) -> Sampling:
        return Sampling(max_tokens=20, temperature=0.8 if n % 2 else 0.0, top_p=0.95, seed=n)

    together = answers_of(
        stage(folder, numerics="invariant", prefill_chunk_tokens=5), PROMPTS, sampling
    )
    alone = stage(folder, numerics="invariant")
    assert together == [
        answers_of(alone, [prompt], lambda _, n=n: sampling(n))[0]
        for n, prompt in enumerate(PROMPTS)
    ]
    assert together[0] == greedy(folder, PROMPTS[:1], 20)[0]


def test_invariant_numerics_are_refused_for_experts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="qwen3_moe, which has experts"):
        stage(write_model(FAMILIES[-1], tmp_path), numerics="invariant")


def test_repetition_penalty_matches_transformers(tmp_path: Path) -> None:
    folder = write_model(FAMILIES[0], tmp_path)
    penalised = answers_of(
        stage(folder), PROMPTS, lambda _: Sampling(max_tokens=24, repetition_penalty=1.7)
    )
    assert penalised == greedy(folder, PROMPTS, 24, repetition_penalty=1.7)
    assert penalised != greedy(folder, PROMPTS, 24)


def test_min_tokens_and_ignore_eos_match_transformers(tmp_path: Path) -> None:
    folder = write_model(FAMILIES[0], tmp_path)
    common = sorted({token for answer in greedy(folder, PROMPTS, 24) for token in answer[2:8:3]})
    # both ends of config.json and generation_config.json count here, and only the latter in
    # transformers
    ends = [*common, json.loads((folder / "config.json").read_text())["eos_token_id"]]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    short = answers_of(stage(folder), PROMPTS, lambda _: Sampling(max_tokens=24))
    assert short == greedy(folder, PROMPTS, 24) and max(map(len, short)) < 10
    least = answers_of(stage(folder), PROMPTS, lambda _: Sampling(max_tokens=24, min_tokens=10))
    assert least == greedy(folder, PROMPTS, 24, min_new_tokens=10)
    unending = answers_of(
        stage(folder), PROMPTS, lambda _: Sampling(max_tokens=24, ignore_eos=True)
    )
    assert unending == greedy(folder, PROMPTS, 24, min_new_tokens=24)


def test_layers_with_another_kind_of_state_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_next", "num_hidden_layers": 4}')
    with pytest.raises(ConfigError, match="layers of kind linear_attention cannot be served"):
        read_config(tmp_path)


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_architecture_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    folder = write_model(Family(name=name, more=MORE.get(name, {})), tmp_path)
    with pytest.raises(ConfigError, match=REFUSED[name]) as caught:
        stage(folder)
    assert str(folder) in caught.value.message and "\n" not in caught.value.message


def test_layers_that_mix_rows_outside_attention_are_refused(tmp_path: Path) -> None:
    folder = write_model(FAMILIES[0], tmp_path)
    model: Any = load_model(folder, "llama", torch.float32)
    probe(model.config, Parts(model), torch.device("cpu"))
    whole: Any = load_model(folder, "llama", torch.float32)
    whole.model.layers[1].mlp.register_forward_hook(
        lambda _module, _given, made: made + 0.001 * made.roll(1, 1)
    )
    with pytest.raises(ValueError, match="carry state from row to row"):
        probe(whole.config, Parts(whole), torch.device("cpu"))


def test_unknown_attention_keyword_is_refused() -> None:
    rows = torch.zeros(1, 1, 2, 4)
    module: Any = SimpleNamespace(layer_idx=0)
    layout = ProbeLayout(torch.arange(2))
    paged_attention(
        module, rows, rows, rows, None, fleet_layout=layout, position_bias=None, dropout=0.0
    )
    with pytest.raises(ValueError, match="asks for position_bias"):
        paged_attention(module, rows, rows, rows, None, fleet_layout=layout, position_bias=rows)


@pytest.mark.parametrize("name", ["GPT2", "OPT"])
def test_answer_ends_by_length_at_the_last_learned_position(name: str, tmp_path: Path) -> None:
    folder = write_model(Family(name=name, more={"max_position_embeddings": 40}), tmp_path)
    built = stage(folder)
    answers = answers_of(
        built, [PROMPTS[2], PROMPTS[0]], lambda _: Sampling(max_tokens=99, repetition_penalty=2.0)
    )
    assert [len(answer) for answer in answers] == [40 - 33, 40 - 4]
    spec = RequestSpec(
        id=RequestId("long"), graph="text", prompt_ids=tuple(range(40)), outputs=(TEXT,)
    )
    with pytest.raises(
        BadInput, match="maximum context length is 39 tokens. However, the prompt has 40 tokens"
    ):
        built.adapter(spec, None).open()


@pytest.mark.parametrize("file", ["model.safetensors", "model-00002-of-00002.safetensors"])
def test_damaged_weight_file_is_named(file: str, tmp_path: Path) -> None:
    folder = write_model(FAMILIES[0], tmp_path)
    if file != "model.safetensors":
        from_pretrained("AutoModelForCausalLM", folder).save_pretrained(
            folder, max_shard_size="250KB"
        )
        (folder / "model.safetensors").unlink()
    with (folder / file).open("r+b") as weights:
        weights.truncate((folder / file).stat().st_size - 100)
    with pytest.raises(ConfigError, match=f"{file} cannot be read") as caught:
        stage(folder)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("change", "message"),
    [("wider", "llama cannot be loaded: .*size.*; fetch it again"), ("deeper", "lacks 9 weights")],
)
def test_weights_that_do_not_match_the_config_are_refused_in_one_line(
    change: str, message: str, tmp_path: Path
) -> None:
    folder = write_model(FAMILIES[0], tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config |= {"intermediate_size": 100} if change == "wider" else {"num_hidden_layers": 4}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message) as caught:
        stage(folder)
    assert "\n" not in caught.value.message


def test_tiny_model_is_varied_and_deterministic(tmp_path: Path) -> None:
    one, two = write_tiny_checkpoint(tmp_path / "one"), write_tiny_checkpoint(tmp_path / "two")
    assert all((two / path.name).read_bytes() == path.read_bytes() for path in one.iterdir())
    answers = answers_of(stage(one), PROMPTS, lambda _: Sampling(max_tokens=40))
    assert answers == greedy(one, PROMPTS, 40)
    assert len({tuple(answer) for answer in answers}) == len(PROMPTS)
    assert all(len(set(answer)) > len(answer) // 2 for answer in answers)
