"""The Thinker's training: what a batch holds, that the lean forward pass is the model's own, and that it learns."""

from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
import torch
from torch import Tensor

from fleet.pocket import shape
from fleet.pocket.corpus import ChatTurn, Dialogue, decode, dialogues, encode
from fleet.pocket.train import thinker as subject
from fleet.pocket.train.thinker import (
    Sample,
    ThinkerModel,
    answer,
    draw_samples,
    garbled,
    hidden_states,
    is_answered,
    losses,
    pack,
    prompt,
    sample,
    scores,
)

TALK = Dialogue(turns=(ChatTurn(role="user", text="hi"), ChatTurn(role="assistant", text="hello you")), family="greetings")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def thinker() -> ThinkerModel:
    return ThinkerModel(seed=1)


def samples(count: int, seed: int = 1) -> list[Sample]:
    return [sample(dialogue.turns) for dialogue in dialogues("train", count, seed)]


def test_dialogue_ids_equal_the_chat_template() -> None:
    names = {index: name for name, index in shape.TOKEN_ID.items()}
    made = sample(TALK.turns)
    text = [names.get(index, ".") for index in made.ids]
    opening = ["<|im_start|>", "<|user|>", "<|says|>"]
    assert text[:6] == [*opening, ".", ".", "<|im_end|>"]
    assert text[6:9] == ["<|im_start|>", "<|assistant|>", "<|says|>"] and text[-1] == "<|im_end|>"
    assert prompt(TALK) == list(made.ids[:9])


def test_loss_weighs_assistant_text_and_its_end() -> None:
    weights = sample(TALK.turns).weights
    assert [index for index, weight in enumerate(weights) if weight == 1.0] == list(range(9, 9 + len(encode("hello you")) + 1))
    assert max(weights[:9]) == subject.USER_WEIGHT and weights[:3] == weights[6:9] == [0.0, 0.0, 0.0]


def test_dialogues_in_a_row_do_not_attend_to_each_other() -> None:
    short = samples(3)
    batch = pack(iter(short), num_rows=1, row_len=400)
    owner = np.repeat(np.arange(4), [*(len(each.ids) for each in short), 400 - sum(len(each.ids) for each in short)])
    expected = (owner[:, None] == owner) & (np.arange(400)[:, None] >= np.arange(400))
    assert np.array_equal(batch.mask[0, 0].numpy(), expected)
    assert np.flatnonzero(batch.positions[0].numpy()[: sum(len(each.ids) for each in short)] == 0).size == 3


def test_repeated_word_has_all_its_sources() -> None:
    told = [
        ChatTurn(role="user", text="i am leo"),
        ChatTurn(role="assistant", text="hello leo"),
        ChatTurn(role="user", text="who am i"),
    ]
    made = sample([*told, ChatTurn(role="assistant", text="you are leo")])
    found = [(made.ids[source], source) for _, source in made.sources]
    assert all(made.ids[asking + 1] == made.ids[source] and asking > source for asking, source in made.sources)
    leo = encode("leo")
    assert [index for index, _ in found] == [*leo, *leo, *leo], "once in the greeting, twice in the answer"


def test_words_repeated_by_an_answer_are_not_garbled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "GARBLED", 1.0)
    clear = sample([ChatTurn(role="user", text="who is leo"), ChatTurn(role="assistant", text="leo is here")])
    made = garbled(clear, np.random.default_rng(0))
    assert made.ids[3:6] != clear.ids[3:6] and made.ids[6:] == clear.ids[6:]
    assert made.weights[3:6] == [0.0] * 3 and made.weights[6:] == clear.weights[6:]
    assert decode(made.ids[3:11]).endswith(" is leo")


