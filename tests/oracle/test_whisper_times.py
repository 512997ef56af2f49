"""Times and figures of a transcript's tokens compared with `transformers` on a tiny random
checkpoint.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration
from transformers.models.whisper import generation_whisper, tokenization_whisper

from fleet.models.whisper.alignment import median_filter, token_begins, token_positions, warp
from fleet.models.whisper.features import RATE_HZ
from fleet.models.whisper.recognizer import WhisperRecognizer, load_recognizer
from fleet.models.whisper.tiny import write_tiny_whisper
from fleet.models.whisper.transcriber import SAMPLES_PER_POSITION
from fleet.models.whisper.word_times import MAX_SHIFT
from fleet.processing.tokenizer import load_tokenizer
from fleet.processing.whisper_words import words_of
from tests.oracle.test_whisper import NUM_TOKENS, job_of, noise, on_cpu, run_windows

pytestmark = pytest.mark.one_file_in(6, "engines")

NUM_PREFIX = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def model(folder: Path) -> WhisperRecognizer:
    return load_recognizer(folder, on_cpu())[0]


@pytest.mark.parametrize("seconds", [3, 11, 29])
def test_alignment_and_probabilities_equal_generate(
    folder: Path, model: WhisperRecognizer, seconds: int
) -> None:
    """`generate()` aligns each token's own row; a window's details combine those rows with the rows
    that predict the tokens, and noise, which has no pauses, moves no word far.
    """
    oracle = cast(Any, WhisperForConditionalGeneration.from_pretrained(folder))
    clip = noise(seconds, seed=seconds)
    asked = WhisperFeatureExtractor()(
        clip, sampling_rate=RATE_HZ, return_tensors="pt", return_attention_mask=True
    )
    answer = oracle.generate(
        asked.input_features,
        attention_mask=asked.attention_mask,
        language="en",
        task="transcribe",
        return_token_timestamps=True,
        return_dict_in_generate=True,
        output_scores=True,
        max_new_tokens=NUM_TOKENS,
    )
    (window,) = run_windows(model, [job_of(clip, 30, "en")])
    sequence: list[int] = answer["sequences"][0].tolist()
    assert sequence[NUM_PREFIX:] == window.sampled and len(window.sampled) > 5
    heads, decoder = model._heads, model._decoder  # pyright: ignore[reportPrivateUsage]
    with torch.inference_mode():
        _, weights_HNA = decoder.attention(window.cache, sequence[:-1], heads)
    weights_HNA = weights_HNA[:, :, : seconds * 50]
    positions = token_positions(weights_HNA[:, NUM_PREFIX:], 7)
    expected = answer["token_timestamps"][0][NUM_PREFIX:-1].numpy()
    np.testing.assert_allclose(positions * 0.02, expected, atol=1e-6)

    details = model.details(window, window.tokens)
    begins = token_begins(weights_HNA[:, NUM_PREFIX - 1 :], 7)
    assert len(details.begins) == len(details.ends) == len(window.tokens)
    assert (np.diff(details.begins) >= 0).all() and (np.diff(details.ends) >= 0).all()
    words = words_of(window.sampled[:-1], load_tokenizer(folder).decode, "en")
    firsts = [word.begin for word in words]
    far = np.abs(details.begins[firsts] - begins[firsts] * SAMPLES_PER_POSITION)
    assert len(firsts) > 3 and far.max() <= MAX_SHIFT + 1
    scores = torch.stack(answer["scores"])[:, 0].log_softmax(-1)
    wanted = scores[torch.arange(len(scores)), torch.tensor(window.sampled)]
    np.testing.assert_allclose(details.logprobs, wanted.numpy(), atol=1e-4)
    with torch.inference_mode():
        start = torch.tensor([sequence[:1]])
        first = oracle(input_features=asked.input_features, decoder_input_ids=start).logits[0, 0]
    no_speech = model._tokens.no_timestamps - 1  # pyright: ignore[reportPrivateUsage]
    assert details.no_speech == pytest.approx(float(first.softmax(-1)[no_speech]), rel=1e-3)


def test_details_of_a_cut_window_have_no_probability_for_its_end(model: WhisperRecognizer) -> None:
    (window,) = run_windows(model, [job_of(noise(5, 1), 8)])
    kept = [*window.tokens[:4], model.end_token]
    details = model.details(window, kept)
    assert np.isnan(details.logprobs).tolist() == [False] * 4 + [True]
    assert details.logprobs[0] == 0, "the language was detected before"


MATRICES = st.tuples(st.integers(1, 6), st.integers(1, 9), st.integers(0, 2**32 - 1))


@given(MATRICES, st.booleans())
@settings(deadline=None)
def test_cheapest_path_equals_the_source_also_with_ties(
    shape: tuple[int, int, int], coarse: bool
) -> None:
    num_tokens, num_positions, seed = shape
    rng = np.random.default_rng(seed)
    cost = rng.normal(size=(num_tokens, num_positions))
    cost = np.rint(cost) if coarse else cost
    source = cast(Any, generation_whisper)
    texts, times = source._dynamic_time_warping(cost)
    jumps = np.pad(np.diff(texts), (1, 0), constant_values=1).astype(bool)
    assert warp(cost).tolist() == times[jumps].tolist()


def test_median_filter_equals_the_source() -> None:
    values = torch.randn(3, 4, 40)
    source = cast(Any, generation_whisper)
    assert torch.equal(median_filter(values, 7), source._median_filter(values[None], 7)[0])
    assert torch.equal(median_filter(values[..., :3], 7), values[..., :3])


SPACED = ("Hello", " there", ",", ' "', "the", " sky", '"', " is", ".", " (", "7", ":", "30", ")")
OTHERS = (" caf", "é", "—", "!", " 東", "京", "?", " don", "'t", "$", " -", "x")


@given(st.lists(st.sampled_from(SPACED + OTHERS), max_size=14), st.sampled_from(["en", "ja"]))
@settings(deadline=None)
def test_words_equal_the_source(folder: Path, pieces: list[str], language: str) -> None:
    tokenizer = load_tokenizer(folder)
    tokens = [token for piece in pieces for token in tokenizer.encode(piece).ids]
    names = {"en": "english", "ja": "japanese"}
    stub = SimpleNamespace(
        decode=lambda ids, decode_with_timestamps: tokenizer.decode(ids), eos_token_id=10**6
    )
    source = cast(Any, tokenization_whisper)
    texts, _, indices = source._combine_tokens_into_words(stub, tokens, names[language])
    wanted = [
        (text, places[0], places[-1] + 1)
        for text, places in zip(texts, indices, strict=True)
        if text.strip()
    ]
    found = words_of(tokens, tokenizer.decode, language)
    assert [(run.text, run.begin, run.end) for run in found] == wanted
    assert all(run.begin < run.spoken_end <= run.end for run in found)
