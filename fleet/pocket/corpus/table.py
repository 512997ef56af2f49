"""Questions that differ only in phrasing and in values: every phrasing can be asked of every row, and what is held out of them.

Held out is a phrasing (of values known from training) or, where the answer follows from a rule, a row (in a known phrasing).
What can only be known by heart, such as a capital, keeps all its rows in training.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Protocol

from fleet.pocket.corpus.dialogue import Drawn, Exchange, Split
from fleet.pocket.corpus.invented import invented

HELD_OUT_EVERY, HELD_OUT_AT = 8, 5
"""Of every eight rows the sixth is held out: the same value wherever two tables are made of one list."""
INVENTED_SHARE = 0.5

Row = Mapping[str, str]


class Source(Protocol):
    def draw(self, rng: Random, split: Drawn) -> Exchange: ...


@dataclass(frozen=True, kw_only=True)
class Table:
    """Phrasings, their answer, and the rows that fill the slots of both. `of_word`: the row of any word, where there is one.

    Invariants: where rows are held out, the answer is constant or tells them apart.
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
        """A phrasing and a row, each drawn evenly; of the held-out ones, new phrasings and new rows in equal parts."""
        if split == "invented" and self.of_word and rng.random() < INVENTED_SHARE:
            return rng.choice(self.asks), self.of_word(invented(rng))
        if split != "held_out":
            return rng.choice(self.asks), rng.choice(self.known_rows)
        if self.new_rows and rng.random() < 0.5:
            return rng.choice(self.asks), rng.choice(self.new_rows)
        return rng.choice(self.new_asks), rng.choice(self.known_rows)

    def exchange(self, ask: str, row: Row) -> Exchange:
        is_new_answer = "{" in self.answer and row in self.new_rows
        return Exchange(question=ask.format_map(row), answer=self.answer.format_map(row), is_new_answer=is_new_answer)

    def draw(self, rng: Random, split: Drawn) -> Exchange:
        return self.exchange(*self.pick(rng, split))

    def exchanges(self, split: Split) -> Iterator[Exchange]:
        """Everything that `draw` can return, but for invented words."""
        if split == "train":
            yield from (self.exchange(ask, row) for ask in self.asks for row in self.known_rows)
            return
        yield from (self.exchange(ask, row) for ask in self.asks for row in self.new_rows)
        yield from (self.exchange(ask, row) for ask in self.new_asks for row in self.known_rows)
