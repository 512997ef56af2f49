"""Drafters: guess the next tokens of an answer (drafts), which the model verifies in one step.
Knows no model and no scheduling.

`ngram` continues as the prompt and the answer did after the same tokens; `suffix` also as earlier
answers did. Sources: prompt lookup decoding
(https://github.com/apoorvumang/prompt-lookup-decoding), suffix decoding (Oliaro et al., 2024,
arXiv:2411.04975).
"""

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from torch import Tensor

from fleet.core.ids import RequestId
from fleet.engine.torch.kv_pool import PageTable
from fleet.engine.torch.program import DraftedTask

MIN_MATCH = 2
"""Number of last tokens that must occur at an earlier place before its continuation is guessed;
also the length of the keys in the index of places.
"""
MAX_MATCH = 16
MAX_PLACES = 32
"""Most places that are compared, the latest ones: more take time and rarely improve a guess."""
NUM_PROMPT_IDS = 8
"""Number of ids at the end of a prompt that are stored with its answer, so that the first tokens of
a later answer can be guessed.
"""
Pair = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedDraft:
    """A request that needs drafts, because a token is sampled after its rows in the next step.

    `table`: KV pages of the request. `most`: most drafts that may follow.
    """

    request: RequestId
    task: DraftedTask
    table: PageTable
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedRows:
    """Rows [start, stop) of a request that a step has computed, without rejected drafts.

    `features_NT`: hidden states that entered the layers that a draft head reads.
    """

    request: RequestId
    task: DraftedTask
    table: PageTable
    start: int
    stop: int
    features_NT: Tensor


