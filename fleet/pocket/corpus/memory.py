"""Memory within the conversation: what the user told earlier, what was not told, and what the user said first or last."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from fleet.pocket.corpus.dialogue import Drawn, Exchange
from fleet.pocket.corpus.invented import nonsense
from fleet.pocket.corpus.smalltalk import DONT_KNOW
from fleet.pocket.corpus.table import Row, Table, rows
from fleet.pocket.corpus.words import ANIMALS, CITIES, COLOURS, FOODS, NAMES

MAX_QUOTED_WORDS = 9
NONSENSE_SHARE = 0.4
GAPS = (0, 0, 1, 1, 2)
"""How many other exchanges lie between telling and asking, each as likely as it is often here."""

Filler = Callable[[], Exchange]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """`tell` is a table of one value; `asks` and `new_asks` ask for it."""

    tell: Table
    asks: Sequence[str]
    new_asks: Sequence[str]
    recalled: str
    untold: str


def _valued(word: str) -> Row:
    return {"value": word}


def _fact(
    tells: Sequence[str], new_tells: Sequence[str], noted: str, values: Sequence[str],
    asks: Sequence[str], new_asks: Sequence[str], recalled: str, untold: str,
) -> Fact:  # fmt: skip
    tell = Table(asks=tells, new_asks=new_tells, answer=noted, rows=rows("value", values), by_rule=True, of_word=_valued)
    return Fact(tell=tell, asks=asks, new_asks=new_asks, recalled=recalled, untold=untold)


FACTS = (
    _fact(
        [
            "my name is {value}",
            "i am called {value}",
            "call me {value}",
            "hello my name is {value}",
            "hi i am called {value}",
            "you can call me {value}",
            "my first name is {value}",
            "people call me {value}",
        ],
        ["hello i am called {value}", "please call me {value}"],
        "nice to meet you {value}",
        NAMES,
        [
            "what is my name",
            "do you know my name",
            "tell me my name",
            "who am i",
            "what am i called",
            "do you remember my name",
            "please tell me my name",
            "can you say my name",
            "tell me who i am",
            "do you know what my name is",
            "say my name",
            "do you remember who i am",
            "do you know what i am called",
            "can you tell me what i am called",
        ],
        ["can you tell me my name", "do you know who i am"],
        "your name is {value}",
        "you did not tell me your name",
    ),
    _fact(
        [
            "my favourite colour is {value}",
            "i like the colour {value} best",
            "my best colour is {value}",
            "i like {value} best of the colours",
            "the best colour is {value}",
            "the colour i love is {value}",
        ],
        ["the colour i like best is {value}"],
        "{value} is a lovely colour",
        COLOURS,
        [
            "what is my favourite colour",
            "which colour do i like best",
            "tell me my favourite colour",
            "do you remember my favourite colour",
            "can you tell me my favourite colour",
            "what colour do i love",
            "tell me what colour i like best",
            "do you know which colour i like best",
            "what is the colour i like best",
        ],
        ["do you know my favourite colour", "what colour do i like best"],
        "your favourite colour is {value}",
        "you did not tell me your favourite colour",
    ),
    _fact(
        [
            "my favourite food is {value}",
            "i like to eat {value}",
            "i love {value}",
            "i like {value} a lot",
            "the food i love is {value}",
            "i always eat {value}",
            "i like eating {value}",
        ],
        ["i love to eat {value}", "i like {value}"],
        "i will remember you like {value}",
        [food for food in FOODS if food not in {"coffee", "tea", "milk", "water", "juice"}],
        [
            "what do i like to eat",
            "what is my favourite food",
            "tell me my favourite food",
            "which food do i like",
            "tell me what i like to eat",
            "do you remember my favourite food",
            "do you remember what i like to eat",
            "can you tell me my favourite food",
            "do you know which food i like",
            "what food do i love",
        ],
        ["do you know my favourite food", "do you know what i like to eat"],
        "you like {value}",
        "you did not tell me what you like",
    ),
    _fact(
        [
            "i live in {value}",
            "my home is in {value}",
            "i come from {value}",
            "my house is in {value}",
            "i live here in {value}",
            "my home city is {value}",
            "i am at home in {value}",
            "the city i am from is {value}",
        ],
        ["my home is {value}", "i am from {value}"],
        "so your home is {value}",
        CITIES,
        [
            "where do i live",
            "where is my home",
            "tell me where i live",
            "what city do i live in",
            "which city is my home",
            "do you remember where i live",
            "can you tell me where i live",
            "do you know where my home is",
            "tell me which city i live in",
            "in which city do i live",
            "do you remember which city i live in",
        ],
        ["do you know where i live", "which city do i live in"],
        "you live in {value}",
        "you did not tell me where you live",
    ),
    _fact(
        [
            "i have a {value}",
            "i have a {value} at home",
            "my pet is a {value}",
            "i live with a {value}",
            "we have a pet {value}",
            "at home we have a {value}",
            "i have a {value} as a pet",
            "in my house i have a {value}",
        ],
        ["at home i have a {value}", "i have a pet {value}"],
        "i will remember your {value}",
        ANIMALS,
        [
            "what pet do i have",
            "which pet do i have",
            "what is my pet",
            "tell me what pet i have",
            "do you know my pet",
            "do you remember what pet i have",
            "can you tell me what pet i have",
            "do you know which pet i have",
            "tell me what my pet is",
            "can you tell me which pet i have",
        ],
        ["do you know what pet i have", "tell me which pet i have"],
        "you have a {value}",
        "you did not tell me about your pet",
    ),
)

FIRST_ASKS = (
    "what did i say first", "what was the first thing i said", "tell me what i said first", "do you remember what i said first",
    "can you tell me what i said first", "tell me the first thing i said", "what was it that i said first",
    "do you know the first thing i said", "which was the first thing i said",
)  # fmt: skip
NEW_FIRST_ASKS = ("do you know what i said first", "what did i first say")
LAST_ASKS = (
    "what did i just say", "what was the last thing i said", "tell me what i just said", "do you remember what i just said",
    "can you tell me what i just said", "tell me what i said last", "what was it that i just said",
    "do you know what i said last",
    "do you know the last thing i said", "tell me the last thing i said",
)  # fmt: skip
NEW_LAST_ASKS = ("do you know what i just said", "what did i say last")


def converse(rng: Random, split: Drawn, filler: Filler) -> list[Exchange]:
    """A dialogue whose last question can only be answered from what came before it."""
    kind = rng.choices((_recall, _recall_one_of_two, _untold, _quote), weights=(3, 2, 1, 2))[0]
    return kind(rng, split, filler)


def _recall(rng: Random, split: Drawn, filler: Filler) -> list[Exchange]:
    fact = rng.choice(FACTS)
    tell, value = _tell(rng, split, fact)
    return [tell, *_gap(rng, filler), _ask(rng, split, fact, value)]


def _recall_one_of_two(rng: Random, split: Drawn, filler: Filler) -> list[Exchange]:
    facts = rng.sample(FACTS, 2)
    told = [_tell(rng, split, fact) for fact in facts]
    asked = rng.randrange(2)
    return [*(tell for tell, _ in told), *_gap(rng, filler), _ask(rng, split, facts[asked], told[asked][1])]


def _untold(rng: Random, split: Drawn, filler: Filler) -> list[Exchange]:
    """Sometimes another fact was told: having been told something is not having been told this."""
    fact, other = rng.sample(FACTS, 2)
    before = [_tell(rng, split, other)[0]] if rng.random() < 0.5 else _gap(rng, filler)
    return [*before, Exchange(question=_asked(rng, split, fact.asks, fact.new_asks), answer=fact.untold, is_new_answer=False)]


def _quote(rng: Random, split: Drawn, filler: Filler) -> list[Exchange]:
    def short() -> Exchange:
        if split == "invented" and rng.random() < NONSENSE_SHARE:
            return Exchange(question=nonsense(rng, MAX_QUOTED_WORDS), answer=DONT_KNOW, is_new_answer=False)
        exchange = _tell(rng, split, rng.choice(FACTS))[0] if rng.random() < 0.4 else filler()
        return exchange if len(exchange.question.split()) <= MAX_QUOTED_WORDS else short()

    said = [short() for _ in range(rng.choice((1, 2, 2, 3)))]
    is_first = rng.random() < 0.7
    quoted = said[0 if is_first else -1].question
    asks, new_asks = (FIRST_ASKS, NEW_FIRST_ASKS) if is_first else (LAST_ASKS, NEW_LAST_ASKS)
    question = _asked(rng, split, asks, new_asks)
    return [*said, Exchange(question=question, answer=f"you said {quoted}", is_new_answer=split == "held_out")]


def _gap(rng: Random, filler: Filler) -> list[Exchange]:
    return [filler() for _ in range(rng.choice(GAPS))]


def _tell(rng: Random, split: Drawn, fact: Fact) -> tuple[Exchange, str]:
    ask, row = fact.tell.pick(rng, split)
    return fact.tell.exchange(ask, row), row["value"]


def _ask(rng: Random, split: Drawn, fact: Fact, value: str) -> Exchange:
    is_new = {"value": value} in fact.tell.new_rows
    question = _asked(rng, split, fact.asks, fact.new_asks)
    return Exchange(question=question, answer=fact.recalled.format(value=value), is_new_answer=is_new)


def _asked(rng: Random, split: Drawn, asks: Sequence[str], new_asks: Sequence[str]) -> str:
    return rng.choice(new_asks if split == "held_out" else asks)
