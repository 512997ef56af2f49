"""The tokenizer of a published folder (vocab.json and merges.txt, no tokenizer.json) compared with
`AutoTokenizer`.
"""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleet.core.errors import ConfigError
from fleet.processing.tokenizer import load_tokenizer
from tests.oracle.oracle import from_pretrained

SEED = 7
PIECES = (
    "hello",
    " World",
    "\n\n",
    "\r\n",
    " 123",
    "4567",
    "<|im_start|>",
    "user",
    "<|im_end|>\n",
    "<|audio_pad|>",
    "é",
    "e\u0301",
    "日本語",
    "  ",
    "\t",
    "'s",
    "I'LL",
    "🙂",
    "👩‍🚀",
    "<tool_call>",
    "</think>",
    "<tts_pad>",
    "...",
    "ﬁ",
    "\u200b",
    "Привет, ",
    "<|not_a_token|>",
    "ー",
    "\u00a0",
)


@pytest.fixture
def folder(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A folder with only the tokenizer files of the tiny checkpoint."""
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json", "config.json"):
        shutil.copy(tiny_checkpoint / name, tmp_path)
    return tmp_path


def change(folder: Path, **changes: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_published_tokenizer_equals_auto_tokenizer(tiny_checkpoint: Path) -> None:
    assert not (tiny_checkpoint / "tokenizer.json").exists()
    ours, theirs = (
        load_tokenizer(tiny_checkpoint),
        from_pretrained("AutoTokenizer", tiny_checkpoint),
    )
    draw = random.Random(SEED)
    texts = ["".join(draw.choices(PIECES, k=draw.randrange(20))) for _ in range(200)]
    for text in texts:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == theirs.encode(text, add_special_tokens=False), text
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                ids, skip_special_tokens=skip
            ), text
    special = {number: token.special for number, token in ours.get_added_tokens_decoder().items()}
    assert special == {
        number: token.special for number, token in theirs.added_tokens_decoder.items()
    }


def remove_merges(folder: Path) -> None:
    (folder / "merges.txt").unlink()


def damage_vocabulary(folder: Path) -> None:
    (folder / "vocab.json").write_text("{")


def other_class(folder: Path) -> None:
    change(folder, tokenizer_class="LlamaTokenizer")


def other_ids(folder: Path) -> None:
    change(folder, added_tokens_decoder={"900": {"content": "<|im_end|>", "special": True}})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (remove_merges, "has no tokenizer.json, and no merges.txt to make one from"),
        (damage_vocabulary, "its tokenizer cannot be read .*; fetch it again"),
        (other_class, "no tokenizer.json, which a LlamaTokenizer needs .*save_pretrained"),
        (
            other_ids,
            "'<|im_end|>' has the id 900 in tokenizer_config.json, but 512 follows from vocab.json",
        ),
    ],
)
def test_incomplete_tokenizer_files_are_refused_by_name(
    folder: Path, spoil: Callable[[Path], None], message: str
) -> None:
    spoil(folder)
    with pytest.raises(ConfigError, match=message.replace("|", r"\|")) as caught:
        load_tokenizer(folder)
    assert caught.value.param == "checkpoint" and str(folder) in caught.value.message
