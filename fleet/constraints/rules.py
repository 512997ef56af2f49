"""Which tokens may follow in an answer that has to keep a rule.

Source: llguidance 1.7 (`LLMatcher`), https://github.com/guidance-ai/llguidance.
Legend: V vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache

import llguidance.numpy
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray
from tokenizers import Tokenizer

from fleet.constraints.ending import Endings, EndPlan
from fleet.constraints.grammar import grammar_of, refused
from fleet.core.errors import BadInput, FleetError
from fleet.core.request import Constraint

MAX_KEPT = 64
"""Maximum number of compiled rules that are cached for later requests with equal constraints."""


class MatchedRule:
    """Rule for the tokens of one answer (`TokenRule`). `max_tokens`: limit on the answer's tokens,
    before which the answer is completed if possible. `num_ids`: V.
    """

    def __init__(
        self,
        constraint: Constraint,
        matcher: LLMatcher,
        endings: Endings,
        num_ids: int,
        max_tokens: int,
    ) -> None:
        self.error: FleetError | None = None
        self._constraint, self._matcher = constraint, matcher
        self._bits = llguidance.numpy.allocate_token_bitmask(1, num_ids)
        self._num_ids, self._max_tokens = num_ids, max_tokens
        self._endings, self._num_added = endings, 0
        self._plan = endings.plan(matcher, 0, max_tokens)

    def allowed(self, drafts: Sequence[int]) -> NDArray[np.bool_] | None:
        if self.error is not None:
            return None
        plan, num_kept = self._plan, 0
        for draft in drafts:
            if not self._matcher.try_consume_tokens([draft]):
                break
            num_kept += 1
            plan = self._followed(plan, draft, num_kept)
        if num_kept == len(drafts):
            llguidance.numpy.fill_next_token_bitmask(self._matcher, self._bits, 0)
        if num_kept:
            self._matcher.rollback(num_kept)
        self._check()
        if num_kept < len(drafts) or self.error is not None:
            return None
        bits = np.unpackbits(self._bits.view(np.uint8)[0], bitorder="little")
        return self._endings.permit(plan, bits[: self._num_ids].astype(np.bool_))

    def add(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._check()
        if self.error is None:
            self._plan = self._followed(self._plan, token, 1)
            self._num_added += 1

    def _followed(self, plan: EndPlan, token: int, num_more: int) -> EndPlan:
        number = self._num_added + num_more
        return self._endings.follow(plan, self._matcher, token, number, self._max_tokens)

    def _check(self) -> None:
        if self.error is None and self._matcher.is_error():
            self.error = refused(self._constraint, self._matcher.get_error())


class Constraints:
    """Rules for answers in the tokens of one checkpoint.

    `num_ids`: size of the model's vocabulary, at least the tokenizer's. `end_ids`: ids of which any
    one ends an answer. The tokenizer is read when the first rule is compiled.
    """

    def __init__(
        self, tokenizer: Callable[[], Tokenizer], num_ids: int, end_ids: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._num_ids = num_ids
        self._end_ids = end_ids
        self._compiled = lru_cache(MAX_KEPT)(self._compile)

    def compile(
        self, constraint: Constraint | None, max_tokens: int
    ) -> Callable[[], MatchedRule] | None:
        """Return a function that creates, for one new answer of at most `max_tokens` tokens, the
        rule of `constraint`; None if `constraint` is None. Raises: BadInput.
        """
        if constraint is None:
            return None
        matcher = self._compiled(constraint)
        return lambda: MatchedRule(
            constraint, matcher.deep_copy(), self._endings, self._num_ids, max_tokens
        )

    def _compile(self, constraint: Constraint) -> LLMatcher:
        matcher = LLMatcher(self._vocabulary, grammar_of(constraint), log_level=0)
        if matcher.is_error():
            raise refused(constraint, matcher.get_error())
        return matcher

    @cached_property
    def _endings(self) -> Endings:
        return Endings(self._vocabulary, self._num_ids, self._end_ids)

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        try:
            return LLTokenizer(
                self._tokenizer().to_str(),
                n_vocab=self._num_ids,
                eos_token=sorted(self._end_ids),
            )
        except ValueError as error:
            raise BadInput(
                "response_format: the tokens of this model cannot be held to a rule "
                f"({error}); ask for text",
                param="response_format",
            ) from error
