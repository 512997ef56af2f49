"""Tables of questions: every phrasing is combined with every row of values; and the choice of their
held-out part.

Every table has held-out phrasings, which are combined with training rows. If the answer follows
from a rule, rows are held out too, and combined with training phrasings. A table of facts that can
only be memorized, such as capitals, has all its rows in training.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random

from fleet.lab.pocket.corpus.dialogue import Drawn, Exchange, Split
from fleet.lab.pocket.corpus.words import invented

HELD_OUT_EVERY, HELD_OUT_AT = 8, 5
"""The sixth of every eight rows is held out, so that tables with the same word list hold out the
same values.
"""
INVENTED_SHARE = 0.5

Row = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Question phrasings (`asks` in training, `new_asks` held out), their answer, and rows of
    values that fill the slots of both. `by_rule`: whether rows are held out, too. `of_word`:
    function that returns the row of any word, None if the table has no such rule.

    Invariants: if rows are held out, their answers are all equal or all different.
    """

    asks: Sequence[str]
    new_asks: Sequence[str]
    answer: str
    rows: Sequence[Row] = ({},)
    by_rule: bool = False
    of_word: Callable[[str], Row] | None = None

    @cached_property
    def known_rows(self) -> tuple[Row, ...]:
        return tuple(row for index, row in enumerate(self.rows) if not self._is_held_out(index))

    @cached_property
    def new_rows(self) -> tuple[Row, ...]:
        return tuple(row for index, row in enumerate(self.rows) if self._is_held_out(index))

    def _is_held_out(self, index: int) -> bool:
        return self.by_rule and index % HELD_OUT_EVERY == HELD_OUT_AT

    def pick(self, rng: Random, split: Drawn) -> tuple[str, Row]:
        """Choose a phrasing and a row at random. For the held-out split, the phrasing is held out
        or, with equal probability if the table holds out rows, the row. For `invented`, half of the
        rows have an invented word if the table has `of_word`.
        """
        if split == "invented" and self.of_word and rng.random() < INVENTED_SHARE:
            return rng.choice(self.asks), self.of_word(invented(rng))
        if split != "held_out":
            return rng.choice(self.asks), rng.choice(self.known_rows)
        if self.new_rows and rng.random() < 0.5:
            return rng.choice(self.asks), rng.choice(self.new_rows)
        return rng.choice(self.new_asks), rng.choice(self.known_rows)

    def exchange(self, ask: str, row: Row) -> Exchange:
        is_new_answer = "{" in self.answer and row in self.new_rows
        return Exchange(
            question=ask.format_map(row),
            answer=self.answer.format_map(row),
            is_new_answer=is_new_answer,
        )

    def draw(self, rng: Random, split: Drawn) -> Exchange:
        return self.exchange(*self.pick(rng, split))

    def exchanges(self, split: Split) -> Iterator[Exchange]:
        """Yield all exchanges of the split, except the ones with invented words."""
        if split == "train":
            yield from (self.exchange(ask, row) for ask in self.asks for row in self.known_rows)
            return
        yield from (self.exchange(ask, row) for ask in self.asks for row in self.new_rows)
        yield from (self.exchange(ask, row) for ask in self.new_asks for row in self.known_rows)
