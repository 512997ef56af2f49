"""Draft heads in the formats of other programs: round trips, the meaning of layer ids, refusals by
name.

The rules of the reading programs are written out below from their sources, so that a head which
another program would read differently fails here.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from fleet.core.errors import ConfigError
from fleet.drafts.eagle3.head import Eagle3Head
from fleet.drafts.eagle3.loss import UnrolledSteps
from fleet.drafts.eagle3.sglang import export_sglang, import_sglang
from fleet.drafts.eagle3.speculators import export_speculators, import_speculators
from tests.draft_heads import CONFIG, VOCABULARY, embedding, make_head, make_sample

NUM_LAYERS = CONFIG.num_layers


class Format(NamedTuple):
    """A file format of another program, with its writing and reading functions and their
    arguments.
    """

    write: Callable[[Eagle3Head, Path], None]
    read: Callable[..., Eagle3Head]
    layer: str


def write_speculators(head: Eagle3Head, folder: Path) -> None:
    export_speculators(
        head,
        folder,
        target="models/target",
        target_architectures=["Qwen3ForCausalLM"],
        num_drafts=3,
    )


SPECULATORS = Format(write_speculators, import_speculators, "layers.0")
SGLANG = Format(export_sglang, import_sglang, "midlayer")
BOTH = pytest.mark.parametrize("form", [SPECULATORS, SGLANG], ids=["speculators", "sglang"])


def read(form: Format, folder: Path, **options: Any) -> Eagle3Head:
    return form.read(folder, num_layers=NUM_LAYERS, target_hash="target-1", **options)


def settings_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    settings = settings_of(folder)
    change(settings)
    (folder / "config.json").write_text(json.dumps(settings))


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


@BOTH
def test_round_trip_keeps_the_head(form: Format, tmp_path: Path) -> None:
    head = make_head()
    form.write(head, tmp_path)
    same = read(form, tmp_path)
    assert same.config == head.config
    assert torch.equal(same.vocabulary_D, VOCABULARY)
    assert all(
        torch.equal(weight, dict(same.named_parameters())[name])
        for name, weight in head.named_parameters()
    )


@BOTH
def test_round_trip_keeps_a_whole_vocabulary(form: Format, tmp_path: Path) -> None:
    form.write(make_head(draft_vocab_size=40), tmp_path)
    assert read(form, tmp_path).vocabulary_D.tolist() == list(range(40))


@BOTH
def test_weights_have_the_readers_names_and_maps_hold_offsets(form: Format, tmp_path: Path) -> None:
    form.write(make_head(), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    parts = ["input_layernorm", "hidden_norm", "post_attention_layernorm"]
    parts += [f"self_attn.{part}_proj" for part in "qkvo"] + [
        f"mlp.{part}_proj" for part in ("gate", "up", "down")
    ]
    named = [f"{form.layer}.{part}.weight" for part in parts]
    assert set(weights) == {*named, "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert weights["d2t"].dtype == torch.int64 and weights["t2d"].dtype == torch.bool
    draft_ids = torch.arange(len(VOCABULARY))
    assert torch.equal(draft_ids + weights["d2t"], VOCABULARY)
    assert torch.equal(weights["t2d"].nonzero()[:, 0], VOCABULARY)
    assert weights[f"{form.layer}.self_attn.q_proj.weight"].shape == (32, 32), (
        "the attention reads two rows of 16"
    )


@BOTH
@pytest.mark.parametrize(
    "name", ["fc.weight", "d2t", "t2d", "LAYER.mlp.up_proj.weight", "LAYER.hidden_norm.weight"]
)
def test_missing_weight_is_named(form: Format, name: str, tmp_path: Path) -> None:
    name = name.replace("LAYER", form.layer)
    form.write(make_head(), tmp_path)
    edit_weights(tmp_path, lambda weights: weights.pop(name))
    with pytest.raises(ConfigError, match=f"no weight {name}"):
        read(form, tmp_path)


@BOTH
@pytest.mark.parametrize(
    "name",
    [
        "LAYER.self_attn.q_norm.weight",
        "input_norm.weight",
        "fc.bias",
        "layers.1.hidden_norm.weight",
    ],
)
def test_unknown_weight_is_named(form: Format, name: str, tmp_path: Path) -> None:
    name = name.replace("LAYER", form.layer)
    form.write(make_head(), tmp_path)
    edit_weights(tmp_path, lambda weights: weights.update({name: torch.ones(16)}))
    with pytest.raises(ConfigError, match=f"unknown weight {name}"):
        read(form, tmp_path)


@BOTH
def test_map_of_ids_in_the_place_of_offsets_is_refused(form: Format, tmp_path: Path) -> None:
    form.write(make_head(), tmp_path)
    edit_weights(tmp_path, lambda weights: weights.update(d2t=VOCABULARY))
    with pytest.raises(ConfigError, match="d2t, as offsets of draft ids"):
        read(form, tmp_path)


@BOTH
def test_embedding_of_the_folder_must_be_the_targets(form: Format, tmp_path: Path) -> None:
    form.write(make_head(), tmp_path)
    edit_weights(tmp_path, lambda weights: weights.update({"embed_tokens.weight": embedding()}))
    read(form, tmp_path, embedding_VH=embedding())
    with pytest.raises(ConfigError, match="is not the target's embedding"):
        read(form, tmp_path, embedding_VH=embedding(seed=8))
    with pytest.raises(ConfigError, match="give the target's embedding"):
        read(form, tmp_path)


def layer_of(settings: dict[str, Any]) -> dict[str, Any]:
    return settings.get("transformer_layer_config", settings)


@BOTH
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("num_hidden_layers", 2),
        ("model_type", "qwen3"),
        ("rope_scaling", {"rope_type": "yarn"}),
        ("sliding_window", 128),
        ("rope_theta", 5.0),
        ("partial_rotary_factor", 0.5),
        ("rope_parameters", {"rope_type": "linear", "rope_theta": 10_000.0}),
    ],
)
def test_setting_that_changes_the_result_is_refused_by_name(
    form: Format, name: str, value: object, tmp_path: Path
) -> None:
    form.write(make_head(), tmp_path)
    edit(tmp_path, lambda settings: layer_of(settings).update({name: value}))
    with pytest.raises(ConfigError, match=name):
        read(form, tmp_path)


@BOTH
@pytest.mark.parametrize("name", ["norm_before_fc", "fc_norm", "norm_output", "a_new_flag"])
def test_variant_that_the_head_does_not_compute_is_refused_by_name(
    form: Format, name: str, tmp_path: Path
) -> None:
    form.write(make_head(), tmp_path)
    edit(tmp_path, lambda settings: settings.update({name: True}))
    with pytest.raises(ConfigError, match=name):
        read(form, tmp_path)


@BOTH
@pytest.mark.parametrize(
    "name",
    ["hidden_size", "num_attention_heads", "rms_norm_eps", "vocab_size", "max_position_embeddings"],
)
def test_missing_setting_is_named(form: Format, name: str, tmp_path: Path) -> None:
    form.write(make_head(), tmp_path)
    edit(tmp_path, lambda settings: layer_of(settings).pop(name))
    with pytest.raises(ConfigError, match=f"no field {name}"):
        read(form, tmp_path)


@pytest.mark.parametrize("flag", [False, True])
def test_speculators_folder_always_has_the_flag_that_readers_default_differently(
    flag: bool, tmp_path: Path
) -> None:
    write_speculators(make_head(norm_before_residual=flag), tmp_path)
    assert settings_of(tmp_path)["norm_before_residual"] is flag
    assert read(SPECULATORS, tmp_path).config.norm_before_residual is flag
    edit(tmp_path, lambda settings: settings.pop("norm_before_residual"))
    with pytest.raises(ConfigError, match="no field norm_before_residual"):
        read(SPECULATORS, tmp_path)


def test_speculators_folder_can_have_the_embedding(tmp_path: Path) -> None:
    export_speculators(
        make_head(),
        tmp_path,
        target="t",
        target_architectures=["Qwen3ForCausalLM"],
        num_drafts=3,
        embedding_VH=embedding(),
    )
    assert torch.equal(
        load_file(tmp_path / "model.safetensors")["embed_tokens.weight"], embedding()
    )


def test_speculators_folder_has_the_settings_that_vllm_requires(tmp_path: Path) -> None:
    """A folder in the `speculators` format has the settings that vLLM requires. Source: vLLM 0.32,
    `SpeculatorsConfig.validate_speculators_config` and `update_eagle3`.
    """
    write_speculators(make_head(), tmp_path)
    settings = settings_of(tmp_path)
    speculators = settings["speculators_config"]
    assert speculators["proposal_methods"][0]["speculative_tokens"] == 3
    assert speculators["verifier"]["name_or_path"] == "models/target"
    assert settings["speculators_model_type"] == "eagle3"
    assert settings["transformer_layer_config"]["model_type"] == "llama"
    assert settings["target_hidden_size"] == settings["transformer_layer_config"]["hidden_size"]


def test_sglang_refuses_heads_that_its_reader_cannot_compute(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="norm_before_residual"):
        export_sglang(make_head(norm_before_residual=True), tmp_path)
    with pytest.raises(ConfigError, match="rows that enter layer 0"):
        export_sglang(make_head(layer_ids=(0, 4, 5)), tmp_path)


def test_sglang_folder_without_layer_ids_taps_the_targets_default_layers(tmp_path: Path) -> None:
    export_sglang(make_head(), tmp_path)
    edit(tmp_path, lambda settings: settings.pop("eagle_config"))
    assert read(SGLANG, tmp_path).config.layer_ids == (2, 4, 5)


def test_sglang_folder_for_a_reader_without_taps_is_refused(tmp_path: Path) -> None:
    export_sglang(make_head(), tmp_path)
    edit(tmp_path, lambda settings: settings["eagle_config"].update(use_aux_hidden_state=False))
    with pytest.raises(ConfigError, match="use_aux_hidden_state"):
        read(SGLANG, tmp_path)


def logits_by_names(
    weights: dict[str, Tensor],
    layer: str,
    embeddings: Tensor,
    taps: Tensor,
    *,
    residual_normed: bool,
) -> Tensor:
    """Compute the logits of a head's first step, row by row, from a folder's weights by vLLM's
    formulas.

    Source: vLLM 0.32, `llama_eagle3.py` (`LlamaDecoderLayer.forward`, `compute_logits`); rotary
    embedding of Llama.
    """

    def normed(rows: Tensor, name: str) -> Tensor:
        return (
            rows
            / (rows.pow(2).mean(-1, keepdim=True) + CONFIG.norm_eps).sqrt()
            * weights[name + ".weight"]
        )

    def turned(heads: Tensor) -> Tensor:
        angles = torch.arange(len(heads))[:, None] * CONFIG.rope_theta ** (
            -torch.arange(0, 8, 2, dtype=torch.float64) / 8
        )
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat(
            [
                heads[..., :4] * cos - heads[..., 4:] * sin,
                heads[..., 4:] * cos + heads[..., :4] * sin,
            ],
            -1,
        )

    def product(rows: Tensor, part: str) -> Tensor:
        return rows @ weights[f"{layer}.{part}.weight"].T

    hidden = taps @ weights["fc.weight"].T
    normed_hidden = normed(hidden, f"{layer}.hidden_norm")
    joined = torch.cat([normed(embeddings, f"{layer}.input_layernorm"), normed_hidden], -1)
    q, k, v = (product(joined, f"self_attn.{part}_proj").view(len(taps), -1, 8) for part in "qkv")
    q, k, v = turned(q), turned(k).repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    attended = torch.stack(
        [
            torch.cat(
                [
                    (q[row, head] @ k[: row + 1, head].T / 8**0.5).softmax(-1) @ v[: row + 1, head]
                    for head in range(4)
                ]
            )
            for row in range(len(taps))
        ]
    )
    rows = (normed_hidden if residual_normed else hidden) + product(attended, "self_attn.o_proj")
    inner = normed(rows, f"{layer}.post_attention_layernorm")
    gated = torch.nn.functional.silu(product(inner, "mlp.gate_proj")) * product(
        inner, "mlp.up_proj"
    )
    return normed(rows + product(gated, "mlp.down_proj"), "norm") @ weights["lm_head.weight"].T


@torch.inference_mode()
@pytest.mark.parametrize(
    ("form", "flag"), [(SPECULATORS, False), (SPECULATORS, True), (SGLANG, False)]
)
def test_readers_formulas_give_the_heads_logits(form: Format, flag: bool, tmp_path: Path) -> None:
    head, sample = make_head(norm_before_residual=flag), make_sample(6, 2)
    form.write(head, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    plain = logits_by_names(
        weights, form.layer, sample.embeddings_NH[1:], sample.taps_NT[:-1], residual_normed=flag
    )
    steps = UnrolledSteps(head, [sample], num_steps=1)
    torch.testing.assert_close(
        head.logits(steps.hidden_rows()[0]), plain[steps.kept[0]], rtol=0, atol=1e-10
    )


class Target:
    """A small target model of `transformers`, with the hidden states that enter each layer and
    leave the last one.
    """

    def __init__(self) -> None:
        config = Qwen3Config(
            vocab_size=40,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.model = Qwen3ForCausalLM(config).eval()
        self.layers = list(self.model.model.layers)

    def entering(self, ids: Sequence[int]) -> list[Tensor]:
        """Return the hidden states that enter each layer, as hooks before the layers see them."""
        seen: list[Tensor] = []
        hooks = [
            layer.register_forward_pre_hook(lambda _layer, args: seen.append(args[0][0]))
            for layer in self.layers
        ]
        with torch.no_grad():
            self.model(input_ids=torch.tensor([ids]), use_cache=False)
        for hook in hooks:
            hook.remove()
        return seen

    def leaving(self, ids: Sequence[int]) -> list[Tensor]:
        """Return the hidden states that leave each layer, as hooks after the layers see them."""
        seen: list[Tensor] = []
        hooks = [
            layer.register_forward_hook(
                lambda _layer, _args, out: seen.append(
                    (out if isinstance(out, Tensor) else out[0])[0]
                )
            )
            for layer in self.layers
        ]
        with torch.no_grad():
            self.model(input_ids=torch.tensor([ids]), use_cache=False)
        for hook in hooks:
            hook.remove()
        return seen


def taps_of_vllm(settings: dict[str, Any], target: Target, ids: Sequence[int]) -> Tensor:
    """Return the hidden states that vLLM taps: the embedding has number 0, and the output of layer
    i has number i + 1. Source: vLLM 0.32, `Qwen2Model.forward`.
    """
    wanted = sorted(set(settings["eagle_aux_hidden_state_layer_ids"]))
    numbered = [target.entering(ids)[0], *target.leaving(ids)]
    return torch.cat([rows for number, rows in enumerate(numbered) if number in wanted], -1)


def taps_of_sglang(settings: dict[str, Any], target: Target, ids: Sequence[int]) -> Tensor:
    """Return the hidden states that SGLang taps. Source: SGLang, `set_eagle3_layers_to_capture`
    adds 1, and `LlamaModel.forward` takes the hidden states before layer i.
    """
    wanted = [number + 1 for number in settings["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
    return torch.cat(
        [rows for number, rows in enumerate(target.entering(ids)) if number in wanted], -1
    )


@pytest.mark.parametrize(
    ("form", "taps_of_reader"),
    [(SPECULATORS, taps_of_vllm), (SGLANG, taps_of_sglang)],
    ids=["speculators", "sglang"],
)
@pytest.mark.parametrize("layer_ids", [(2, 4, 5), (1, 3, 7)])
def test_reader_of_a_format_taps_the_rows_that_enter_the_heads_layers(
    form: Format,
    taps_of_reader: Callable[..., Tensor],
    layer_ids: tuple[int, int, int],
    tmp_path: Path,
) -> None:
    """The reader of a format taps the hidden states that enter the head's layers. Neighbouring
    layers differ, so that ids shifted by one fail.
    """
    target, ids = Target(), [3, 1, 4, 1, 5]
    entering = target.entering(ids)
    assert not any(
        torch.allclose(one, other, atol=1e-4)
        for one, other in zip(entering, entering[1:], strict=False)
    )
    form.write(make_head(layer_ids=layer_ids), tmp_path)
    own_taps = torch.cat([entering[layer] for layer in layer_ids], -1)
    torch.testing.assert_close(taps_of_reader(settings_of(tmp_path), target, ids), own_taps)
    assert read(form, tmp_path).config.layer_ids == layer_ids
