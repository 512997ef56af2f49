"""Training of the Thinker to answer typed dialogues, which are generated for each step, so that no
batch is repeated.

Several dialogues are packed into a row, without attention to each other and with positions from 0,
so there is little padding. The forward pass is the model's own without its masks and caches. Spoken
dialogues are in `joint` and `listening`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from string import ascii_lowercase
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as hf
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeTextConfig

from fleet.lab.pocket import shape
from fleet.lab.pocket.corpus import SYMBOLS, ChatTurn, Dialogue, decode, dialogues, encode, is_right
from fleet.lab.pocket.train.loop import Loss, Schedule, compiled, initialise

SCHEDULE = Schedule(steps=4500, weight_decay=0.1, evaluate_every=250)
NUM_ROWS, ROW_LEN = 7, 288
USER_WEIGHT = 0.1
"""Weight of the loss on the user's turns, which teaches spelling early."""
FAMILY_SHARE: Mapping[str, float] = {
    "sums": 1.0,
    "memory": 1.0,
    "times": 0.6,
    "counting": 0.5,
    "spelling": 0.45,
    "repeat": 0.4,
    "unknown": 0.35,
    "greetings": 0.2,
    "calendar": 0.2,
    "opposites": 0.2,
    "itself": 0.2,
    "facts": 0.2,
    "colours": 0.2,
}
"""Share of a family's dialogues that is used: rules need many examples, memorized facts a few."""
MAX_MISSES = 8
"""Samples that fit into no row before packing stops; few, so that short dialogues are not
overrepresented.
"""
POINTER_LAYER, POINTER_WEIGHT = 3, 0.2
"""Index of the layer whose first head learns to point, and weight of the pointer loss."""
NUM_HELD_OUT = 390
MAX_ANSWER_LEN = 96
GARBLED = 0.06
"""Share of the user's words that are replaced by random letters, among the words that no answer
repeats: helps with new phrasings.
"""

_START, _END = shape.TOKEN_ID["<|im_start|>"], shape.TOKEN_ID["<|im_end|>"]
_SAYS, _PAD = shape.TOKEN_ID["<|says|>"], shape.TOKEN_ID["<|endoftext|>"]

Item = TypeVar("Item")
Result = TypeVar("Result")
Words = Sequence[tuple[str, int]]
"""Words of a turn, each with its first position."""
Block = Callable[[Any, Tensor, Tensor, Tensor, Tensor], Tensor]


