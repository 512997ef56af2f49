"""The tiny checkpoint suits tests: its speech is audible, it loads everywhere, and its answers
depend on every input.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.models.qwen3_omni.tiny import write_tiny_checkpoint
from fleet.processing.tokenizer import load_tokenizer
from tests.oracle.oracle import (
    SAMPLE_RATE_HZ,
    Oracle,
    OracleAnswer,
    from_pretrained,
    n_audio_tokens,
)

pytestmark = pytest.mark.one_file_in(6, "engines")

FRAME_SAMPLES = 1920
LOOKAHEAD_SAMPLES = 555
HELLO = "Hello, how are you?"
Answer = Callable[..., OracleAnswer]


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Path) -> Path:
    return tiny_checkpoint


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


@pytest.fixture(scope="module")
def config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.fixture(scope="module")
def prompt(folder: Path) -> Callable[..., list[int]]:
    """Function that returns the token ids of one user turn: audio of `num_samples`, if any, then
    text.
    """
    tokenizer = from_pretrained("AutoTokenizer", folder)

    def build(text: str, num_samples: int = 0) -> list[int]:
        parts = [{"type": "audio"}] * bool(num_samples) + [{"type": "text", "text": text}]
        turns = [{"role": "user", "content": parts}]
        ids = tokenizer.encode(
            tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        )
        pad = tokenizer.audio_token_id
        return [
            token
            for one in ids
            for token in [one] * (n_audio_tokens(num_samples) if one == pad else 1)
        ]

    return build


@pytest.fixture(scope="module")
def answer(oracle: Oracle, prompt: Callable[..., list[int]]) -> Answer:
    """Function that answers a prompt of text and audio by the oracle; equal questions are computed
    once.
    """
    known: dict[str, OracleAnswer] = {}

    def ask(
        text: str,
        sound: NDArray[np.float32] | None = None,
        num_tokens: int = 24,
        num_codes: int = 40,
        **more: Any,
    ) -> OracleAnswer:
        clips = [] if sound is None else [sound]
        key = repr(
            (text, [clip.tobytes() for clip in clips], num_tokens, num_codes, sorted(more.items()))
        )
        if key not in known:
            known[key] = oracle.answer(
                prompt(text, sum(map(len, clips))),
                clips,
                thinker_max_new_tokens=num_tokens,
                talker_max_new_tokens=num_codes,
                **more,
            )
        return known[key]

    return ask


@pytest.fixture(scope="module")
def long_codes(answer: Answer) -> NDArray[np.int64]:
    """Codes of 400 frames of greedy speech."""
    return answer(HELLO, num_codes=401).codes


def warble(pitch_hz: float) -> NDArray[np.float32]:
    """Return 1.3 s of a changing tone with little noise."""
    time_s = np.arange(int(1.3 * SAMPLE_RATE_HZ)) / SAMPLE_RATE_HZ
    noise = np.random.default_rng(0).standard_normal(time_s.size)
    return (0.3 * np.sin(2 * np.pi * pitch_hz * time_s * (1 + 0.2 * time_s)) + 0.02 * noise).astype(
        np.float32
    )


def rms(wave: NDArray[np.float32]) -> float:
    return float(np.sqrt(np.mean(np.square(wave))))


def test_equal_seeds_give_equal_bytes(folder: Path, tmp_path: Path) -> None:
    def digests(of: Path) -> dict[str, str]:
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in of.iterdir()}

    same = write_tiny_checkpoint(tmp_path / "same")
    other = write_tiny_checkpoint(tmp_path / "other", seed=1)
    assert digests(same) == digests(folder)
    changed = {name for name, digest in digests(other).items() if digest != digests(folder)[name]}
    assert changed == {shard.name for shard in folder.glob("*.safetensors")}


def test_answers_are_audible_and_not_clipped(answer: Answer) -> None:
    for text in (HELLO, "Why?", "Tell me a story about water."):
        spoken = answer(text)
        assert spoken.codes.shape == (16, 39)
        assert spoken.wave.shape == (39 * FRAME_SAMPLES - LOOKAHEAD_SAMPLES,)
        assert 0.02 < rms(spoken.wave) < 0.5
        assert abs(spoken.wave.mean()) < 0.01
        assert np.mean(np.abs(spoken.wave) >= 1) < 0.001


def test_answers_are_text_that_depends_on_the_prompt(answer: Answer, folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    answers = [answer(text).token_ids for text in (HELLO, "Why?", "Tell me a story about water.")]
    assert len({tuple(ids) for ids in answers}) == 3
    for ids in answers:
        assert len(ids) == 24
        assert len(set(ids)) > 12
        assert tokenizer.decode(ids).isprintable()


def test_answer_can_end_by_itself(answer: Answer, oracle: Oracle) -> None:
    ended = answer("yes", num_tokens=60, num_codes=4)
    assert ended.token_ids[-1] == oracle.eos_token_id
    assert 8 < len(ended.token_ids) < 60


def test_answer_of_one_token_has_no_audio(answer: Answer) -> None:
    silent = answer(HELLO, num_tokens=1)
    assert len(silent.token_ids) == 1
    assert silent.codes.shape == (16, 0)
    assert silent.wave.shape == (0,)


def test_audio_prompt_changes_answer_and_speech(answer: Answer) -> None:
    low, high = (answer("Say", warble(pitch_hz)) for pitch_hz in (150.0, 700.0))
    assert low.token_ids != high.token_ids
    assert np.mean(low.codes != high.codes) > 0.3


def test_speaker_changes_the_speech_and_not_the_answer(answer: Answer) -> None:
    ethan, chelsie = answer(HELLO), answer(HELLO, speaker="chelsie")
    assert ethan.token_ids == chelsie.token_ids
    assert np.mean(ethan.codes != chelsie.codes) > 0.3


def test_answer_text_changes_the_speech_from_where_it_changes(answer: Answer) -> None:
    whole, cut = answer(HELLO).codes, answer(HELLO, num_tokens=8).codes
    # Seven tokens are spoken of eight. The first is in the prefill, each later one enters with the
    # frame before it.
    assert (whole[:, :7] == cut[:, :7]).all()
    assert np.mean(whole[:, 8:] != cut[:, 8:]) > 0.3


def test_repetition_penalty_changes_the_speech(answer: Answer) -> None:
    assert (answer(HELLO).codes[0] != answer(HELLO, talker_repetition_penalty=1.0).codes[0]).any()


def test_every_codebook_varies_and_speech_does_not_loop(long_codes: NDArray[np.int64]) -> None:
    assert long_codes.shape == (16, 400)  # codec_eos does not come
    assert long_codes.min() >= 0
    assert long_codes.max() < 128
    assert min(len(set(codes)) for codes in long_codes.tolist()) > 20
    for period in range(1, 60):
        assert (long_codes[:, -120:] != long_codes[:, -120 - period : -period]).any()


def test_codebooks_are_not_interchangeable(oracle: Oracle, answer: Answer) -> None:
    spoken = answer(HELLO)
    for swapped in ([1, 0, *range(2, 16)], [*range(14), 15, 14]):
        wave = oracle.decode(spoken.codes[swapped])
        assert rms(wave - spoken.wave) > 0.3 * rms(spoken.wave)


def test_short_left_context_is_inexact(oracle: Oracle, long_codes: NDArray[np.int64]) -> None:
    whole = oracle.decode(long_codes)
    for left_context, is_wrong in ((25, True), (100, True), (294, False)):
        start = 320
        window = oracle.decode(long_codes[:, start - left_context : 380])[
            left_context * FRAME_SAMPLES :
        ]
        expected = whole[start * FRAME_SAMPLES :][: len(window)]
        error = rms(window - expected) / rms(expected)
        assert error > 0.1 if is_wrong else error < 1e-3


def test_greedy_choices_are_not_near_ties_and_speech_can_end(
    oracle: Oracle, config: dict[str, Any], prompt: Callable[..., list[int]]
) -> None:
    gaps: list[float] = []
    eos_ranks: list[int] = []
    eos = config["talker_config"]["codec_eos_token_id"]

    def note_gap(_module: Any, _inputs: Any, logits: Tensor) -> None:
        best, second = logits[0, -1].topk(2).values
        gaps.append(float(best - second))

    def note_eos(_module: Any, _inputs: Any, logits: Tensor) -> None:
        eos_ranks.append(int((logits[0, -1, :128] > logits[0, -1, eos]).sum()))

    talker = oracle.model.talker
    heads = (oracle.model.thinker.lm_head, *talker.code_predictor.lm_head)
    hooks = [head.register_forward_hook(note_gap) for head in heads]
    hooks.append(talker.codec_head.register_forward_hook(note_eos))
    oracle.answer(prompt("Why?"), thinker_max_new_tokens=60, talker_max_new_tokens=80)
    for hook in hooks:
        hook.remove()
    assert np.median(gaps) > 0.3
    assert np.mean(np.array(gaps) < 1e-3) < 0.01
    assert min(eos_ranks) > 0
    assert min(eos_ranks) < 50  # within the top 50 that sampling draws from


def test_config_has_the_keys_that_vllm_reads(config: dict[str, Any]) -> None:
    thinker = config["thinker_config"]
    text = thinker["text_config"]
    assert thinker["vision_config"]["image_size"] == 16 * thinker["vision_config"]["patch_size"]
    assert text["tie_word_embeddings"] is False
    assert text["rope_theta"] == 1000000.0
    assert text["rope_scaling"]["mrope_interleaved"] is True
    assert 2 * sum(text["rope_scaling"]["mrope_section"]) == text["head_dim"]


def test_config_keeps_the_real_relations(config: dict[str, Any], folder: Path) -> None:
    talker = config["talker_config"]
    assert talker["text_config"]["vocab_size"] >= 1024 + config["code2wav_config"]["codebook_size"]
    assert talker["accept_hidden_layer"] > len(
        config["thinker_config"]["vision_config"]["deepstack_visual_indexes"]
    )
    assert set(talker["speaker_id"]) == {"ethan", "chelsie"}
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["talker_temperature"], generation["talker_top_k"]) == (0.9, 50)
    assert generation["talker_repetition_penalty"] == 1.05


def test_chat_template_is_chatml_with_audio_in_the_turn(
    folder: Path, config: dict[str, Any]
) -> None:
    tokenizer = from_pretrained("AutoTokenizer", folder)
    turns: Sequence[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "Hello"}]},
    ]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n<|audio_start|><|audio_pad|><|audio_end|>Hello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = tokenizer.encode(text)
    starts = [place for place, token in enumerate(ids) if token == config["im_start_token_id"]]
    roles = ("system_token_id", "user_token_id", "assistant_token_id")
    assert [ids[start + 1] for start in starts] == [config[role] for role in roles]
    assert ids.count(config["thinker_config"]["audio_token_id"]) == 1
    assert tokenizer.decode(tokenizer.encode("naïve 你好 🎵\n")) == "naïve 你好 🎵\n"


@pytest.mark.parametrize("num_samples", [240, 15999, 16000, 16001, 20800, 32000, 48079])
def test_audio_positions_are_counted_as_the_encoder_makes_them(
    oracle: Oracle, num_samples: int
) -> None:
    made = oracle.audio_inputs([np.zeros(num_samples, np.float32)])
    with torch.no_grad():
        features = oracle.model.thinker.get_audio_features(**made).last_hidden_state
    assert features.shape[0] == n_audio_tokens(num_samples)


def test_clip_beside_a_longer_one_keeps_its_last_partial_hop(oracle: Oracle) -> None:
    made = oracle.audio_inputs([np.zeros(1281, np.float32), np.zeros(3207, np.float32)])
    assert [int(mask.sum()) for mask in made["feature_attention_mask"]] == [9, 20]
    assert n_audio_tokens(1281) == 1
    assert n_audio_tokens(1281, longest_samples=3207) == 2


def test_feature_extractor_loads_from_the_folder(folder: Path) -> None:
    extractor = from_pretrained("WhisperFeatureExtractor", folder)
    assert extractor.feature_size == 128
    assert extractor.n_samples == 300 * SAMPLE_RATE_HZ
