"""A grammar of the answers of Pocket's tables: every template, with every value in every slot.

A slot takes any value of its column regardless of the other slots, so the grammar has far more
sentences than right answers ("the opposite of hot is small"). Free texts, repeated or quoted after
the user, are not part of it.
Source: JSpeech Grammar Format, as pocketsphinx reads it.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from string import Formatter

from fleet.lab.pocket.corpus import memory
from fleet.lab.pocket.corpus.families import TABLES
from fleet.lab.pocket.corpus.table import Row

Slots = dict[str, frozenset[str]]
Template = tuple[str, Slots]
Phrase = tuple[str, ...]


@cache
def templates() -> tuple[Template, ...]:
    """Return the different answers with slots in braces, each with the values of its slots."""
    found: dict[str, Slots] = {}
    for answer, rows in _answers():
        slots = found.setdefault(answer, {})
        for name in _names(answer):
            slots[name] = slots.get(name, frozenset()) | {row[name] for row in rows}
    return tuple(found.items())


def _answers() -> Iterator[tuple[str, Iterable[Row]]]:
    yield from ((table.answer, table.rows) for tables in TABLES.values() for table in tables)
    for fact in memory.FACTS:
        yield from (
            (answer, fact.statements.rows)
            for answer in (fact.statements.answer, fact.recalled, fact.untold)
        )


def _names(answer: str) -> list[str]:
    return [name for _, name, _, _ in Formatter().parse(answer) if name]


def can_produce(text: str) -> bool:
    """Return True if `text` is a sentence of the grammar."""
    return _pattern().fullmatch(text) is not None


@cache
def _pattern() -> re.Pattern[str]:
    alternatives = (
        answer.format_map(
            {name: f"(?:{'|'.join(sorted(values))})" for name, values in slots.items()}
        )
        for answer, slots in templates()
    )
    return re.compile("|".join(alternatives))


def jsgf() -> str:
    """Return the grammar; a value list that several slots share is written once."""
    lists = sorted({values for _, slots in templates() for values in slots.values()}, key=sorted)
    rule_of = {values: f"<list{index}>" for index, values in enumerate(lists)}
    rules = [
        f"{rule_of[values]} = {_either([tuple(value.split()) for value in values])};"
        for values in lists
    ]
    answers = [
        tuple(answer.format_map({name: rule_of[values] for name, values in slots.items()}).split())
        for answer, slots in templates()
    ]
    return "\n".join(
        ["#JSGF V1.0;", "grammar pocket;", *rules, f"public <answer> = {_either(answers)};", ""]
    )


def _either(phrases: Iterable[Phrase]) -> str:
    """Return alternatives of the phrases as a prefix tree, of which the recogniser follows a tenth
    of the paths.
    """
    rests: dict[str, list[Phrase]] = {}
    for first, *rest in phrases:
        rests.setdefault(first, []).append(tuple(rest))
    parts = [f"{first}{_after(rests[first])}" for first in sorted(rests)]
    return parts[0] if len(parts) == 1 else f"({' | '.join(parts)})"


def _after(rests: Sequence[Phrase]) -> str:
    longer = [rest for rest in rests if rest]
    if not longer:
        return ""
    return f" [{_either(longer)}]" if len(longer) < len(rests) else f" {_either(longer)}"