class ThinkerModel(nn.Module):
    """Module of the text model and its output head, with weights named as in the Thinker of
    `transformers`: `model.*` and `lm_head.weight`.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        text = shape.model_config()["thinker_config"]["text_config"]
        self.model: Any = hf.Qwen3OmniMoeThinkerTextModel(Qwen3OmniMoeTextConfig(**text))
        self.lm_head = nn.Linear(shape.HIDDEN, shape.VOCAB_SIZE, bias=False)
        initialise(
            self,
            torch.Generator().manual_seed(seed),
            len(self.model.layers),
            ("o_proj.weight", "down_proj.weight"),
        )
        self.model.embed_tokens.weight.data.copy_(shape.text_table())
        self.model.embed_tokens.weight.requires_grad_(False)


def run_layers(
    thinker: ThinkerModel, states: Tensor, batch: "PackedBatch", block: Block
) -> tuple[Tensor, Tensor]:
    """Compute the input of the output head, as the HF model does, from the input of the first
    layer.

    Also return the input of layer `POINTER_LAYER`. Shapes: rows x row length x hidden.
    """
    text: Any = thinker.model
    cos, sin = _angles(thinker, batch)
    pointing = states
    for index, layer in enumerate(text.layers):
        pointing = states if index == POINTER_LAYER else pointing
        states = block(layer, states, cos, sin, batch.mask)
    return text.norm(states), pointing


def _angles(thinker: ThinkerModel, batch: "PackedBatch") -> tuple[Tensor, Tensor]:
    text: Any = thinker.model
    angles = batch.positions[:, None, :, None] * text.rotary_emb.inv_freq
    return angles.cos(), angles.sin()


def decoder_block(layer: Any, states: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
    attention = layer.self_attn
    normed = _norm(states, layer.input_layernorm)
    heads = (*states.shape[:2], -1, shape.HEAD_DIM)
    query = _rotate(
        _norm(attention.q_proj(normed).view(heads), attention.q_norm).transpose(1, 2), cos, sin
    )
    key = _rotate(
        _norm(attention.k_proj(normed).view(heads), attention.k_norm).transpose(1, 2), cos, sin
    )
    value = attention.v_proj(normed).view(heads).transpose(1, 2)
    seen = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    states = states + attention.o_proj(seen.transpose(1, 2).reshape(states.shape))
    normed = _norm(states, layer.post_attention_layernorm)
    return states + layer.mlp.down_proj(
        functional.silu(layer.mlp.gate_proj(normed)) * layer.mlp.up_proj(normed)
    )


def _norm(states: Tensor, norm: Any) -> Tensor:
    return (
        states
        * torch.rsqrt(states.square().mean(-1, keepdim=True) + norm.variance_epsilon)
        * norm.weight
    )


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding where all three position axes are equal, as for text and audio."""
    first, second = states.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """A training batch: rows of packed dialogues.

    Shapes: rows x row length; `mask` rows x 1 x row length x row length, true where a position
    attends; `sources` rows x row length x row length.
    Invariants: `weights[r, i]` is the loss's weight on `ids[r, i]` as predicted from position i -
    1; `sources[r, i, j]` is true where the symbol predicted from position i repeats the one at j.
    """

    ids: Tensor
    positions: Tensor
    weights: Tensor
    mask: Tensor
    sources: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A dialogue as ids, with the loss weight of each id, the (position, source) pairs of
    `PackedBatch.sources`, and the bounds of the user's words.
    """

    ids: Sequence[int]
    weights: Sequence[float]
    sources: Sequence[tuple[int, int]] = ()
    user_words: Sequence[tuple[int, int]] = ()


def turn_ids(turn: ChatTurn) -> list[int]:
    return [*opening(turn.role), *encode(turn.text), _END]


def opening(role: str) -> list[int]:
    """Return the ids before the text of a turn, or before an answer."""
    return [_START, shape.TOKEN_ID[f"<|{role}|>"], _SAYS]


def sample(turns: Iterable[ChatTurn]) -> Sample:
    ids: list[int] = []
    weights: list[float] = []
    sources: list[tuple[int, int]] = []
    user_words: list[tuple[int, int]] = []
    before: list[Words] = []
    for turn in turns:
        begins = list(_word_begins(turn.text, len(ids) + len(opening(turn.role))))
        if turn.role == "assistant":
            sources += _sources(begins, before)
        else:
            user_words += [(begin, begin + len(word)) for word, begin in begins]
        before.append(begins)
        ids += turn_ids(turn)
        num_scored = len(ids) - len(weights) - len(opening(turn.role))
        weights += [0.0] * len(opening(turn.role)) + [
            1.0 if turn.role == "assistant" else USER_WEIGHT
        ] * num_scored
    return Sample(ids=ids, weights=weights, sources=sources, user_words=user_words)


def garbled(clear: Sample, rng: np.random.Generator) -> Sample:
    """Return a copy of the sample with a few of the user's words replaced by random letters."""
    is_source = {source for _, source in clear.sources}
    ids, weights = list(clear.ids), list(clear.weights)
    for begin, end in clear.user_words:
        if is_source.isdisjoint(range(begin, end)) and rng.random() < GARBLED:
            nonsense = "".join(rng.choice(list(ascii_lowercase), end - begin))
            ids[begin:end], weights[begin:end] = encode(nonsense), [0.0] * (end - begin)
    return replace(clear, ids=ids, weights=weights)


def _word_begins(text: str, begin: int) -> Iterator[tuple[str, int]]:
    for word in text.split():
        yield word, begin
        begin += len(word)


def _sources(begins: Words, turns: Iterable[Words]) -> Iterator[tuple[int, int]]:
    """Yield (position, source) for each symbol of a repeated word; a symbol is predicted from the
    position before it.

    Of a word's earlier places, only those in the longest run of equal words count, so that a
    quotation has one source.
    """
    for index, (word, begin) in enumerate(begins):
        places = [
            (_count_equal_words(begins, index, turn, at), before)
            for turn in turns
            for at, (earlier, before) in enumerate(turn)
            if earlier == word
        ]
        longest = max((run for run, _ in places), default=0)
        for before in (before for run, before in places if run == longest):
            yield from ((begin + offset - 1, before + offset) for offset in range(len(word)))


def _count_equal_words(left: Words, left_at: int, right: Words, right_at: int) -> int:
    """Return the number of successive equal words around two positions in two word lists."""
    ahead = zip(left[left_at:], right[right_at:], strict=False)
    back = zip(left[:left_at][::-1], right[:right_at][::-1], strict=False)
    return sum(
        sum(1 for _ in takewhile(lambda pair: pair[0][0] == pair[1][0], way))
        for way in (ahead, back)
    )


def pack(
    samples: Iterator[Sample], num_rows: int = NUM_ROWS, row_len: int = ROW_LEN
) -> PackedBatch:
    """Fill the rows of a batch with samples until `MAX_MISSES` samples fitted into no row."""
    rows: list[list[Sample]] = [[] for _ in range(num_rows)]
    free = [row_len] * num_rows
    misses = 0
    for each in samples:
        fitting = [index for index in range(num_rows) if free[index] >= len(each.ids)]
        if not fitting:
            misses += 1
            if misses == MAX_MISSES:
                break
            continue
        # The fullest row with enough room, which leaves room for long samples.
        row = min(fitting, key=free.__getitem__)
        rows[row].append(each)
        free[row] -= len(each.ids)
    return _batch(rows, row_len)


