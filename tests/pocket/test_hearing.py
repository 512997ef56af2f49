"""Training of the audio tower: voices, augmentation, forward passes equal to `transformers`, and
CTC loss.
"""

from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.core.errors import ConfigError
from fleet.lab.pocket import shape
from fleet.lab.pocket.corpus import encode
from fleet.lab.pocket.hearing import recordings
from fleet.lab.pocket.hearing.augment import add_noise, augment, coloured
from fleet.lab.pocket.hearing.features import log_mel
from fleet.lab.pocket.hearing.recordings import Recordings, load
from fleet.lab.pocket.hearing.voices import UNSEEN, known_voice, unseen_voice
from fleet.lab.pocket.train.joint import (
    SampleSource,
    audio_loss,
    spoken_turns,
    text_losses,
    transcription,
)
from fleet.lab.pocket.train.listening import (
    FIRST_ROW,
    Clips,
    ListeningThinker,
    answer,
    embed,
    prompt,
    sample,
    solve_projection,
    symbol_rows,
)
from fleet.lab.pocket.train.thinker import decoder_block, pack
from fleet.lab.pocket.train.tower import (
    BLANK,
    Hearing,
    compute_states,
    ctc_loss,
    positions,
    slot_scores,
    symbols,
)
from fleet.models.qwen3_omni.tiny_tokenizer import write_processor_files
from fleet.stages.qwen3_omni.thinker import feature_extractor

