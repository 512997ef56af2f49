"""Drafters: guesses of the next tokens of an answer, which one pass verifies together. Knows no
model and no scheduling.

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
"""Tokens that must be equal before a guess. Places are indexed by so many."""
MAX_MATCH = 16
MAX_PLACES = 32
"""The latest places that are compared: more cost time and rarely a better guess."""
NUM_PROMPT_IDS = 8
"""Ids at the end of a prompt that are stored with an answer, so that its first tokens can be
guessed.
"""
Pair = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedDraft:
    """A request after whose rows a token is sampled in the next step. `table`: pages of the
    request. `most`: most drafts that may follow.
    """

    request: RequestId
    task: DraftedTask
    table: PageTable
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedRows:
    """Rows [start, stop) of a request that a pass has computed; no rejected draft is among them.

    `features_NT`: the rows that entered the layers that a draft head reads.
    """

    request: RequestId
    task: DraftedTask
    table: PageTable
    start: int
    stop: int
    features_NT: Tensor


class Drafter(Protocol):
    """Source of drafts. Not thread-safe. `costs_time`: drafting itself takes a part of a step.

    Its backlog are rows of a prompt, and of steps before the last one, that it has not read since
    no drafts were wanted. `backlog_s`: seconds for which the last `propose` read rows of the
    backlog.
    """

    costs_time: bool = False
    backlog_s: float = 0.0

    @property
    def can_draft(self) -> bool:
        """False while something that it needs is missing."""
        return True

    @property
    def reads_features(self) -> bool:
        """True if it reads the rows of passes, which a captured step does not return."""
        return False

    def propose(self, asked: Sequence[AskedDraft]) -> list[Sequence[int]]:
        """Return guesses of the next tokens of each request; none where there is no reason for
        one.
        """
        ...

    def expected_backlog_s(self, asked: Sequence[AskedDraft]) -> float:
        """Return about how long `propose` would read rows of the backlog."""
        return 0.0

    def on_computed(self, rows: Sequence[ComputedRows]) -> None:
        """Read the rows of a pass; the draws after them are recorded."""

    def close(self, request: RequestId) -> None:
        """Forget a request."""
        ...

    def learn(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> None:
        """Use a complete answer for later drafts."""

    def forget_requests(self) -> None:
        """Forget all requests, since another drafter is used from now on."""
        ...


class Proposer(Protocol):
    """Guesses for one request."""

    def add(self, tokens: Sequence[int]) -> None:
        """Add tokens that were drawn."""
        ...

    def propose(self, most: int) -> Sequence[int]:
        """Return at most `most` guesses of the next tokens; none if there is no reason for one."""
        ...


class MatchingDrafter(Drafter, ABC):
    """A drafter that guesses from tokens alone."""

    def __init__(self) -> None:
        self._proposers: dict[RequestId, tuple[Proposer, int]] = {}
        """With the number of tokens of the answer that each has got."""

    @abstractmethod
    def open(self, prompt_ids: Sequence[int]) -> Proposer: ...

    def propose(self, asked: Sequence[AskedDraft]) -> list[Sequence[int]]:
        return [self._current(each.request, each.task).propose(each.most) for each in asked]

    def _current(self, request: RequestId, task: DraftedTask) -> Proposer:
        """Return the proposer of a request, with all tokens that were drawn."""
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
"""A list of tokens, and an index of it before which the last two tokens of an answer occur."""


class IndexedTokens:
    """Token ids, and after which places each pair of them occurs."""

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
        """Return the earlier places before which the last two tokens occur."""
        return [
            (self.ids, at) for at in self._after.get(last_pair(self.ids), ()) if at < len(self.ids)
        ]


class AnswerTable:
    """Answers that were served, the latest ones. `max_tokens`: limit of their tokens together."""

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
        """Return the latest places before which the last two tokens of `ids` occur."""
        places = self._after.get(last_pair(ids), deque[Place]())
        return list(islice(reversed(places), MAX_PLACES))


def last_pair(ids: Sequence[int]) -> Pair | None:
    return (ids[-2], ids[-1]) if len(ids) >= MIN_MATCH else None


def longest_matches(places: Sequence[Place], last: Sequence[int]) -> Sequence[Place]:
    """Return the places before which the most tokens are the last ones of `last`, at most
    `MAX_MATCH`.
    """
    for length in range(MIN_MATCH + 1, min(MAX_MATCH, len(last)) + 1):
        token = last[-length]
        longer = [(ids, at) for ids, at in places if at >= length and ids[at - length] == token]
        if not longer:
            break
        places = longer
    return places


def continued(places: Sequence[Place], most: int) -> list[int]:
    """Return the most frequent continuation of the places, token by token."""
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
    """Guesses from the request's own tokens."""

    def open(self, prompt_ids: Sequence[int]) -> Proposer:
        return MatchedProposer(prompt_ids, None)


class SuffixDrafter(MatchingDrafter):
    """Guesses from the request's own tokens and from answers that were served. `max_tokens`: see
    `AnswerTable`.
    """

    def __init__(self, max_tokens: int) -> None:
        super().__init__()
        self._table = AnswerTable(max_tokens)

    def open(self, prompt_ids: Sequence[int]) -> Proposer:
        return MatchedProposer(prompt_ids, self._table)

    def learn(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> None:
        self._table.add([*prompt_ids[-NUM_PROMPT_IDS:], *answer_ids])


class MatchedProposer(Proposer):
    """Guesses by the longest match of the last tokens."""

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