class Drafter(Protocol):
    """Source of drafts for the requests of a batch loop. Not thread-safe.

    `costs_time`: True if drafting takes a considerable part of a step's time. A drafter's backlog
    is the rows that it has not read while no drafts were wanted: rows of prompts, and of steps
    before the last one. `backlog_s`: time that the last `propose` spent on reading the backlog.
    """

    costs_time: bool = False
    backlog_s: float = 0.0

    @property
    def can_draft(self) -> bool:
        """False while something that the drafter needs, such as a draft head, is missing."""
        return True

    @property
    def reads_features(self) -> bool:
        """True if the drafter reads hidden states of steps. A step that runs as a captured CUDA
        graph does not return them.
        """
        return False

    def propose(self, asked: Sequence[AskedDraft]) -> list[Sequence[int]]:
        """Return guesses of the next tokens for each request in `asked`, in the same order; an
        empty sequence where there is no basis for a guess.
        """
        ...

    def expected_backlog_s(self, asked: Sequence[AskedDraft]) -> float:
        """Estimate the time that `propose` would spend on reading the backlog."""
        return 0.0

    def on_computed(self, rows: Sequence[ComputedRows]) -> None:
        """Read the rows of a step. The tokens sampled after them are already recorded in their
        tasks.
        """

    def close(self, request: RequestId) -> None:
        """Forget a request that has ended or left."""
        ...

    def learn(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> None:
        """Store a complete answer, as a source of later drafts."""

    def forget_requests(self) -> None:
        """Forget all requests, since another drafter is used from now on."""
        ...


class Proposer(Protocol):
    """Source of guesses for one request."""

    def add(self, tokens: Sequence[int]) -> None:
        """Append tokens that were sampled for the request."""
        ...

    def propose(self, most: int) -> Sequence[int]:
        """Return at most `most` guesses of the next tokens; empty if there is no basis for any."""
        ...


class MatchingDrafter(Drafter, ABC):
    """Base class of drafters that guess from token ids alone, without a draft head."""

    def __init__(self) -> None:
        self._proposers: dict[RequestId, tuple[Proposer, int]] = {}
        """By request: its proposer, and how many of the answer's tokens the proposer has got."""

    @abstractmethod
    def open(self, prompt_ids: Sequence[int]) -> Proposer: ...

    def propose(self, asked: Sequence[AskedDraft]) -> list[Sequence[int]]:
        return [self._current(each.request, each.task).propose(each.most) for each in asked]

    def _current(self, request: RequestId, task: DraftedTask) -> Proposer:
        """Return the proposer of a request, after adding all newly sampled tokens."""
        proposer, num_seen = self._proposers.get(request) or (self.open(task.prompt_ids), 0)
        new = task.answer_ids[num_seen:]
        proposer.add(new)
        self._proposers[request] = proposer, num_seen + len(new)
        return proposer

    def close(self, request: RequestId) -> None:
        self._proposers.pop(request, None)

    def forget_requests(self) -> None:
        self._proposers.clear()


Place = tuple[Sequence[int], int]
"""A list of token ids and an index in it. The two ids before the index are equal to the last two
ids of an answer, so that the ids from the index on are a possible continuation.
"""


class IndexedTokens:
    """Token ids of one request, with an index from each pair of neighbouring ids to the places
    after it.
    """

    def __init__(self, ids: Sequence[int] = ()) -> None:
        self.ids: list[int] = []
        self._after: dict[Pair | None, deque[int]] = {}
        self.extend(ids)

    def extend(self, ids: Sequence[int]) -> None:
        for token in ids:
            self.ids.append(token)
            if len(self.ids) >= MIN_MATCH:
                places = self._after.setdefault(
                    (self.ids[-2], self.ids[-1]), deque(maxlen=MAX_PLACES + 1)
                )
                places.append(len(self.ids))

    def places(self) -> list[Place]:
        """Return the places after earlier occurrences of the last two tokens; empty if there are
        none.
        """
        return [
            (self.ids, at) for at in self._after.get(last_pair(self.ids), ()) if at < len(self.ids)
        ]


class AnswerTable:
    """The latest complete answers, indexed by pairs of tokens. `max_tokens`: most tokens of all
    answers together.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens, self.num_tokens = max_tokens, 0
        self._answers: deque[tuple[int, ...]] = deque()
        self._after: dict[Pair | None, deque[tuple[tuple[int, ...], int]]] = {}

    def add(self, ids: Sequence[int]) -> None:
        """Add an answer, which may begin with the end of its prompt; drop the oldest ones beyond
        the limit.
        """
        answer = tuple(ids)
        if not MIN_MATCH < len(answer) <= self._max_tokens:
            return
        self._answers.append(answer)
        self.num_tokens += len(answer)
        for at in range(MIN_MATCH, len(answer)):
            self._after.setdefault((answer[at - 2], answer[at - 1]), deque()).append((answer, at))
        while self.num_tokens > self._max_tokens:
            self._drop(self._answers.popleft())

    def _drop(self, answer: tuple[int, ...]) -> None:
        self.num_tokens -= len(answer)
        for at in range(MIN_MATCH, len(answer)):
            pair = (answer[at - 2], answer[at - 1])
            places = self._after[pair]
            places.popleft()  # places are in the order of their answers
            if not places:
                del self._after[pair]

    def places(self, ids: Sequence[int]) -> list[Place]:
        """Return up to `MAX_PLACES` places in stored answers that follow the last two tokens of
        `ids`, the latest first.
        """
        places = self._after.get(last_pair(ids), deque[Place]())
        return list(islice(reversed(places), MAX_PLACES))


def last_pair(ids: Sequence[int]) -> Pair | None:
    return (ids[-2], ids[-1]) if len(ids) >= MIN_MATCH else None


def longest_matches(places: Sequence[Place], last: Sequence[int]) -> Sequence[Place]:
    """Return the places with the longest match: the most tokens before them equal to the end of
    `last`, compared up to `MAX_MATCH` tokens.
    """
    for length in range(MIN_MATCH + 1, min(MAX_MATCH, len(last)) + 1):
        token = last[-length]
        longer = [(ids, at) for ids, at in places if at >= length and ids[at - length] == token]
        if not longer:
            break
        places = longer
    return places


def continued(places: Sequence[Place], most: int) -> list[int]:
    """Return up to `most` guessed tokens. At each position the most frequent token among the places
    is taken, and only places that continue with it are kept.
    """
    guesses: list[int] = []
    for number in range(most):
        places = [(ids, at) for ids, at in places if at + number < len(ids)]
        if not places:
            break
        ((token, _),) = Counter(ids[at + number] for ids, at in places).most_common(1)
        guesses.append(token)
        places = [(ids, at) for ids, at in places if ids[at + number] == token]
    return guesses


class NgramDrafter(MatchingDrafter):
    """Drafter that guesses from the request's own prompt and answer."""

    def open(self, prompt_ids: Sequence[int]) -> Proposer:
        return MatchedProposer(prompt_ids, None)


class SuffixDrafter(MatchingDrafter):
    """Drafter that guesses from the request's own tokens and from earlier answers. `max_tokens`:
    see `AnswerTable`.
    """

    def __init__(self, max_tokens: int) -> None:
        super().__init__()
        self._table = AnswerTable(max_tokens)

    def open(self, prompt_ids: Sequence[int]) -> Proposer:
        return MatchedProposer(prompt_ids, self._table)

    def learn(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> None:
        self._table.add([*prompt_ids[-NUM_PROMPT_IDS:], *answer_ids])


class MatchedProposer(Proposer):
    """Proposer that continues as after the longest earlier match of the last tokens.

    `table`: earlier answers to search as well; None for the request's own tokens only.
    """

    def __init__(self, prompt_ids: Sequence[int], table: AnswerTable | None) -> None:
        self._own, self._table = IndexedTokens(prompt_ids), table

    def add(self, tokens: Sequence[int]) -> None:
        self._own.extend(tokens)

    def propose(self, most: int) -> Sequence[int]:
        if most <= 0:
            return ()
        ids = self._own.ids
        served = self._table.places(ids) if self._table is not None else ()
        return continued(longest_matches([*self._own.places(), *served], ids), most)