def _batch(rows: Sequence[Sequence[Sample]], row_len: int) -> PackedBatch:
    ids, positions = np.full((len(rows), row_len), _PAD), np.zeros((len(rows), row_len), np.int64)
    weights = np.zeros((len(rows), row_len), np.float32)
    # Padding counts as one dialogue, so that no row of the mask is empty.
    owner = np.full((len(rows), row_len), -1)
    sources = np.zeros((len(rows), row_len, row_len), np.bool_)
    for row, members in enumerate(rows):
        at = 0
        for number, each in enumerate(members):
            span = slice(at, at := at + len(each.ids))
            ids[row, span], positions[row, span] = each.ids, np.arange(len(each.ids))
            weights[row, span], owner[row, span] = each.weights, number
            for position, source in each.sources:
                sources[row, span.start + position, span.start + source] = True
    mask = (owner[:, :, None] == owner[:, None, :]) & np.tri(row_len, dtype=np.bool_)
    return PackedBatch(
        ids=torch.as_tensor(ids),
        positions=torch.as_tensor(positions),
        weights=torch.as_tensor(weights),
        mask=torch.as_tensor(mask)[:, None],
        sources=torch.as_tensor(sources),
    )


def draw_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Yield random training dialogues endlessly, some with invented words."""
    seed = int(rng.integers(2**62))
    for dialogue in dialogues("invented", 2**62, seed):
        if rng.random() < FAMILY_SHARE[dialogue.family]:
            yield garbled(sample(dialogue.turns), rng)


class ThinkerPart:
    """Trainable part: the Thinker."""

    name = "thinker"

    def __init__(self, seed: int) -> None:
        self.module = ThinkerModel(seed)
        self._held_out = list(dialogues("held_out", NUM_HELD_OUT, seed))
        self._known = list(dialogues("train", NUM_HELD_OUT // 2, seed))
        self._block = compiled(decoder_block)

    def loss(self, rng: np.random.Generator, step: int) -> Loss:
        """Return the weighted sum of text and pointer loss. The statistic `fill` is the share of
        positions that are not padding.
        """
        batch = pack(draw_samples(rng))
        text, pointer = losses(self.module, batch, self._block)
        fill = (batch.ids != _PAD).float().mean()
        stats = {"text": text, "pointer": pointer, "fill": fill}
        return text + POINTER_WEIGHT * pointer, stats

    def evaluate(self) -> Mapping[str, float]:
        """Return the shares of right answers, overall and by family: `right` on held-out dialogues,
        `known` on training ones.
        """
        held_out, known = (
            is_answered(self.module, questions) for questions in (self._held_out, self._known)
        )
        return shares("right", self._held_out, held_out) | shares("known", self._known, known)


def losses(
    thinker: ThinkerModel, batch: PackedBatch, block: Block = decoder_block
) -> tuple[Tensor, Tensor]:
    """Return the loss of the next symbol and the pointer loss: where an answer repeats a word, one
    attention head must attend to the word's earlier place.

    The pointer loss shortens the training of memory from hours to minutes.
    """
    states, pointing = run_layers(thinker, thinker.model.embed_tokens(batch.ids), batch, block)
    logits = thinker.lm_head(states[:, :-1])
    weights = batch.weights[:, 1:]
    each = functional.cross_entropy(
        logits.flatten(0, 1), batch.ids[:, 1:].flatten(), reduction="none"
    )
    return (each * weights.flatten()).sum() / weights.sum(), pointer_loss(thinker, batch, pointing)


def pointer_loss(thinker: ThinkerModel, batch: PackedBatch, states: Tensor) -> Tensor:
    """Return the mean negative log attention on the sources. `states`: the input of layer
    `POINTER_LAYER`.
    """
    layer: Any = thinker.model.layers[POINTER_LAYER]
    attention = layer.self_attn
    normed = _norm(states, layer.input_layernorm)
    query, key = (
        _rotate(
            _norm(functional.linear(normed, project.weight[: shape.HEAD_DIM]), norm)[:, None],
            *_angles(thinker, batch),
        )[:, 0]
        for project, norm in (
            (attention.q_proj, attention.q_norm),
            (attention.k_proj, attention.k_norm),
        )
    )
    scores = (query @ key.transpose(1, 2) * shape.HEAD_DIM**-0.5).masked_fill(
        ~batch.mask[:, 0], float("-inf")
    )
    seen = scores.softmax(-1)
    found = (seen * batch.sources).sum(-1)[batch.sources.any(-1)]
    return -(found + 1e-6).log().sum() / max(1, len(found))


def shares(name: str, questions: Sequence[Dialogue], are_right: Sequence[bool]) -> dict[str, float]:
    right, counts = Counter[str](), Counter(dialogue.family for dialogue in questions)
    for dialogue, each in zip(questions, are_right, strict=True):
        right[dialogue.family] += each
    by_family = {
        f"{name}_{family}": right[family] / count for family, count in sorted(counts.items())
    }
    return {name: right.total() / len(questions)} | by_family


def scores(questions: Sequence[Dialogue], answers: Sequence[str]) -> dict[str, float]:
    return shares(
        "right",
        questions,
        [is_right(dialogue, text) for dialogue, text in zip(questions, answers, strict=True)],
    )


@torch.inference_mode()
def is_answered(
    thinker: ThinkerModel, questions: Sequence[Dialogue], batch_size: int = 28
) -> list[bool]:
    """Return True for each dialogue whose greedy answer is right: every symbol of the right answer
    is the likeliest at its place.

    This equals the result of generating the answers, without generation.
    """
    lengths = [len(prompt(dialogue)) for dialogue in questions]
    return in_batches(
        questions, lengths, batch_size, lambda batch: _is_answered_batch(thinker, batch)
    )


def in_batches(
    items: Sequence[Item],
    lengths: Sequence[int],
    batch_size: int,
    compute: Callable[[Sequence[Item]], Sequence[Result]],
) -> list[Result]:
    """Return the results of all items in their order; each batch has items of about the same
    length.
    """
    order = sorted(range(len(items)), key=lengths.__getitem__)
    results: dict[int, Result] = {}
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        results |= zip(chosen, compute([items[index] for index in chosen]), strict=True)
    return [results[index] for index in range(len(items))]


def _is_answered_batch(thinker: ThinkerModel, questions: Sequence[Dialogue]) -> list[bool]:
    samples = [sample(dialogue.turns) for dialogue in questions]
    batch = _batch([[each] for each in samples], max(len(each.ids) for each in samples))
    states, _ = run_layers(thinker, thinker.model.embed_tokens(batch.ids), batch, decoder_block)
    likeliest = thinker.lm_head(states).argmax(-1)
    is_expected = likeliest[:, :-1] == batch.ids[:, 1:]
    spans = (
        (len(prompt(dialogue)) - 1, len(each.ids) - 1)
        for dialogue, each in zip(questions, samples, strict=True)
    )
    return [
        bool(row[begin:end].all()) for row, (begin, end) in zip(is_expected, spans, strict=True)
    ]


def prompt(dialogue: Dialogue) -> list[int]:
    """Return the ids of the dialogue up to its last answer."""
    before = [symbol for turn in dialogue.turns[:-1] for symbol in turn_ids(turn)]
    return before + opening("assistant")


@torch.inference_mode()
def answer(
    thinker: ThinkerModel,
    prompts: Sequence[Sequence[int]],
    *,
    embed_ids: Callable[[Tensor], Tensor] | None = None,
    batch_size: int = 64,
    max_len: int = MAX_ANSWER_LEN,
) -> list[str]:
    """Return the greedily decoded answer to each prompt. `embed_ids`: embedding of ids, by default
    the text table.
    """
    embed = embed_ids or thinker.model.embed_tokens
    return in_batches(
        prompts,
        [*map(len, prompts)],
        batch_size,
        lambda batch: _answer_batch(thinker, batch, embed, max_len),
    )


def _answer_batch(
    thinker: ThinkerModel,
    prompts: Sequence[Sequence[int]],
    embed_ids: Callable[[Tensor], Tensor],
    max_len: int,
) -> list[str]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[_PAD] * (longest - len(each)) + list(each) for each in prompts])
    mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in prompts])
    states = embed_ids(ids)
    cache = DynamicCache()
    sampled: list[Tensor] = []
    has_ended = torch.zeros(len(prompts), dtype=torch.bool)
    while len(sampled) < max_len and not has_ended.all():
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -states.shape[1] :]
        result = thinker.model(
            inputs_embeds=states, attention_mask=mask, position_ids=positions, past_key_values=cache
        )
        ids = thinker.lm_head(result.last_hidden_state[:, -1:]).argmax(-1)
        states = thinker.model.embed_tokens(ids)
        sampled.append(ids)
        has_ended |= ids[:, 0] == _END
        mask = torch.cat((mask, torch.ones_like(ids)), 1)
    return [_until_end(row) for row in torch.cat(sampled, 1).tolist()]


def _until_end(ids: Sequence[int]) -> str:
    """Return the text before the end of the turn; "" if it contains a special symbol."""
    text = ids[: ids.index(_END)] if _END in ids else ids
    return decode(text) if all(each < len(SYMBOLS) for each in text) else ""
