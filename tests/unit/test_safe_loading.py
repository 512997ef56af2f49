"""Checkpoints are data: their code is never run, and weights are read only from safetensors."""

import ast
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fleet.cli.checkpoint import resolve_checkpoint
from fleet.config import load_config
from fleet.core.errors import ConfigError
from fleet.lab.pocket.export import part_of
from fleet.models.causal_lm.load import load_model
from fleet.models.checkpoint import CheckpointReader
from tests.sources import SOURCES, parsed, relative
from tests.unit.test_house_style import PICKLES

LOADERS = (*PICKLES, "torch", "torch.jit", "torch.hub", "joblib")
UNPICKLERS = {f"{module}.{name}" for module in LOADERS for name in ("load", "loads")}
WEIGHTLESS = ("Config", "Tokenizer", "FeatureExtractor")
"""Suffixes of the names of classes whose `from_pretrained` reads only JSON."""


def unsafe_loads(tree: ast.AST) -> list[str]:
    """Return the calls that may unpickle, or run a checkpoint's code, with their lines."""
    found: list[str] = []
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        reads_weights = name.endswith(".from_pretrained") and not name.removesuffix(
            ".from_pretrained"
        ).endswith(WEIGHTLESS)
        wrong = {
            "unpickles": name in UNPICKLERS or given.get("allow_pickle", "False") != "False",
            "may run code": given.get("trust_remote_code", "False") != "False"
            or given.get("weights_only", "True") != "True",
            "needs use_safetensors=True": reads_weights and given.get("use_safetensors") != "True",
            "needs trust_remote_code=False": ".Auto" in f".{name}"
            and name.endswith(".from_pretrained")
            and given.get("trust_remote_code") != "False",
        }
        found += [f"{call.lineno}: {name} {what}" for what, is_so in wrong.items() if is_so]
    return found


def test_checkpoints_are_loaded_as_data() -> None:
    wrong = [
        f"{relative(path)}:{found}" for path in SOURCES for found in unsafe_loads(parsed(path))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "call",
    [
        "torch.load(path)",
        "pickle.loads(raw)",
        "np.load(path, allow_pickle=True)",
        "Some.Model.from_pretrained(path)",
        "getattr(library, name).from_pretrained(path, use_safetensors=None)",
        "AutoConfig.from_pretrained(path)",
        "AutoTokenizer.from_pretrained(path, trust_remote_code=True)",
        "Model.from_pretrained(path, use_safetensors=True, trust_remote_code=given)",
    ],
)
def test_unsafe_load_is_found(call: str) -> None:
    assert unsafe_loads(ast.parse(call))


@pytest.fixture(scope="module")
def pickled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete causal language model whose weights are a pickle."""
    folder = tmp_path_factory.mktemp("pickled")
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    config.save_pretrained(folder)
    torch.save(LlamaForCausalLM(config).state_dict(), folder / "pytorch_model.bin")
    return folder


@pytest.mark.parametrize("reader", ["cli", "weights", "model", "pocket"])
def test_folder_of_pickled_weights_is_refused(pickled: Path, reader: str) -> None:
    with pytest.raises(ConfigError, match="safetensors") as refused:
        if reader == "cli":
            resolve_checkpoint(load_config(None, ("graph=text", f"checkpoint={pickled}")))
        elif reader == "weights":
            CheckpointReader(pickled, device=torch.device("cpu"), dtype=torch.float32)
        elif reader == "model":
            load_model(pickled, "llama", torch.float32)
        else:
            part_of(pickled, "thinker")
    assert "\n" not in refused.value.message
    if reader in ("cli", "weights"):
        assert (
            "pickled weights (pytorch_model.bin and the like) are not read" in refused.value.message
        )
