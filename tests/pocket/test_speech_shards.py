"""Speech shards on disk, with the real espeak-ng."""

from pathlib import Path

import numpy as np
import pytest

from fleet.core.errors import ConfigError
from fleet.lab.pocket.corpus import encode, sentences
from fleet.lab.pocket.shape import VOICES
from fleet.lab.pocket.speech.codes import Codebook, fit
from fleet.lab.pocket.speech.shards import (
    build,
    encode_missing,
    fit_codebook,
    load_spoken,
    load_utterances,
)

pytestmark = pytest.mark.one_file_in(3, "making of Pocket")

SIZE = 4


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speech")
    build(folder, "train", 2, size=SIZE)
    return folder


def book(folder: Path, seed: int) -> Codebook:
    features = np.concatenate([each.frames.features for each in load_spoken(folder, "train")])
    return fit(features, seed=seed, codebook_size=8)


def test_shard_sentences_are_in_order_with_alternating_voices(data: Path) -> None:
    spoken = load_spoken(data, "train")
    assert [each.text for each in spoken] == [
        text for seed in range(2) for text in sentences("train", SIZE, seed=seed)
    ]
    assert {each.voice for each in spoken[:2]} == set(VOICES)
    # The voice of the first sentence alternates between shards.
    assert spoken[0].voice != spoken[SIZE].voice
    assert len(load_spoken(data, "train", max_shards=1)) == SIZE


def test_shard_frames_match_their_text(data: Path) -> None:
    for each in load_spoken(data, "train"):
        frames = each.frames
        assert (
            len(frames.features)
            == len(frames.cycles)
            == len(frames.pitch_hz)
            == len(frames.pointer)
        )
        assert frames.pointer[0] == -1 and frames.pointer[-1] == len(encode(each.text)) - 1
        assert 0.5 < len(encode(each.text)) / len(frames.cycles) < 1.2


def test_missing_shard_is_rebuilt_identically(data: Path) -> None:
    first, second = sorted(data.glob("train-*.features.npz"))
    before, modified_ns = second.read_bytes(), first.stat().st_mtime_ns
    second.unlink()
    build(data, "train", 2, size=SIZE)
    assert second.read_bytes() == before
    assert first.stat().st_mtime_ns == modified_ns


def test_codes_are_recomputed_for_another_codebook_only(data: Path) -> None:
    first_book = book(data, seed=1)
    assert load_utterances(data, "train") == []
    assert [encode_missing(data, "train", first_book) for _ in range(2)] == [2, 0]
    for spoken, utterance in zip(
        load_spoken(data, "train"), load_utterances(data, "train"), strict=True
    ):
        assert (utterance.text, utterance.voice) == (spoken.text, spoken.voice)
        assert np.array_equal(
            utterance.codes, first_book.encode(spoken.frames.features, spoken.frames.cycles)
        )
        assert np.array_equal(utterance.pointer, spoken.frames.pointer)
    assert encode_missing(data, "train", book(data, seed=2)) == 2


def test_codebook_needs_enough_shards(data: Path) -> None:
    with pytest.raises(ConfigError, match="2 of 3 shards"):
        fit_codebook(data, 3)
