"""The families of questions that stand alone, by name, and everything that their tables can say."""

from collections.abc import Iterator
from functools import cache

from fleet.pocket.corpus import knowledge, memory, rules, smalltalk
from fleet.pocket.corpus.dialogue import Exchange, Split
from fleet.pocket.corpus.table import Table

TABLES: dict[str, tuple[Table, ...]] = {
    "greetings": smalltalk.GREETINGS,
    "itself": smalltalk.ITSELF,
    "sums": rules.SUMS,
    "counting": rules.COUNTING,
    "calendar": rules.CALENDAR,
    "times": rules.TIMES,
    "colours": knowledge.COLOURS,
    "opposites": knowledge.OPPOSITES,
    "spelling": rules.SPELLING,
    "facts": knowledge.FACTS,
    "unknown": smalltalk.UNKNOWN,
}


def listed(split: Split, family: str) -> Iterator[Exchange]:
    """Every exchange of the family's tables."""
    return (exchange for table in TABLES[family] for exchange in table.exchanges(split))


@cache
def known_sentences() -> frozenset[str]:
    """Every sentence of training that is written in a table, memory's included."""
    exchanges = [exchange for family in TABLES for exchange in listed("train", family)]
    exchanges += [exchange for fact in memory.FACTS for exchange in fact.tell.exchanges("train")]
    asked = {ask for fact in memory.FACTS for ask in fact.asks} | {*memory.FIRST_ASKS, *memory.LAST_ASKS}
    recalled = {fact.recalled.format_map(row) for fact in memory.FACTS for row in fact.tell.known_rows}
    untold = {fact.untold for fact in memory.FACTS}
    said = {text for exchange in exchanges for text in (exchange.question, exchange.answer)}
    return frozenset(said | asked | recalled | untold)
