"""Encoding of texts: never truncated or padded, and in a bounded time."""

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordPiece

from fleet.core.errors import BadInput
from fleet.processing.tokenizer import MAX_WORD_CHARS, TOKENIZER, load_tokenizer, token_ids
from tests.support import REPO
from tests.web.checkpoint import write_frontend_files

POCKET = REPO / "fleet/checkpoints/pocket"
LETTERS = "ab '0129-\n\N{GRINNING FACE}\N{COMBINING ACUTE ACCENT}<|>"
LONG_TEXT = "hello world, " * 170


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_frontend_files(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("name", ["tiny", "pocket"])
def test_token_ids_equal_those_of_encode(tiny: Path, name: str) -> None:
    tokenizer = load_tokenizer({"tiny": tiny, "pocket": POCKET}[name])
    for _ in range(200):
        text = "".join(random.choices(LETTERS, k=random.randrange(60)))
        assert (
            token_ids(tokenizer, text, "m") == tokenizer.encode(text, add_special_tokens=False).ids
        )


def test_truncation_and_padding_in_the_file_do_not_change_a_text(
    tiny: Path, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(tiny)
    whole = token_ids(tokenizer, LONG_TEXT, "m")
    tokenizer.enable_truncation(max_length=48)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / TOKENIZER))
    assert len(Tokenizer.from_file(str(tmp_path / TOKENIZER)).encode(LONG_TEXT).ids) == 64, (
        "the file truncates and pads"
    )
    loaded = load_tokenizer(tmp_path)
    assert token_ids(loaded, LONG_TEXT, "m") == whole and len(whole) > 500
    assert token_ids(loaded, "hello", "m") == token_ids(load_tokenizer(tiny), "hello", "m")


def write_word_pieces(folder: Path, max_word_chars: int) -> None:
    vocabulary = {"[UNK]": 0, "a": 1, "##a": 2, "b": 3, "##b": 4}
    tokenizer = Tokenizer(
        WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=max_word_chars)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / TOKENIZER))


def test_word_of_a_word_piece_vocabulary_is_read_up_to_its_limit_and_refused_beyond(
    tmp_path: Path,
) -> None:
    write_word_pieces(tmp_path, max_word_chars=100_000)
    tokenizer = load_tokenizer(tmp_path)
    longest = "ab" * (MAX_WORD_CHARS // 2)
    assert token_ids(tokenizer, f"{longest} a", "m") == [
        1,
        *[4, 2] * (MAX_WORD_CHARS // 2 - 1),
        4,
        1,
    ]
    with pytest.raises(
        BadInput, match=f"^input: holds a word of more than {MAX_WORD_CHARS} characters; split it"
    ):
        token_ids(tokenizer, f"a {'ab' * 30_000}", "input")


def test_word_beyond_a_word_piece_vocabulary_s_own_limit_is_unknown_as_in_transformers(
    tmp_path: Path,
) -> None:
    write_word_pieces(tmp_path, max_word_chars=100)
    assert token_ids(load_tokenizer(tmp_path), "a " + "a" * 101, "m") == [1, 0]
