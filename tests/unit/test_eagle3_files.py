"""Draft-head files: round trips, hashes, and refusals that name what is wrong."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fleet.core.errors import ConfigError
from fleet.drafts.eagle3.files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    build_head,
    in_dtype,
    load_head,
    save_head,
)
from tests.draft_heads import CONFIG, VOCABULARY, make_head

Weights = dict[str, Tensor]


def edit_json(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / CONFIG_FILE
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def test_head_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    head = make_head(dtype="bfloat16", norm_before_residual=True)
    save_head(head, tmp_path)
    loaded = load_head(tmp_path, target_hash="target-1")
    assert loaded.config == head.config
    assert torch.equal(loaded.vocabulary_D, head.vocabulary_D)
    assert all(
        torch.equal(weight, dict(loaded.named_parameters())[name])
        for name, weight in head.named_parameters()
    )


def test_hash_is_of_the_bytes_and_equal_for_equal_heads(tmp_path: Path) -> None:
    digests = [
        save_head(make_head(seed=seed), tmp_path / str(at)) for at, seed in enumerate((1, 1, 2))
    ]
    assert digests[0] == digests[1] != digests[2]
    assert not list(tmp_path.glob("*/.*")), "parts are renamed"


def test_head_of_another_target_is_refused(tmp_path: Path) -> None:
    save_head(make_head(), tmp_path)
    with pytest.raises(ConfigError, match="belongs to the target target-1, not target-2"):
        load_head(tmp_path, target_hash="target-2")


def test_weights_that_do_not_match_their_hash_are_refused(tmp_path: Path) -> None:
    save_head(make_head(), tmp_path)
    data = bytearray((tmp_path / WEIGHTS_FILE).read_bytes())
    data[-1] ^= 1
    (tmp_path / WEIGHTS_FILE).write_bytes(data)
    with pytest.raises(ConfigError, match="do not match their hash"):
        load_head(tmp_path)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        (lambda values: values["config"].pop("norm_eps"), "norm_eps"),
        (lambda values: values["config"].update(norm_output=True), "norm_output"),
        (lambda values: values.pop("sha256"), "sha256"),
        (lambda values: values.update(author="x"), "author"),
        (lambda values: values.update(format=2), "format"),
        (lambda values: values["config"].update(layer_ids=[2, 4]), "layer_ids"),
        (lambda values: values["config"].update(num_heads="4"), "num_heads"),
    ],
)
def test_missing_unknown_or_wrong_field_is_named(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], param: str
) -> None:
    save_head(make_head(), tmp_path)
    edit_json(tmp_path, change)
    with pytest.raises(ConfigError, match=param) as refused:
        load_head(tmp_path)
    assert refused.value.param == param


@pytest.mark.parametrize("name", ["fc", "vocabulary", "extra"])
def test_missing_or_unknown_weight_is_named(tmp_path: Path, name: str) -> None:
    save_head(make_head(), tmp_path)
    weights = load_file(tmp_path / WEIGHTS_FILE)
    if weights.pop(name, None) is None:
        weights[name] = torch.zeros(1)
    save_file(weights, tmp_path / WEIGHTS_FILE)
    edit_json(tmp_path, lambda values: values.update(sha256=sha256_of(tmp_path / WEIGHTS_FILE)))
    with pytest.raises(ConfigError, match=f"weight {name}"):
        load_head(tmp_path)


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("data", [b"", b"no safetensors"])
def test_damaged_or_missing_files_are_named(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ConfigError, match=f"{CONFIG_FILE}: cannot be read"):
        load_head(tmp_path)
    save_head(make_head(), tmp_path)
    (tmp_path / WEIGHTS_FILE).write_bytes(data)
    edit_json(tmp_path, lambda values: values.update(sha256=sha256_of(tmp_path / WEIGHTS_FILE)))
    with pytest.raises(ConfigError, match=f"{WEIGHTS_FILE}: not safetensors"):
        load_head(tmp_path)
    (tmp_path / CONFIG_FILE).write_text("[1]")
    with pytest.raises(ConfigError, match="not an object of JSON"):
        load_head(tmp_path)


def test_weights_that_are_not_finite_are_neither_saved_nor_built(tmp_path: Path) -> None:
    head = make_head()
    with torch.no_grad():
        head.down[0, 0] = torch.nan
    with pytest.raises(ConfigError, match="down has values that are not finite"):
        save_head(head, tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="down has values that are not finite"):
        build_head(CONFIG, VOCABULARY, dict(head.named_parameters()), "test", device=None)


def test_weight_of_another_shape_is_named() -> None:
    weights: Weights = dict(make_head().named_parameters())
    with pytest.raises(ConfigError, match=r"fc has the shape \(1, 2\)"):
        build_head(CONFIG, VOCABULARY, weights | {"fc": torch.zeros(1, 2)}, "test", device=None)


def test_head_is_copied_to_another_dtype() -> None:
    head = make_head()
    copied = in_dtype(head, "bfloat16")
    assert (
        copied.config.dtype == "bfloat16"
        and copied.fc.dtype == torch.bfloat16
        and head.fc.dtype == torch.float64
    )
    assert torch.equal(copied.qkv, head.qkv.bfloat16())
