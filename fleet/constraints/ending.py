"""How an answer that has to keep a rule ends before its limit of tokens: a small model that opens
one object in another would else be cut in the middle, and its JSON could not be read.

Source: llguidance 1.9 (`LLMatcher`, `LLTokenizer`). Legend: V vocabulary.
"""

from collections.abc import Iterable
from functools import cached_property

import llguidance.numpy
import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

MARGIN = 8
"""Spare tokens held back, since one token that opens no object may still lengthen the ending."""
CALM = 32
"""Number of spare tokens at or below which an answer may open no further object, list or item."""
GROWTH = 8
"""Assumed limit on the tokens by which a token of the answer lengthens the ending, on average."""
LOOK = 1024
"""Number of tokens before the limit at which the search for the shortest ending begins."""
LONGEST = 512
"""Maximum length in tokens of an ending that is searched for."""
CLOSING = b'}])"n0123456789tf-[{(:,'
"""Bytes that can complete a value, in the order in which they are tried."""
BRACKETS = b"}]"
"""Bytes that are all allowed as the next token only within a string, which `QUOTE` ends."""
QUOTE = b'"'
OPENING = frozenset(b"[{(,")


class EndPlan(msgspec.Struct, frozen=True):
    """What is known of the end of an answer after some of its tokens.

    `check_at`: length of the answer in tokens at which the ending is searched for again. `ending`:
    the only tokens that may follow before an end token, () if only an end token may follow; None
    while the answer is free. `calm`: True if no further object, list or item may be opened. `way`:
    first token of the shortest ending, permitted even if it opens an item; -1 unless `calm`.
    """

    check_at: int = 0
    ending: tuple[int, ...] | None = None
    calm: bool = False
    way: int = -1


class Endings:
    """Shortest ends of answers in the tokens of one checkpoint. `num_ids`: V."""

    def __init__(self, vocabulary: LLTokenizer, num_ids: int, end_ids: frozenset[int]) -> None:
        self._vocabulary, self._num_ids = vocabulary, num_ids
        self._end_ids = sorted(end_ids)
        self._closing = self._ids_of(CLOSING)
        self._brackets, self._quote = self._ids_of(BRACKETS), self._ids_of(QUOTE)

    def follow(
        self, plan: EndPlan, matcher: LLMatcher, token: int, number: int, limit: int
    ) -> EndPlan:
        """Return the plan after a further `token`, which `matcher` has read. `number`: tokens of
        the answer, `token` included. `limit`: maximum number of tokens of the answer.
        """
        if plan.ending and plan.ending[0] == token:
            return EndPlan(ending=plan.ending[1:])
        if plan.ending is None and number < plan.check_at:
            return plan
        return self.plan(matcher, number, limit)

    def plan(self, matcher: LLMatcher, number: int, limit: int) -> EndPlan:
        """Return the plan for an answer that has `number` tokens and may have `limit` tokens."""
        left = limit - number - 1
        if left > LOOK:
            return EndPlan(check_at=limit - LOOK)
        ending = self._shortest(matcher, min(left, LONGEST))
        if not ending:
            return EndPlan(check_at=number + max(1, left // 4))
        spare = left - len(ending) - MARGIN
        if spare <= 0:
            return EndPlan(ending=ending)
        if spare <= CALM:
            return EndPlan(check_at=number + 1, calm=True, way=ending[0])
        return EndPlan(check_at=number + 1 + (spare - CALM) // GROWTH)

    def permit(self, plan: EndPlan, allowed: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return the ids among `allowed` that `plan` permits. Shapes: both bool [V]."""
        if plan.ending is None and not plan.calm:
            return allowed
        kept = np.zeros_like(allowed)
        if plan.ending is not None:
            kept[plan.ending[:1] or self._end_ids] = True
            return kept & allowed
        kept[plan.way] = True
        return (kept | self._calm) & allowed

    def _shortest(self, matcher: LLMatcher, most: int) -> tuple[int, ...] | None:
        """Return the tokens with which a walk along closing characters completes the answer: () if
        the answer is complete, None if more than `most` tokens are needed or a token is refused.
        """
        ids: list[int] = []
        if matcher.is_accepting():
            return ()
        walked = matcher.deep_copy()
        while not walked.is_accepting():
            following = walked.compute_ff_tokens() or [self._closing_id(walked)]
            ids += following
            if len(ids) > most or walked.try_consume_tokens(following) < len(following):
                return None
        return tuple(ids)

    def _closing_id(self, matcher: LLMatcher) -> int:
        bits = llguidance.numpy.allocate_token_bitmask(1, self._num_ids)
        llguidance.numpy.fill_next_token_bitmask(matcher, bits, 0)
        allowed = np.unpackbits(bits.view(np.uint8)[0], bitorder="little")[: self._num_ids]
        allowed[self._end_ids] = 0
        in_string = all(allowed[n] for n in self._brackets)
        first = self._quote if in_string else self._closing
        return next((n for n in first if allowed[n]), int(allowed.argmax()))

    def _ids_of(self, text: bytes) -> list[int]:
        """Return the token ids of the bytes in `text`, without bytes that are no single token."""
        found = [self._vocabulary.tokenize_bytes(bytes([byte])) for byte in text]
        return [ids[0] for ids in found if len(ids) == 1]

    @cached_property
    def _calm(self) -> NDArray[np.bool_]:
        """The ids that open no object, list or item: bool [V]."""
        texts: Iterable[bytes] = (self._vocabulary.decode_bytes([n]) for n in range(self._num_ids))
        return np.fromiter((OPENING.isdisjoint(text) for text in texts), np.bool_, self._num_ids)
