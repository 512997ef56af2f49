"""Trial before a model is divided: an anchor divides a small random model of the same kind, and
starts only if the results do not change.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

from fleet.core.errors import ConfigError
from fleet.models.causal_lm import span
from fleet.models.causal_lm.span_trial import small_config, try_division
from fleet.spans.protocol.layers import LayerSpan
from fleet.stages.options import AnchorOptions
from fleet.stages.text import build
from tests.oracle.test_text_engine import FAMILIES, LM, REFUSED, Family, write_model
from tests.stage_options import stage_options

PUBLISHED = ("Llama", "Qwen3", "Mistral", "Gemma3Text", "GPT2", "OPT", "GptOss")
"""Architectures whose default configuration has the sizes of a published model."""


def default_config(name: str, **changed: Any) -> PretrainedConfig:
    return getattr(import_module("transformers"), f"{name}Config")(**changed)


@pytest.mark.parametrize("name", PUBLISHED)
def test_large_model_is_tried_small(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = default_config(name)
    config.save_pretrained(tmp_path)
    small = small_config(config)
    assert (
        small.hidden_size < config.hidden_size
        and small.num_hidden_layers <= config.num_hidden_layers
    )
    assert set(getattr(small, "layer_types", None) or ()) == set(
        getattr(config, "layer_types", None) or ()
    )
    before = torch.random.get_rng_state()
    try_division(tmp_path, tiled=True)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert "is not tried" not in caplog.text


@pytest.mark.parametrize(
    "family",
    [each for each in FAMILIES if each.name not in PUBLISHED],
    ids=lambda family: family.name,
)
def test_division_of_a_supported_architecture_is_accepted(family: Family, tmp_path: Path) -> None:
    write_model(family, tmp_path)
    try_division(tmp_path, tiled=True)


@pytest.mark.parametrize("name", ["Bloom", "Doge", "MiniCPM3"])
def test_architecture_that_is_refused_whole_is_refused_divided(name: str, tmp_path: Path) -> None:
    default_config(name).save_pretrained(tmp_path)
    reason = "layers make 0 calls" if name == "Bloom" else REFUSED[name]
    with pytest.raises(
        ConfigError, match=f"checkpoint {tmp_path}: .* cannot be divided into spans: .*{reason}"
    ):
        try_division(tmp_path, tiled=False)


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
def test_anchor_is_refused_if_its_division_changes_results(
    numerics: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(FAMILIES[0], tmp_path)
    insert = span.SkippedLayer.forward

    def insert_larger(self: span.SkippedLayer, *args: Any, **more: Any) -> Any:
        rows: Any = insert(self, *args, **more)
        return rows * 1.01

    monkeypatch.setattr(span.SkippedLayer, "forward", insert_larger)
    anchor = AnchorOptions(span=LayerSpan(0, 0), returned="logits")
    options = stage_options(stage=LM, checkpoint=tmp_path, numerics=numerics, anchor=anchor)
    with pytest.raises(
        ConfigError,
        match="llama cannot be divided into spans: a small random model of this kind gives "
        "other results",
    ):
        build(options)


def test_architecture_without_a_small_model_is_not_tried_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(FAMILIES[0], tmp_path)
    monkeypatch.setattr("fleet.models.causal_lm.span_trial.NUM_HEADS", 0)
    try_division(tmp_path, tiled=True)
    assert "the division of llama is not tried beforehand" in caplog.text
