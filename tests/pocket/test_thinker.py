"""Training of the Thinker: batches, a forward pass equal to `transformers`, and learning."""

from itertools import islice

import numpy as np
import pytest
import torch
from torch import Tensor

from fleet.lab.pocket import shape
from fleet.lab.pocket.corpus import ChatTurn, Dialogue, decode, dialogues, encode
from fleet.lab.pocket.train import thinker as subject
from fleet.lab.pocket.train.thinker import (
    Sample,
    ThinkerModel,
    answer,
    decoder_block,
    draw_samples,
    garbled,
    is_answered,
    losses,
    pack,
    prompt,
    run_layers,
    sample,
    scores,
)

DIALOGUE = Dialogue(
    turns=(ChatTurn(role="user", text="hi"), ChatTurn(role="assistant", text="hello you")),
    family="greetings",
)


@pytest.fixture(scope="module")
def thinker() -> ThinkerModel:
    return ThinkerModel(seed=1)


def samples(count: int, seed: int = 1) -> list[Sample]:
    return [sample(dialogue.turns) for dialogue in dialogues("train", count, seed)]


def test_dialogue_ids_equal_the_chat_template() -> None:
    names = {index: name for name, index in shape.TOKEN_ID.items()}
    sampled = sample(DIALOGUE.turns)
    text = [names.get(index, ".") for index in sampled.ids]
    opening = ["<|im_start|>", "<|user|>", "<|says|>"]
    assert text[:6] == [*opening, ".", ".", "<|im_end|>"]
    assert text[6:9] == ["<|im_start|>", "<|assistant|>", "<|says|>"] and text[-1] == "<|im_end|>"
    assert prompt(DIALOGUE) == list(sampled.ids[:9])


def test_loss_weighs_assistant_text_and_its_end() -> None:
    weights = sample(DIALOGUE.turns).weights
    assert [index for index, weight in enumerate(weights) if weight == 1.0] == list(
        range(9, 9 + len(encode("hello you")) + 1)
    )
    assert max(weights[:9]) == subject.USER_WEIGHT and weights[:3] == weights[6:9] == [
        0.0,
        0.0,
        0.0,
    ]


def test_dialogues_in_a_row_do_not_attend_to_each_other() -> None:
    short = samples(3)
    batch = pack(iter(short), num_rows=1, row_len=400)
    owner = np.repeat(
        np.arange(4),
        [*(len(each.ids) for each in short), 400 - sum(len(each.ids) for each in short)],
    )
    expected = (owner[:, None] == owner) & (np.arange(400)[:, None] >= np.arange(400))
    assert np.array_equal(batch.mask[0, 0].numpy(), expected)
    assert (
        np.flatnonzero(batch.positions[0].numpy()[: sum(len(each.ids) for each in short)] == 0).size
        == 3
    )


def test_repeated_word_has_all_its_sources() -> None:
    earlier = [
        ChatTurn(role="user", text="i am leo"),
        ChatTurn(role="assistant", text="hello leo"),
        ChatTurn(role="user", text="who am i"),
    ]
    sampled = sample([*earlier, ChatTurn(role="assistant", text="you are leo")])
    found = [(sampled.ids[source], source) for _, source in sampled.sources]
    assert all(
        sampled.ids[position + 1] == sampled.ids[source] and position > source
        for position, source in sampled.sources
    )
    leo = encode("leo")
    assert [index for index, _ in found] == [*leo, *leo, *leo], (
        "once in the greeting, twice in the answer"
    )


def test_words_repeated_by_an_answer_are_not_garbled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "GARBLED", 1.0)
    clear = sample(
        [ChatTurn(role="user", text="who is leo"), ChatTurn(role="assistant", text="leo is here")]
    )
    sampled = garbled(clear, np.random.default_rng(0))
    assert sampled.ids[3:6] != clear.ids[3:6] and sampled.ids[6:] == clear.ids[6:]
    assert sampled.weights[3:6] == [0.0] * 3 and sampled.weights[6:] == clear.weights[6:]
    assert decode(sampled.ids[3:11]).endswith(" is leo")


