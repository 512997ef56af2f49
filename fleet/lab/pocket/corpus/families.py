"""Families of questions that need no earlier turn, by name, and the exchanges that their tables
(`data/tables.yaml`) contain.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from fleet.lab.pocket.corpus import memory
from fleet.lab.pocket.corpus.dialogue import Exchange, Split
from fleet.lab.pocket.corpus.rules import RULES, SPELLED, WORD_RULES
from fleet.lab.pocket.corpus.table import Row, Table
from fleet.lab.pocket.corpus.words import WORDS, read_data


def _table(entry: Mapping[str, Any]) -> Table:
    of_word = WORD_RULES.get(entry.get("of_word", ""))
    by_rule = entry.get("by_rule", False) or of_word is not None
    texts = {name: entry[name] for name in ("asks", "new_asks", "answer")}
    return Table(**texts, rows=list(_rows(entry)), by_rule=by_rule, of_word=of_word)


def _rows(entry: Mapping[str, Any]) -> Iterator[Row]:
    if "rule" in entry:
        return iter(RULES[entry["rule"]]())
    if "of_word" in entry:
        return map(WORD_RULES[entry["of_word"]], SPELLED)
    if "words" in entry:
        return ({slot: word} for slot, name in entry["words"].items() for word in WORDS[name])
    slots, rows = entry.get("slots", []), entry.get("rows", [[]])
    orders = [slots, slots[::-1]] if "both_ways" in entry else [slots]
    return (dict(zip(order, row, strict=True)) for order in orders for row in rows)


TABLES: dict[str, tuple[Table, ...]] = {
    family: tuple(map(_table, entries)) for family, entries in read_data("tables").items()
}


def list_exchanges(split: Split, family: str) -> Iterator[Exchange]:
    """Yield every exchange of a family's tables that belongs to the split."""
    return (exchange for table in TABLES[family] for exchange in table.exchanges(split))


@cache
def known_sentences() -> frozenset[str]:
    """Return every training sentence of the tables, including the tables of `memory`."""
    exchanges = [exchange for family in TABLES for exchange in list_exchanges("train", family)]
    exchanges += [
        exchange for fact in memory.FACTS for exchange in fact.statements.exchanges("train")
    ]
    sentences = {text for exchange in exchanges for text in (exchange.question, exchange.answer)}
    sentences |= {ask for fact in memory.FACTS for ask in fact.asks} | {
        *memory.FIRST_QUOTE.asks,
        *memory.LAST_QUOTE.asks,
    }
    sentences |= {
        fact.recalled.format_map(row) for fact in memory.FACTS for row in fact.statements.known_rows
    }
    return frozenset(sentences | {fact.untold for fact in memory.FACTS})