@torch.no_grad()
def test_pointer_loss_uses_attention_of_the_first_head(thinker: ThinkerModel) -> None:
    only = sample([*TALK.turns, ChatTurn(role="user", text="say you"), ChatTurn(role="assistant", text="you")])
    alone = pack(iter([only]), num_rows=1, row_len=len(only.ids))
    seen = _attention_of(thinker, alone.ids)[0, 0]
    found = (seen * alone.sources[0]).sum(-1)[alone.sources[0].any(-1)]
    torch.testing.assert_close(losses(thinker, alone)[1], -(found + 1e-6).log().mean(), atol=1e-4, rtol=1e-4)


def _attention_of(thinker: ThinkerModel, ids: Tensor) -> Tensor:
    """Heads x from x to, of the layer that points, as the HF model computes it."""
    thinker.model.set_attn_implementation("eager")
    seen = thinker.model(input_ids=ids, use_cache=False, output_attentions=True).attentions[subject.POINTER_LAYER]
    thinker.model.set_attn_implementation("sdpa")
    return seen


def test_packed_rows_have_little_padding() -> None:
    batch = pack(draw_samples(np.random.default_rng(0)))
    is_pad = batch.ids == shape.TOKEN_ID["<|endoftext|>"]
    assert is_pad.float().mean() < 0.1 and not batch.weights[is_pad].any()


def test_step_draws_the_same_batch_again() -> None:
    first, again, other = (pack(draw_samples(np.random.default_rng(seed))).ids for seed in ((7, 3), (7, 3), (7, 4)))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_samples_fit_into_a_row() -> None:
    too_long = Sample(ids=[0] * 11, weights=[1.0] * 11)
    batch = pack(iter([too_long, Sample(ids=[1] * 10, weights=[1.0] * 10)]), num_rows=1, row_len=10)
    assert batch.ids.tolist() == [[1] * 10]


@torch.no_grad()
def test_packed_forward_equals_transformers(thinker: ThinkerModel) -> None:
    short = samples(4)
    batch = pack(iter(short), num_rows=1, row_len=500)
    lean = hidden_states(thinker, batch)[0]
    at = 0
    for each in short:
        theirs = thinker.model(input_ids=torch.tensor([each.ids]), use_cache=False).last_hidden_state[0]
        torch.testing.assert_close(lean[at : at + len(each.ids)], theirs, atol=1e-4, rtol=1e-4)
        at += len(each.ids)


def test_embedding_is_the_shared_frozen_table(thinker: ThinkerModel) -> None:
    assert torch.equal(thinker.model.embed_tokens.weight, shape.text_table())
    assert not thinker.model.embed_tokens.weight.requires_grad


def test_answer_is_independent_of_its_batch(thinker: ThinkerModel) -> None:
    prompts = [prompt(dialogue) for dialogue in islice(dialogues("held_out", 9, 1), 3)]
    assert answer(thinker, prompts, max_len=12) == [answer(thinker, [each], max_len=12)[0] for each in prompts]


def test_thinker_learns_one_dialogue() -> None:
    learner = ThinkerModel(seed=2)
    optimizer = torch.optim.AdamW([each for each in learner.parameters() if each.requires_grad], lr=2e-3)
    batch = pack(iter([sample(TALK.turns)]), num_rows=1, row_len=32)
    for _ in range(30):
        optimizer.zero_grad()
        text, pointer = losses(learner, batch)
        torch.add(text, pointer).backward()
        optimizer.step()
    said = answer(learner, [prompt(TALK)], max_len=20)
    assert said == ["hello you"]
    other = Dialogue(turns=(*TALK.turns[:-1], ChatTurn(role="assistant", text="hello me")), family="itself")
    assert is_answered(learner, [TALK, other]) == [True, False]
    expected = {"right": 0.5, "right_greetings": 1.0, "right_itself": 0.0}
    assert scores([TALK, other], said * 2) == expected


def test_answer_with_special_symbol_is_empty() -> None:
    until_end = subject._until_end  # pyright: ignore[reportPrivateUsage]
    end, start = shape.TOKEN_ID["<|im_end|>"], shape.TOKEN_ID["<|im_start|>"]
    assert until_end([*encode("one"), end, start]) == "one"
    assert until_end([*encode("one"), start, end]) == ""