@torch.no_grad()
def test_pointer_loss_uses_attention_of_the_first_head(thinker: ThinkerModel) -> None:
    only = sample(
        [
            *DIALOGUE.turns,
            ChatTurn(role="user", text="say you"),
            ChatTurn(role="assistant", text="you"),
        ]
    )
    alone = pack(iter([only]), num_rows=1, row_len=len(only.ids))
    seen = _attention_of(thinker, alone.ids)[0, 0]
    found = (seen * alone.sources[0]).sum(-1)[alone.sources[0].any(-1)]
    torch.testing.assert_close(
        losses(thinker, alone)[1], -(found + 1e-6).log().mean(), atol=1e-4, rtol=1e-4
    )


def _attention_of(thinker: ThinkerModel, ids: Tensor) -> Tensor:
    """Return the attention weights of layer `POINTER_LAYER`, computed by the `transformers` model.
    Shapes: heads x queries x keys.
    """
    thinker.model.set_attn_implementation("eager")
    seen = thinker.model(input_ids=ids, use_cache=False, output_attentions=True).attentions[
        subject.POINTER_LAYER
    ]
    thinker.model.set_attn_implementation("sdpa")
    return seen


def test_packed_rows_have_little_padding() -> None:
    batch = pack(draw_samples(np.random.default_rng(0)))
    is_pad = batch.ids == shape.TOKEN_ID["<|endoftext|>"]
    assert is_pad.float().mean() < 0.1 and not batch.weights[is_pad].any()


def test_batch_depends_on_seed_and_step_only() -> None:
    first, again, other = (
        pack(draw_samples(np.random.default_rng(seed))).ids for seed in ((7, 3), (7, 3), (7, 4))
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_sample_longer_than_a_row_is_left_out() -> None:
    too_long = Sample(ids=[0] * 11, weights=[1.0] * 11)
    batch = pack(iter([too_long, Sample(ids=[1] * 10, weights=[1.0] * 10)]), num_rows=1, row_len=10)
    assert batch.ids.tolist() == [[1] * 10]


@torch.no_grad()
def test_packed_forward_equals_transformers(thinker: ThinkerModel) -> None:
    short = samples(4)
    batch = pack(iter(short), num_rows=1, row_len=500)
    lean = run_layers(thinker, thinker.model.embed_tokens(batch.ids), batch, decoder_block)[0][0]
    at = 0
    for each in short:
        expected = thinker.model(
            input_ids=torch.tensor([each.ids]), use_cache=False
        ).last_hidden_state[0]
        torch.testing.assert_close(lean[at : at + len(each.ids)], expected, atol=1e-4, rtol=1e-4)
        at += len(each.ids)


def test_embedding_is_the_shared_frozen_table(thinker: ThinkerModel) -> None:
    assert torch.equal(thinker.model.embed_tokens.weight, shape.text_table())
    assert not thinker.model.embed_tokens.weight.requires_grad


def test_answer_is_independent_of_its_batch(thinker: ThinkerModel) -> None:
    prompts = [prompt(dialogue) for dialogue in islice(dialogues("held_out", 9, 1), 3)]
    assert answer(thinker, prompts, max_len=12) == [
        answer(thinker, [each], max_len=12)[0] for each in prompts
    ]


def test_thinker_learns_one_dialogue() -> None:
    learner = ThinkerModel(seed=2)
    optimizer = torch.optim.AdamW(
        [each for each in learner.parameters() if each.requires_grad], lr=2e-3
    )
    batch = pack(iter([sample(DIALOGUE.turns)]), num_rows=1, row_len=32)
    for _ in range(30):
        optimizer.zero_grad()
        text, pointer = losses(learner, batch)
        torch.add(text, pointer).backward()
        optimizer.step()
    answers = answer(learner, [prompt(DIALOGUE)], max_len=20)
    assert answers == ["hello you"]
    other = Dialogue(
        turns=(*DIALOGUE.turns[:-1], ChatTurn(role="assistant", text="hello me")), family="itself"
    )
    assert is_answered(learner, [DIALOGUE, other]) == [True, False]
    expected = {"right": 0.5, "right_greetings": 1.0, "right_itself": 0.0}
    assert scores([DIALOGUE, other], answers * 2) == expected


def test_answer_with_special_symbol_is_empty() -> None:
    until_end = subject._until_end  # pyright: ignore[reportPrivateUsage]
    end, start = shape.TOKEN_ID["<|im_end|>"], shape.TOKEN_ID["<|im_start|>"]
    assert until_end([*encode("one"), end, start]) == "one"
    assert until_end([*encode("one"), start, end]) == ""