PAD, START, END = (shape.TOKEN_ID[f"<|audio_{name}|>"] for name in ("pad", "start", "end"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recordings")
    recordings.make_shard(folder, "train", 0, num_dialogues=13, num_sentences=3)
    return folder


@pytest.fixture(scope="module")
def known(folder: Path) -> Recordings:
    return load(folder, "train")


@pytest.fixture(scope="module")
def listener() -> ListeningThinker:
    return ListeningThinker(seed=1).eval()


def clip(num_samples: int, seed: int = 1) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(num_samples) * 0.1).astype(np.float32)


def test_training_voices_exclude_unseen_variants() -> None:
    variants = {"+" + known_voice(Random(seed)).name.partition("+")[2] for seed in range(2000)}
    assert len(variants) > 40 and not variants & set(UNSEEN)
    assert {"+" + unseen_voice(Random(seed)).name.partition("+")[2] for seed in range(500)} == set(
        UNSEEN
    )


def test_recordings_load_as_written(known: Recordings) -> None:
    assert len(known.dialogues) == 13 and len(known.sentences) == 3
    for dialogue in known.dialogues:
        assert [each.text for each in dialogue.recordings] == [
            turn.text for turn in dialogue.dialogue.turns if turn.role == "user"
        ]
    for each in known.all():
        # At most 30 letters a second, and not silent.
        assert len(each.samples) / recordings.SAMPLE_RATE_HZ > len(each.text) / 30
        assert each.samples.dtype == np.int16 and int(np.abs(each.samples.astype(int)).max()) > 1000


def test_folder_without_recordings_is_refused_with_the_command(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fleet pocket train recordings"):
        load(tmp_path, "train")


def test_augmentation_depends_on_seed_only(known: Recordings) -> None:
    clips = [each.samples for each in known.all()]
    augmented = [augment(clips[0], clips, np.random.default_rng(seed)) for seed in range(40)]
    assert all(
        each.dtype == np.float32 and np.isfinite(each).all() and np.abs(each).max() <= 1
        for each in augmented
    )
    assert len({each.tobytes() for each in augmented}) == 40
    assert np.array_equal(augmented[7], augment(clips[0], clips, np.random.default_rng(7)))


@pytest.mark.parametrize("kind", ["white", "pink", "brown"])
def test_noise_has_the_requested_level(kind: str) -> None:
    speech = clip(32_000)
    noise = coloured(kind, 32_000, np.random.default_rng(2))
    added = add_noise(speech, noise, 15) - speech
    # The level of brown noise varies much from one second to the next.
    ratio_db = 10 * np.log10(np.square(speech).mean() / np.square(added).mean())
    assert ratio_db == pytest.approx(15, abs=4 if kind == "brown" else 1)


def test_features_equal_those_of_the_server(tmp_path: Path) -> None:
    write_processor_files(tmp_path)
    clips = [clip(length, seed) for seed, length in enumerate((16_000, 7_777, 20_160, 33_333))]
    served = feature_extractor(tmp_path)(clips)
    computed = log_mel(clips)
    assert computed.num_frames.tolist() == served["feature_mask"].sum(1).tolist()
    assert np.allclose(
        computed.features.numpy(), served["features"] * served["feature_mask"][:, None], atol=1e-5
    )


@torch.no_grad()
def test_batched_tower_equals_transformers() -> None:
    """The batched audio tower equals `transformers`. The clips include one longer than the
    attention window, and some with a partial last chunk.
    """
    tower = Hearing(seed=1).eval().audio_tower
    batch = log_mel(
        [clip(length, seed) for seed, length in enumerate((16_000, 31_040, 1_600, 150_000))]
    )
    frames = batch.num_frames.tolist()
    packed = torch.cat(
        [each[:, :length] for each, length in zip(batch.features, frames, strict=True)], 1
    )
    expected = tower(packed, feature_lens=batch.num_frames).last_hidden_state
    rows = tower.proj2(compute_states(tower, batch))
    lengths = positions(batch.num_frames).tolist()
    found = torch.cat([each[:length] for each, length in zip(rows, lengths, strict=True)])
    assert torch.allclose(found, expected, atol=1e-4)


def test_slots_of_a_position_are_read_in_order() -> None:
    best = torch.full((1, 8), BLANK)
    best[0, :5] = torch.tensor([3, 3, BLANK, 3, 4])
    scores = torch.nn.functional.one_hot(best, BLANK + 1).float()
    assert symbols(scores, torch.tensor([4])) == [[3, 3, 4]]
    assert symbols(scores, torch.tensor([2])) == [[3, 3]]


def test_tower_learns_a_small_batch() -> None:
    hearing = Hearing(seed=1)
    batch = log_mel([clip(9_600, 1), clip(9_600, 2)])
    targets = [encode("hot"), encode("cold")]
    optimizer = torch.optim.AdamW(hearing.parameters(), lr=1e-3)
    losses: list[float] = []
    for _ in range(12):
        scores = slot_scores(hearing.slots, compute_states(hearing.audio_tower, batch))
        loss = ctc_loss(scores, positions(batch.num_frames), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


def test_spoken_turn_has_audio_rows_in_place_of_text(known: Recordings) -> None:
    dialogue = next(dialogue for dialogue in known.dialogues if len(dialogue.recordings) == 1)
    clips = Clips()
    turns = spoken_turns(dialogue, clips, [clip(17_600)])
    laid_out = sample(turns)
    num_rows = int(positions(torch.tensor(110)))
    question, text = dialogue.dialogue.turns[0].text, dialogue.dialogue.turns[1].text
    assert clips.texts == [question]
    assert laid_out.ids[3] == START and laid_out.ids[4 : 4 + num_rows] == list(
        range(FIRST_ROW, FIRST_ROW + num_rows)
    )
    assert laid_out.ids[4 + num_rows] == END
    answered = [
        symbol for symbol, weight in zip(laid_out.ids, laid_out.weights, strict=True) if weight
    ]
    assert answered == [*encode(text), shape.TOKEN_ID["<|im_end|>"]]
    asked = sample(transcription(dialogue.recordings[0], Clips(), clip(17_600), "transcribe")).ids
    assert asked[5 + num_rows : 5 + num_rows + 10] == encode("transcribe")


@torch.no_grad()
def test_spoken_dialogue_equals_whole_model(known: Recordings, listener: ListeningThinker) -> None:
    """A spoken dialogue gives the training model the same output as the served Thinker, with
    several clips, including the positions of the audio.
    """
    dialogue = max(known.dialogues, key=lambda dialogue: len(dialogue.recordings))
    clips, audio = (
        Clips(),
        [clip(16_000 + 4_800 * index, index) for index in range(len(dialogue.recordings))],
    )
    ids = prompt(spoken_turns(dialogue, clips, audio))
    batch = pack(iter([sample(spoken_turns(dialogue, clips, audio))]), num_rows=1, row_len=800)
    states = embed(listener, batch.ids, clips).states
    angles = batch.positions[:, None, :, None] * listener.model.rotary_emb.inv_freq
    for layer in listener.model.layers:
        states = decoder_block(layer, states, angles.cos(), angles.sin(), batch.mask)
    found = listener.lm_head(listener.model.norm(states))[0, : len(ids)]
    assert torch.allclose(found, _served(listener, ids, audio), atol=1e-3)


def _served(listener: ListeningThinker, ids: list[int], audio: list[NDArray[np.float32]]) -> Tensor:
    hf: Any = import_module("transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe")
    configs: Any = import_module("transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe")
    config = configs.Qwen3OmniMoeThinkerConfig(**shape.model_config()["thinker_config"])
    model = hf.Qwen3OmniMoeThinkerForConditionalGeneration(config).eval()
    model.model.language_model.load_state_dict(listener.model.state_dict())
    model.model.audio_tower.load_state_dict(listener.audio_tower.state_dict())
    model.lm_head.load_state_dict(listener.lm_head.state_dict())
    batch = log_mel(audio)
    mask = torch.arange(batch.features.shape[2]) < batch.num_frames[:, None]
    plain = torch.tensor([[PAD if index >= FIRST_ROW else index for index in ids]])
    result = model(
        input_ids=plain,
        attention_mask=torch.ones_like(plain),
        input_features=batch.features,
        feature_attention_mask=mask.long(),
    )
    return result.logits[0]


def test_joint_losses_reach_both_parts(known: Recordings, listener: ListeningThinker) -> None:
    clips = Clips()
    batch = pack(SampleSource(known).samples(np.random.default_rng(3), clips), num_rows=1)
    embedded = embed(listener, batch.ids, clips)
    text, _ = text_losses(listener, batch, embedded, decoder_block)
    text.backward(retain_graph=True)
    assert listener.audio_tower.conv2d1.weight.grad.abs().sum() > 0
    assert listener.model.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0
    assert listener.model.embed_tokens.weight.grad is None and listener.slots.weight.grad is None
    (text + audio_loss(embedded)).backward()
    assert listener.slots.weight.grad is not None
    listener.zero_grad()


def test_solved_projection_yields_rows_of_recognized_symbols(
    known: Recordings, listener: ListeningThinker
) -> None:
    table = shape.text_table()
    slots = torch.tensor([[BLANK, 5, 5, 6, BLANK, BLANK]])
    assert torch.allclose(
        symbol_rows(slots, table)[0], torch.stack([table[5], table[6], table[PAD]])
    )
    clips = [each.samples / 32768 for each in known.all()]
    solve_projection(listener, clips)
    states = compute_states(listener.audio_tower, log_mel(clips[:4])).detach()
    wanted = symbol_rows(slot_scores(listener.slots, states).argmax(-1), table)
    assert (
        listener.audio_tower.proj2(states) - wanted
    ).square().mean() < 0.9 * wanted.square().mean()


def test_batched_answers_equal_single_answers(
    known: Recordings, listener: ListeningThinker
) -> None:
    clips = Clips()
    prompts = [
        prompt(spoken_turns(dialogue, clips, [clip(16_000) for _ in dialogue.recordings]))
        for dialogue in known.dialogues[:3]
    ]
    together = answer(listener, prompts, clips, max_len=4)
    assert together == [answer(listener, [each], clips, max_len=4)[0] for each in prompts]
