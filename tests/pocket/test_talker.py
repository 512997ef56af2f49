"""Training of the Talker: its input and forward pass equal `transformers`."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe

from fleet.core.errors import ConfigError
from fleet.lab.pocket.corpus import Split, encode, sentences
from fleet.lab.pocket.shape import (
    CODEC_IDS,
    CONTROL_IDS,
    HIDDEN,
    LEAD_FRAMES,
    NUM_CODE_GROUPS,
    TOKEN_ID,
    model_config,
    text_table,
)
from fleet.lab.pocket.speech.shards import CODES, Utterance
from fleet.lab.pocket.train import talker as talker_module
from fleet.lab.pocket.train.pointer import PointerTargets, pointer_accuracy
from fleet.lab.pocket.train.talker import TalkerPart, speak
from fleet.lab.pocket.train.talker_batch import (
    AUDIO_ROW,
    END,
    NOISE,
    Prefixes,
    Sampler,
    corrupt_codes,
    make_batch,
    text_side,
)
from fleet.lab.pocket.train.talker_forward import Lean, Tapped, new_talker

pytestmark = pytest.mark.one_file_in(3, "making of Pocket")

TEXT = "say hello to mary"
TABLE = text_table()


@pytest.fixture(scope="module")
def talker() -> Any:
    """An untrained Talker with larger weights, so that its output depends on its input."""
    talker = cast(Any, new_talker(3)).eval()
    with torch.no_grad():
        for name, parameter in talker.named_parameters():
            if "codec_embedding" in name or "linear_fc2" in name:
                parameter.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(len(name)))
        talker.hidden_projection.linear_fc2.weight.zero_()
    return talker


def utterance(text: str, voice: str = "ethan", seed: int = 0) -> Utterance:
    num_frames = len(encode(text)) + 3
    pointer = np.minimum(np.arange(num_frames) - 1, len(encode(text)) - 1)
    codes = np.random.default_rng(seed).integers(0, 30, (num_frames, NUM_CODE_GROUPS))
    return Utterance(
        text=text, voice=voice, codes=codes.astype(np.int16), pointer=pointer.astype(np.int16)
    )


def utterances(split: Split, count: int) -> list[Utterance]:
    texts = sentences(split, count, seed=1)
    return [
        utterance(text, ("chelsie", "ethan")[index % 2], index) for index, text in enumerate(texts)
    ]


def without_prefix(examples: Sequence[Utterance]) -> Any:
    return make_batch(examples, None, None)


@torch.no_grad()
def test_trunk_equals_transformers_whole_or_in_two_parts(talker: Any) -> None:
    rows = torch.randn(2, 11, HIDDEN, generator=torch.Generator().manual_seed(0))
    expected = talker.model(inputs_embeds=rows).last_hidden_state
    lean = Lean(talker)
    ahead = lean.trunk(rows[:, :4])
    torch.testing.assert_close(lean.trunk(rows).hidden_BLH, expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(
        lean.trunk(rows[:, 4:], ahead.past).hidden_BLH, expected[:, 4:], atol=2e-5, rtol=1e-4
    )


@torch.no_grad()
def test_code_predictor_equals_transformers(talker: Any) -> None:
    hidden = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(0))
    codes = torch.randint(
        0, 512, (3, NUM_CODE_GROUPS - 1), generator=torch.Generator().manual_seed(1)
    )
    tables = [talker.model.codec_embedding, *talker.code_predictor.model.codec_embedding]
    rows = torch.stack(
        [hidden, *(table(code) for table, code in zip(tables, codes.unbind(1), strict=False))], 1
    )
    logits = Lean(talker).residual_logits(hidden, codes)
    assert len(logits) == NUM_CODE_GROUPS - 1
    for step, computed in enumerate(logits):
        expected = talker.code_predictor(inputs_embeds=rows[:, : step + 2]).logits[:, -1]
        torch.testing.assert_close(computed, expected, atol=2e-5, rtol=1e-4)


def hf_opening(talker: Any, text: str, voice: str) -> tuple[Tensor, Tensor]:
    """Return the nine opening rows of the Talker's input and the text part of the following rows,
    computed by `transformers`.
    """
    config = cast(Any, modeling_qwen3_omni_moe).Qwen3OmniMoeConfig(**model_config())
    whole = cast(Any, modeling_qwen3_omni_moe).Qwen3OmniMoeForConditionalGeneration
    ids = [TOKEN_ID[name] for name in ("<|im_start|>", "<|assistant|>", "<|says|>")] + encode(text)
    pad, bos, end = (
        talker.text_projection(TABLE[TOKEN_ID[name]])[None, None]
        for name in ("<tts_pad>", "<tts_text_bos>", "<tts_text_eod>")
    )
    of = SimpleNamespace(config=config, talker=talker)
    speaker = CODEC_IDS.speakers()[voice]
    opening, _, trailing = whole._get_talker_assistant_parts(
        of, 0, len(ids), speaker, TABLE[ids][None], pad, bos, end
    )
    return opening, trailing


@torch.no_grad()
def test_spoken_codes_equal_transformers_generate(talker: Any) -> None:
    prefix = [
        TOKEN_ID["<|im_start|>"],
        TOKEN_ID["<|user|>"],
        *encode("hi"),
        AUDIO_ROW,
        AUDIO_ROW,
        TOKEN_ID["<|im_end|>"],
    ]
    audio = talker.hidden_projection(torch.randn(1, HIDDEN))
    before = torch.cat([talker.text_projection(TABLE), audio])[prefix][None]
    opening, trailing = hf_opening(talker, TEXT, "chelsie")
    vocabulary = talker.config.text_config.vocab_size
    result = talker.generate(
        inputs_embeds=torch.cat([before, opening], 1),
        trailing_text_hidden=trailing,
        tts_pad_embed=talker.text_projection(TABLE[TOKEN_ID["<tts_pad>"]])[None, None],
        talker_input_ids=torch.zeros(1, len(prefix) + 9, dtype=torch.long),
        attention_mask=torch.ones(1, len(prefix) + 9, dtype=torch.long),
        max_new_tokens=21,
        do_sample=False,
        suppress_tokens=[
            each for each in range(vocabulary - CONTROL_IDS, vocabulary) if each != CODEC_IDS.eos
        ],
        eos_token_id=CODEC_IDS.eos,
        output_hidden_states=True,
        return_dict_in_generate=True,
    )
    expected = torch.cat([step[-1] for step in result.hidden_states if step[-1] is not None])
    generated = speak(Lean(talker), TABLE, [TEXT, "no"], ["chelsie", "ethan"], prefix, 20)[0].codes
    assert len(np.unique(generated[:, 0])) > 5
    assert generated.tolist() == expected.tolist()


def test_text_side_ends_once_then_pads() -> None:
    ids = text_side(encode("hi"), 14)
    assert ids[8:] == [*encode("hi"), TOKEN_ID["<tts_text_eod>"], *[TOKEN_ID["<tts_pad>"]] * 3]


def test_batch_has_silent_lead_then_codes_then_end() -> None:
    short, long = utterance("no"), utterance(TEXT)
    batch = without_prefix([short, long])
    silence = [int(short.codes[0, 0])] * LEAD_FRAMES
    expected = [*silence, *short.codes[:, 0].tolist(), END]
    assert batch.first_BF[0, : len(expected)].tolist() == expected
    assert batch.is_frame_BT.sum(1).tolist() == [
        LEAD_FRAMES + len(each.codes) for each in (short, long)
    ]
    assert batch.text_BL.shape[1] == 8 + batch.first_BF.shape[1]


def test_corruption_is_rare_and_moves_cycles_by_one() -> None:
    codes = np.full((50, 40, NUM_CODE_GROUPS), 20)
    changes = corrupt_codes(codes, np.random.default_rng(0)) - codes
    assert NOISE * 0.8 < float((changes != 0).mean()) < NOISE * 1.2
    assert set(np.unique(changes[..., -1])) == {-1, 0, 1}
    assert np.abs(changes[..., :-1]).max() > 100


def pointed(keys: Sequence[int], spoken: PointerTargets, num_before: int) -> Tapped:
    """Return attention weights in which every head of a row attends to one key."""
    num_rows = spoken.first_row + spoken.symbol_BF.shape[1]
    scores = torch.full((1, 2, num_rows, num_before + num_rows), -100.0)
    for row, key in enumerate(keys):
        scores[:, :, spoken.first_row + row, key] = 0.0
    return Tapped(into_BLH=torch.zeros(0), out_BLH=torch.zeros(0), scores_BhLK=scores)


def test_pointer_accuracy_counts_the_spoken_symbol() -> None:
    spoken = without_prefix([utterance("hello")]).spoken
    symbols = spoken.fed(0)[0]
    assert symbols.tolist() == [*[0] * (LEAD_FRAMES + 1), 0, 1, 2, 3, 4, 5, 5, 5]
    right = [5 + spoken.first_row + symbol for symbol in symbols.tolist()]
    assert pointer_accuracy(pointed(right, spoken, 5), spoken, 0) == 1.0
    assert pointer_accuracy(pointed([key + 2 for key in right], spoken, 5), spoken, 0) == 0.0


def test_pointer_target_is_never_ahead_of_the_input() -> None:
    spoken = without_prefix([utterance(TEXT)]).spoken
    fed = spoken.fed(3)[0]
    assert fed[:3].tolist() == [0, 1, 2]
    assert int(fed[-1]) == len(encode(TEXT))


def test_prefixes_of_a_batch_have_one_length() -> None:
    prefixes = Prefixes(0)
    drawn = [prefixes.draw(np.random.default_rng(seed), 4) for seed in range(20)]
    assert len({each.shape[1] for each in drawn}) > 10
    assert any((each == AUDIO_ROW).any() for each in drawn)
    assert all((each[:, -1] == TOKEN_ID["<|im_end|>"]).all() for each in drawn)


def test_rare_words_are_sampled_more_often() -> None:
    common, rare = utterance("hello"), utterance("mary")
    sampler = Sampler([*[common] * 400, *[rare] * 20])
    drawn = [
        each for seed in range(100) for each in sampler.draw(np.random.default_rng(seed), 8, bins=2)
    ]
    assert 1.6 < sum(each.text == "mary" for each in drawn) / (800 * 20 / 420) < 2.4


@pytest.fixture
def part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TalkerPart:
    monkeypatch.setattr(talker_module, "BATCH", 4)
    monkeypatch.setattr(talker_module, "NUM_PREFIXES", 2)
    monkeypatch.setattr(
        talker_module, "load_utterances", lambda _folder, split: utterances(split, 6)
    )
    return TalkerPart(tmp_path, steps=10)


def test_every_trainable_weight_receives_a_gradient(part: TalkerPart) -> None:
    losses = [part.loss(np.random.default_rng(step), step)[0] for step in (0, 9)]
    torch.stack(losses).sum().backward()
    without_gradient = {
        name
        for name, parameter in part.module.named_parameters()
        if parameter.requires_grad and (parameter.grad is None or not parameter.grad.any())
    }
    assert without_gradient == set()
    untrained = {
        name for name, parameter in part.module.named_parameters() if not parameter.requires_grad
    }
    assert untrained >= {
        "talker.hidden_projection.linear_fc1.weight",
        "talker.model.layers.0.mlp.gate.weight",
    }


def test_talker_step_is_deterministic(part: TalkerPart) -> None:
    first, again = (float(part.loss(np.random.default_rng(5), 5)[0].detach()) for _ in range(2))
    assert first == again


@torch.no_grad()
def test_audio_rows_are_identical_for_the_talker(talker: Any) -> None:
    rows = talker.hidden_projection(
        torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(0))
    )
    torch.testing.assert_close(rows, Lean(talker).text_embeddings(TABLE)[AUDIO_ROW].expand(3, -1))


def test_training_uses_shards_coded_later(
    part: TalkerPart, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Split] = []

    def load(_folder: Path, split: Split) -> list[Utterance]:
        loaded.append(split)
        return utterances(split, 6)

    monkeypatch.setattr(talker_module, "load_utterances", load)
    for step in (0, 1, 100):
        part.loss(np.random.default_rng(0), step)
    assert loaded == ["train", "held_out"]
    (tmp_path / f"train-0001.{CODES}").touch()
    part.loss(np.random.default_rng(0), 200)
    assert loaded == ["train", "held_out"] * 2


def test_missing_training_data_is_refused(
    part: TalkerPart, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(talker_module, "load_utterances", lambda _folder, _split: [])
    with pytest.raises(ConfigError, match="no coded speech"):
        part.loss(np.random.default_rng(0), 0)


def test_evaluation_reports_accuracy_and_ends(part: TalkerPart) -> None:
    part.loss(np.random.default_rng(0), 0)
    part.module.eval()
    with torch.no_grad():
        figures = part.evaluate()
    assert 5 < figures["code0_ce"] < 8
    assert {"code0_ce_prefixed", "pointer_accuracy", "ended", "length_ratio"} <= set(figures)
