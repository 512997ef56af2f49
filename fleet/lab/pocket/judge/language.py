"""Language models for the speech recogniser: bigrams of Pocket's training sentences in the ARPA
format, and a grammar of its tables' answers, with every value in every slot.

A slot takes any value of its column regardless of the other slots, so the grammar has far more
sentences than right answers ("the opposite of hot is small"). Free texts, repeated or quoted after
the user, are not part of the grammar.
Source: Witten and Bell 1991, interpolated: the more different words follow a word, the likelier is
a new one after it; JSpeech Grammar Format, as pocketsphinx reads it.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from string import Formatter

from fleet.lab.pocket.corpus import memory
from fleet.lab.pocket.corpus.families import TABLES
from fleet.lab.pocket.corpus.table import Row

START, END = "<s>", "</s>"
_NEVER = -99.0


def arpa(sentences: Iterable[str], vocabulary: Sequence[str]) -> str:
    """Return a bigram model of the sentences in ARPA format. Every word of `vocabulary` can follow
    every other, including words in no sentence.

    Invariants: the probabilities after a word sum to 1; every word of the sentences is in
    `vocabulary`.
    """
    bigrams: Counter[tuple[str, str]] = Counter()
    for sentence in sentences:
        words = [START, *sentence.split(), END]
        bigrams.update(zip(words, words[1:], strict=False))
    unigrams: Counter[str] = Counter(dict.fromkeys((*vocabulary, END), 1))
    num_after: Counter[str] = Counter()
    num_kinds = Counter(first for first, _ in bigrams)
    for (first, second), count in bigrams.items():
        unigrams[second] += count
        num_after[first] += count
    total = unigrams.total()
    probability = {word: count / total for word, count in unigrams.items()}
    backoff = {
        word: num_kinds[word] / (num_after[word] + num_kinds[word]) if num_after[word] else 1.0
        for word in (START, *probability)
    }

    def smoothed(first: str, second: str, count: int) -> float:
        return (count + num_kinds[first] * probability[second]) / (
            num_after[first] + num_kinds[first]
        )

    lines = [
        f"{_log(probability.get(word, 0))} {word} {_log(backoff[word])}" for word in sorted(backoff)
    ]
    pairs = [
        f"{_log(smoothed(first, second, count))} {first} {second}"
        for (first, second), count in sorted(bigrams.items())
    ]
    head = ["\\data\\", f"ngram 1={len(lines)}", f"ngram 2={len(pairs)}", ""]
    return "\n".join([*head, "\\1-grams:", *lines, "", "\\2-grams:", *pairs, "", "\\end\\", ""])


def _log(value: float) -> str:
    return f"{math.log10(value) if value else _NEVER:.4f}"


Slots = dict[str, frozenset[str]]
Template = tuple[str, Slots]
Phrase = tuple[str, ...]


@cache
def templates() -> tuple[Template, ...]:
    """Return the different answer templates, with slots in braces, each with the values of its
    slots.
    """
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
    """Return True if `text` is a sentence of the grammar of Pocket's answers."""
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
    """Return the grammar in JSpeech Grammar Format; a value list shared by several slots is written
    once.
    """
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
    """Return a grammar expression for alternative phrases, as a prefix tree: the recogniser then
    follows a tenth of the paths.
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
