"""The exported checkpoint folder is loaded by `transformers` and by Fleet, with the trained
weights.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fleet.config.schema import Limits
from fleet.core.errors import ConfigError
from fleet.core.ids import EdgeName, RequestId, StageName
from fleet.core.request import Sampling
from fleet.lab.pocket import export as subject
from fleet.lab.pocket import shape
from fleet.lab.pocket.corpus import ChatTurn
from fleet.lab.pocket.export import PLACES, export
from fleet.lab.pocket.train.thinker import ThinkerModel, opening, turn_ids
from fleet.processing import ChatRequest, Message, TextPart, load_frontend
from fleet.processing.sampling_defaults import read_checkpoint_sampling
from tests.oracle.oracle import from_pretrained
from tests.oracle.twins import speaking_stages, speaking_twin, tokens_of

THINKER, TALKER = StageName("thinker"), StageName("talker")
QUESTION = ChatTurn(role="user", text="what is two plus two")


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Weight files of all model parts as training saves them, different from the initial weights;
    some weights are for training only.
    """
    folder = tmp_path_factory.mktemp("parts")
    model = subject._initial_model()  # pyright: ignore[reportPrivateUsage]
    state: dict[str, Tensor] = {name: value + 0.125 for name, value in model.state_dict().items()}
    state |= {
        f"thinker.{_exported_name(name)}": value
        for name, value in ThinkerModel(seed=3).state_dict().items()
    }
    files: dict[str, Path] = {}
    for part, places in PLACES.items():
        named = {
            _renamed(name, places): value
            for name, value in state.items()
            if name.startswith(tuple(places.values()))
        }
        files[part] = folder / f"{part}.safetensors"
        training_only = {"pointer.weight": torch.zeros(1)} if part == "talker" else {}
        save_file(named | training_only, files[part])
    return files


def _exported_name(name: str) -> str:
    return (
        name
        if name.startswith("lm_head.")
        else f"model.language_model.{name.removeprefix('model.')}"
    )


def _renamed(name: str, places: Mapping[str, str]) -> str:
    trained, target = next(
        (trained, target) for trained, target in places.items() if name.startswith(target)
    )
    return trained + name.removeprefix(target)


@pytest.fixture(scope="module")
def folder(parts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(parts, tmp_path_factory.mktemp("pocket") / "out")


def test_transformers_loads_every_trained_weight(folder: Path, parts: dict[str, Path]) -> None:
    model, found = from_pretrained(
        "Qwen3OmniMoeForConditionalGeneration",
        folder,
        dtype=torch.float32,
        output_loading_info=True,
    )
    assert not any(found.values()), found
    state: Mapping[str, Tensor] = model.state_dict()
    num_compared = 0
    for part, places in PLACES.items():
        for name, value in load_file(parts[part]).items():
            for trained, target in places.items():
                if name.startswith(trained):
                    assert torch.equal(
                        state[target + name.removeprefix(trained)], value.half().float()
                    ), name
                    num_compared += 1
    assert num_compared == sum(not name.startswith("thinker.model.visual.") for name in state)
    assert torch.equal(
        state["thinker.model.language_model.embed_tokens.weight"], shape.text_table()
    )


def test_fleet_and_trainer_give_equal_answers(folder: Path) -> None:
    frontend = load_frontend("fleet.processing.qwen3_omni:OmniFrontend", folder, Limits())
    chat = ChatRequest(
        id=RequestId("req-1"),
        graph="qwen3_omni",
        messages=(Message(role="user", content=TextPart(text="What is 2+2?", where="m")),),
        outputs=(EdgeName("text"),),
        sampling={
            THINKER: Sampling(max_tokens=12, temperature=0.0),
            TALKER: Sampling(max_tokens=12),
        },
    )
    spec = frontend.prepare(chat)[0]
    tokens = tokens_of(speaking_twin(speaking_stages(folder)).run([spec]), spec.id)
    thinker = ThinkerModel(seed=3).half().float()
    ids = [*turn_ids(QUESTION), *opening("assistant")]
    assert list(spec.prompt_ids) == ids
    assert tokens == _greedy(thinker, ids, 12)


@torch.no_grad()
def _greedy(thinker: ThinkerModel, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        hidden: Tensor = thinker.model(
            input_ids=torch.tensor([ids]), use_cache=False
        ).last_hidden_state
        ids.append(int(thinker.lm_head(hidden[0, -1]).argmax()))
        if ids[-1] == shape.TOKEN_ID["<|im_end|>"]:
            break
    return ids[len(prompt) :]


def test_weights_are_stored_in_half_and_loaded_in_single_precision(folder: Path) -> None:
    assert {value.dtype for value in load_file(folder / "model.safetensors").values()} == {
        torch.float16
    }
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"


def test_export_of_equal_parts_is_byte_identical(
    folder: Path, parts: dict[str, Path], tmp_path: Path
) -> None:
    again = export(parts, tmp_path / "again")
    assert {file.name: file.read_bytes() for file in again.iterdir()} == {
        file.name: file.read_bytes() for file in folder.iterdir()
    }


def test_exported_sampling_is_greedy(folder: Path) -> None:
    for prefix, max_tokens in (("", 128), ("talker_", 375)):
        expected = {"temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": max_tokens}
        assert read_checkpoint_sampling(folder, prefix) == expected
    assert (
        json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
        == shape.TOKEN_ID["<|im_end|>"]
    )


def test_export_names_the_missing_file(parts: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hearing has no file"):
        export(parts | {"hearing": tmp_path / "none.safetensors"}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            {"lm_head.weight": torch.zeros(2, 2)},
            r"lm_head.weight must be \(80, 256\), found \(2, 2\)",
        ),
        (
            {"model.extra.weight": torch.zeros(1)},
            "has no thinker.model.language_model.extra.weight",
        ),
        ({"lm_head.weight": torch.full((80, 256), 1e6)}, "not finite in half precision"),
    ],
)
def test_export_refuses_weights_of_wrong_shape(
    parts: dict[str, Path], tmp_path: Path, change: dict[str, Tensor], complaint: str
) -> None:
    bad = tmp_path / "thinker.safetensors"
    save_file(load_file(parts["thinker"]) | change, bad)
    with pytest.raises(ConfigError, match=complaint):
        export(parts | {"thinker": bad}, tmp_path / "out")


def test_export_refuses_part_with_missing_weight(parts: dict[str, Path], tmp_path: Path) -> None:
    bad = tmp_path / "thinker.safetensors"
    save_file({"lm_head.weight": torch.zeros(80, 256)}, bad)
    with pytest.raises(ConfigError, match="found nothing"):
        export(parts | {"thinker": bad}, tmp_path / "out")
