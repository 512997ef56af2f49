"""Language models of the evaluation's speech recogniser: pronunciations, bigrams, grammar."""

from collections import defaultdict

import pytest

from fleet.core.errors import ConfigError
from fleet.lab.pocket.corpus import dialogues, sentences
from fleet.lab.pocket.corpus.families import TABLES
from fleet.lab.pocket.judge.language import END, START, arpa, can_produce, jsgf, templates
from fleet.lab.pocket.judge.questions import distinct
from fleet.lab.pocket.judge.words import (
    MISSING,
    TEACHER_PRONUNCIATION,
    dictionary_text,
    known_words,
    unsayable,
)


def test_recogniser_has_every_corpus_word() -> None:
    words = {
        word
        for split in ("train", "held_out")
        for text in sentences(split, 3000, 9)
        for word in text.split()
    }
    assert words <= set(known_words())
    assert unsayable(known_words()) == []
    lines = dictionary_text(known_words()).splitlines()
    assert {"a AH", "a(2) EY", "oink OY NG K"} <= set(lines)
    assert {line.split()[0].partition("(")[0] for line in lines} == set(known_words())


def test_own_pronunciations_cover_missing_words_only() -> None:
    with pytest.raises(ConfigError, match="no pronunciation of flurb"):
        dictionary_text(["cat", "flurb"])
    assert all(word in known_words() for word in MISSING)


def test_teacher_pronunciation_is_added_to_the_dictionary() -> None:
    assert set(TEACHER_PRONUNCIATION) <= set(known_words())
    lines = dictionary_text(["baa", "opposite"]).splitlines()
    assert lines == [
        "baa B IY EY EY",
        "baa(2) B AA",
        "opposite AA P AH Z AH T",
        "opposite(2) AA P Z AH T",
        "opposite(3) AA P AH Z IH T",
    ]


def test_pronunciations_are_unique() -> None:
    entries = [
        tuple(line.replace("(", " (").split(" "))
        for line in dictionary_text(known_words()).splitlines()
    ]
    pronunciations = [
        (entry[0], *(part for part in entry[1:] if not part.startswith("("))) for entry in entries
    ]
    assert len(pronunciations) == len(set(pronunciations))


def test_bigram_probabilities_sum_to_one() -> None:
    vocabulary = ["a", "b", "c", "never"]
    model = arpa(["a b", "a c", "a b c", "b"], vocabulary)
    probability, backoffs, pairs = _read(model)
    words = [*vocabulary, END]
    assert sum(probability[word] for word in words) == pytest.approx(1, abs=1e-3)
    for first in (START, *vocabulary):
        after_first = {
            word: pairs[first].get(word, backoffs[first] * probability[word]) for word in words
        }
        assert sum(after_first.values()) == pytest.approx(1, abs=2e-3), first
    assert (
        probability["never"] > 0
        and pairs["a"]["b"] > pairs["a"]["c"] > backoffs["a"] * probability["never"]
    )


def _read(model: str) -> tuple[dict[str, float], dict[str, float], dict[str, dict[str, float]]]:
    probability: dict[str, float] = {}
    backoffs: dict[str, float] = {}
    pairs: defaultdict[str, dict[str, float]] = defaultdict(dict)
    unigrams, bigrams = model.split("\\1-grams:")[1].split("\\2-grams:")
    for line in unigrams.strip().splitlines():
        log, word, backoff = line.split()
        probability[word], backoffs[word] = 10 ** float(log), 10 ** float(backoff)
    for line in bigrams.replace("\\end\\", "").strip().splitlines():
        log, first, second = line.split()
        pairs[first][second] = 10 ** float(log)
    return probability, backoffs, pairs


def test_grammar_accepts_answers_of_both_splits() -> None:
    for split in ("train", "held_out"):
        for family, tables in TABLES.items():
            answers = {exchange.answer for table in tables for exchange in table.exchanges(split)}
            assert not [answer for answer in answers if not can_produce(answer)], family


def test_grammar_accepts_wrong_values_but_no_free_text() -> None:
    for text in (
        "the opposite of hot is small",
        "two plus two is thirty one",
        "your name is peter",
        "a cow says woof",
    ):
        assert can_produce(text), text
    for text in (
        "the opposite of hot",
        "two plus two is a cow",
        "your name is peter and paul",
        "say hello",
    ):
        assert not can_produce(text), text
    free = [text for text in sentences("held_out", 400, 2) if can_produce(text)]
    assert len(free) < 100
    quoted = [
        d.turns[-1].text
        for d in dialogues("held_out", 800, 2)
        if d.turns[-1].text.startswith("you said")
    ]
    assert quoted and not any(map(can_produce, quoted))


def test_grammar_lists_the_values_of_slots_once() -> None:
    """The grammar has a line for each list of slot values, and one for the templates."""
    lines = jsgf().splitlines()
    lists = {values for _, slots in templates() for values in slots.values()}
    assert len(lines) == len(lists) + 3
    assert "the (capital of" not in jsgf() or "paris" not in lines[-1]


def test_questions_are_unique() -> None:
    questions = distinct(300, seed=4)
    assert len({dialogue.turns for dialogue in questions}) == 300
    assert distinct(100, seed=4) == questions[:100]
    assert distinct(300, seed=5) != questions
    memory = distinct(40, 4, lambda dialogue: dialogue.family == "memory")
    assert len(memory) == 40 and {dialogue.family for dialogue in memory} == {"memory"}
