"""Dialogues about the conversation itself: facts that the user did or did not state, and the user's
first and last utterance.

The phrasings are in `data/memory.yaml`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from fleet.lab.pocket.corpus.dialogue import DONT_KNOW, Drawn, Exchange
from fleet.lab.pocket.corpus.table import Row, Table
from fleet.lab.pocket.corpus.words import WORDS, nonsense, read_data

MAX_QUOTED_WORDS = 9
NONSENSE_SHARE = 0.4
GAPS = (0, 0, 1, 1, 2)
"""Numbers of other exchanges between a statement and the question about it; one is chosen at
random.
"""

Filler = Callable[[], Exchange]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phrasings:
    """Alternative phrasings of a question: `asks` occur in training, `new_asks` are held out."""

    asks: Sequence[str]
    new_asks: Sequence[str]

    def draw(self, rng: Random, split: Drawn) -> str:
        return rng.choice(self.new_asks if split == "held_out" else self.asks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact(Phrasings):
    """A kind of fact about the user: a table of statements, whose one slot is `value`, and
    questions about the value.

    `recalled`: answer if the fact was stated. `untold`: answer if it was not.
    """

    statements: Table
    recalled: str
    untold: str

    def state(self, rng: Random, split: Drawn) -> tuple[Exchange, str]:
        """Generate a random statement of the fact, and return it with its value."""
        ask, row = self.statements.pick(rng, split)
        return self.statements.exchange(ask, row), row["value"]

    def recall(self, rng: Random, split: Drawn, value: str) -> Exchange:
        is_new = {"value": value} in self.statements.new_rows
        return Exchange(
            question=self.draw(rng, split),
            answer=self.recalled.format(value=value),
            is_new_answer=is_new,
        )


def _value_row(word: str) -> Row:
    return {"value": word}


def _fact(entry: Mapping[str, Any]) -> Fact:
    values = WORDS[entry["values"]] if isinstance(entry["values"], str) else entry["values"]
    statements = Table(
        asks=entry["statements"],
        new_asks=entry["new_statements"],
        answer=entry["noted"],
        by_rule=True,
        rows=list(map(_value_row, values)),
        of_word=_value_row,
    )
    return Fact(
        statements=statements,
        **{name: entry[name] for name in ("asks", "new_asks", "recalled", "untold")},
    )


_DATA = read_data("memory")
FACTS = tuple(map(_fact, _DATA["facts"]))
FIRST_QUOTE, LAST_QUOTE = Phrasings(**_DATA["first"]), Phrasings(**_DATA["last"])


def converse(rng: Random, split: Drawn, filler: Filler) -> list[Exchange]:
    """Generate a random dialogue whose last question can only be answered from its earlier
    exchanges. `filler`: generates the exchanges in between.
    """
    kind = rng.choices((_recall, _recall_one_of_two, _untold, _quote), weights=(3, 2, 1, 2))[0]
    return kind(rng, split, filler)


def _recall(rng: Random, split: Drawn, filler: Filler) -> list[Exchange]:
    fact = rng.choice(FACTS)
    statement, value = fact.state(rng, split)
    return [statement, *_gap(rng, filler), fact.recall(rng, split, value)]


def _recall_one_of_two(rng: Random, split: Drawn, filler: Filler) -> list[Exchange]:
    facts = rng.sample(FACTS, 2)
    stated = [fact.state(rng, split) for fact in facts]
    index = rng.randrange(2)
    return [
        *(statement for statement, _ in stated),
        *_gap(rng, filler),
        facts[index].recall(rng, split, stated[index][1]),
    ]


def _untold(rng: Random, split: Drawn, filler: Filler) -> list[Exchange]:
    """Generate a dialogue that asks for a fact that was not stated. Sometimes a different fact was
    stated, which is not the answer.
    """
    fact, other = rng.sample(FACTS, 2)
    before = [other.state(rng, split)[0]] if rng.random() < 0.5 else _gap(rng, filler)
    return [
        *before,
        Exchange(question=fact.draw(rng, split), answer=fact.untold, is_new_answer=False),
    ]


def _quote(rng: Random, split: Drawn, filler: Filler) -> list[Exchange]:
    def short() -> Exchange:
        if split == "invented" and rng.random() < NONSENSE_SHARE:
            return Exchange(
                question=nonsense(rng, MAX_QUOTED_WORDS), answer=DONT_KNOW, is_new_answer=False
            )
        exchange = rng.choice(FACTS).state(rng, split)[0] if rng.random() < 0.4 else filler()
        return exchange if len(exchange.question.split()) <= MAX_QUOTED_WORDS else short()

    exchanges = [short() for _ in range(rng.choice((1, 2, 2, 3)))]
    is_first = rng.random() < 0.7
    quoted = exchanges[0 if is_first else -1].question
    question = (FIRST_QUOTE if is_first else LAST_QUOTE).draw(rng, split)
    return [
        *exchanges,
        Exchange(question=question, answer=f"you said {quoted}", is_new_answer=split == "held_out"),
    ]


def _gap(rng: Random, filler: Filler) -> list[Exchange]:
    return [filler() for _ in range(rng.choice(GAPS))]
