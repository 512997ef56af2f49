"""End tokens of a checkpoint: every end token named in any of its files ends an answer."""

import json
from pathlib import Path

import pytest

from fleet.config.schema import Limits
from fleet.core.errors import ConfigError
from fleet.processing import load_frontend
from fleet.processing.end_ids import read_end_ids
from fleet.processing.tokenizer import load_tokenizer
from tests.web.checkpoint import write_frontend_files

FRONTENDS = ("fleet.processing.qwen3_omni:OmniFrontend", "fleet.processing.text:TextFrontend")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint folder in which no file names an end token."""
    write_frontend_files(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    for name in ("config.json", "tokenizer_config.json"):
        change(tmp_path, name, eos_token_id=None, im_end_token_id=None, eos_token=None)
    return tmp_path


def change(folder: Path, name: str, **changes: object) -> None:
    path = folder / name
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | changes))


def id_of(folder: Path, token: str) -> int:
    found = load_tokenizer(folder).token_to_id(token)
    assert found is not None
    return found


def test_end_token_that_only_the_tokenizer_names_ends_answers_too(folder: Path) -> None:
    change(folder, "config.json", eos_token_id=2)
    change(folder, "tokenizer_config.json", eos_token="<|im_end|>")
    assert read_end_ids(folder) == {2, id_of(folder, "<|im_end|>")}


def test_end_token_of_the_tokenizer_may_be_an_object_or_in_the_special_tokens_map(
    folder: Path,
) -> None:
    change(folder, "special_tokens_map.json", eos_token={"content": "<|im_end|>", "lstrip": False})
    assert read_end_ids(folder) == {id_of(folder, "<|im_end|>")}


def test_end_tokens_of_all_files_are_joined(folder: Path) -> None:
    change(folder, "generation_config.json", eos_token_id=[3, 4])
    change(folder, "config.json", eos_token_id=5)
    change(folder, "tokenizer_config.json", eos_token="<|endoftext|>")
    assert read_end_ids(folder) == {3, 4, 5, id_of(folder, "<|endoftext|>")}


def test_end_token_beyond_the_vocabulary_of_the_model_is_left_out(folder: Path) -> None:
    change(
        folder,
        "config.json",
        eos_token_id=[3, 1_000_000],
        thinker_config={"text_config": {"vocab_size": 700}},
    )
    assert read_end_ids(folder) == {3}


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_checkpoint_without_an_end_token_is_refused_with_the_remedy(
    folder: Path, frontend: str
) -> None:
    with pytest.raises(
        ConfigError,
        match=r"no file names the token that ends an answer.*add eos_token_id to generation_config",
    ):
        load_frontend(frontend, folder, Limits())


def test_given_answer_ends_with_the_tokenizer_s_end_token(folder: Path) -> None:
    change(folder, "generation_config.json", eos_token_id=[3])
    change(folder, "tokenizer_config.json", eos_token="<|im_end|>")
    frontend = load_frontend(FRONTENDS[0], folder, Limits())
    assert frontend.end_ids() == {3, id_of(folder, "<|im_end|>")}
