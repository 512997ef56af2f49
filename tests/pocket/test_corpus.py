"""Dialogues of Pocket's training corpus: balanced, reproducible, correct, short, and without
held-out texts in training.
"""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from random import Random

import pytest

from fleet.lab.pocket.corpus import (
    ChatTurn,
    Dialogue,
    Split,
    dialogues,
    encode,
    families,
    is_right,
    memory,
    sentences,
)
from fleet.lab.pocket.corpus.dialogue import Exchange
from fleet.lab.pocket.corpus.families import TABLES, list_exchanges
from fleet.lab.pocket.corpus.salad import repeat, salad
from fleet.lab.pocket.corpus.text import number

pytestmark = pytest.mark.one_file_in(3, "making of Pocket")

NUM_DRAWN = 9_000
MAX_ANSWER_WORDS, MAX_QUESTION_WORDS = 12, 12
SPLITS: tuple[Split, ...] = ("train", "held_out")
VALUE_OF = {number(value): value for value in range(1000)}
ALL_TABLES = [
    *(table for tables in TABLES.values() for table in tables),
    *(fact.statements for fact in memory.FACTS),
]


def exchanges_of(*splits: Split) -> list[Exchange]:
    """Return every question-and-answer exchange of the tables that need no memory of earlier
    turns.
    """
    return [each for split in splits for family in TABLES for each in list_exchanges(split, family)]


@pytest.fixture(scope="module", params=SPLITS)
def drawn(request: pytest.FixtureRequest) -> list[Dialogue]:
    return list(dialogues(request.param, NUM_DRAWN, seed=1))


def texts(split: Split, role: str | None = None) -> Iterator[str]:
    """Yield sentences of the split: all of its tables, and many random ones of dialogues that
    cannot be listed. `role`: only this role's sentences.
    """
    turns = (turn for dialogue in dialogues(split, NUM_DRAWN, seed=2) for turn in dialogue.turns)
    yield from (turn.text for turn in turns if role in (None, turn.role))
    statements = [
        exchange for fact in memory.FACTS for exchange in fact.statements.exchanges(split)
    ]
    for exchange in [*statements, *exchanges_of(split)]:
        yield exchange.question
        if role is None:
            yield exchange.answer


def test_families_are_drawn_equally_often(drawn: list[Dialogue]) -> None:
    counts = Counter(dialogue.family for dialogue in drawn)
    assert set(counts) == set(families())
    assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize("split", SPLITS)
def test_dialogues_depend_on_seed_only(split: Split) -> None:
    whole = list(dialogues(split, 60, seed=3))
    assert list(dialogues(split, 40, seed=3)) == whole[:40]
    assert list(dialogues(split, 60, seed=4)) != whole
    assert list(sentences(split, 60, seed=3)) == list(islice(sentences(split, 90, seed=3), 60))


def test_dialogue_alternates_from_user_to_assistant(drawn: list[Dialogue]) -> None:
    for dialogue in drawn:
        roles = [turn.role for turn in dialogue.turns]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
    assert {len(dialogue.turns) // 2 for dialogue in drawn} >= {1, 2, 3, 4}


def test_turns_are_short_spoken_text(drawn: list[Dialogue]) -> None:
    for turn in (turn for dialogue in drawn for turn in dialogue.turns):
        limit = MAX_ANSWER_WORDS if turn.role == "assistant" else MAX_QUESTION_WORDS
        assert encode(turn.text) and len(turn.text.split()) <= limit, turn


def test_held_out_user_turns_are_not_in_training() -> None:
    assert set(texts("train")).isdisjoint(texts("held_out", "user"))


def test_held_out_sentences_are_not_in_training() -> None:
    trained = set(sentences("train", NUM_DRAWN, seed=5)) | set(texts("train"))
    assert trained.isdisjoint(sentences("held_out", NUM_DRAWN, seed=5))
    held_out = set(texts("held_out", "user")) | set(sentences("held_out", NUM_DRAWN, seed=6))
    assert held_out.isdisjoint(sentences("train", NUM_DRAWN, seed=7))


def test_new_answers_are_not_in_training() -> None:
    trained = {text for each in exchanges_of("train") for text in (each.question, each.answer)}
    new = {each.answer for each in exchanges_of("held_out") if each.is_new_answer}
    assert len(new) > 100
    assert trained.isdisjoint(new)


def test_held_out_phrasings_use_training_words() -> None:
    known = {word for text in texts("train") for word in text.split()}
    asks = [ask for table in ALL_TABLES for ask in table.new_asks]
    asks += [ask for fact in memory.FACTS for ask in fact.new_asks] + [
        *memory.FIRST_QUOTE.new_asks,
        *memory.LAST_QUOTE.new_asks,
    ]
    unknown = {word for ask in asks for word in re.sub(r"\{\w+\}", "", ask).split()} - known
    assert not unknown


def test_rule_tables_have_training_and_held_out_rows() -> None:
    for table in ALL_TABLES:
        assert len(table.known_rows) + len(table.new_rows) == len(table.rows)
        assert not table.by_rule or len(table.known_rows) >= 5 * len(table.new_rows) > 0, (
            table.asks[0]
        )


def test_question_has_one_answer() -> None:
    answers: dict[str, str] = {}
    for exchange in exchanges_of(*SPLITS):
        assert answers.setdefault(exchange.question, exchange.answer) == exchange.answer, (
            exchange.question
        )


def test_sums_are_correct() -> None:
    operations = {"plus": int.__add__, "minus": int.__sub__, "times": int.__mul__}
    num_checked = 0
    for exchange in (each for split in SPLITS for each in list_exchanges(split, "sums")):
        if found := re.fullmatch(r"(.+) (plus|minus|times) (.+) is (.+)", exchange.answer):
            left, operation, right, result = found.groups()
            assert operations[operation](VALUE_OF[left], VALUE_OF[right]) == VALUE_OF[result]
        else:
            more, less = exchange.answer.split(" is bigger than ")
            assert VALUE_OF[more] > VALUE_OF[less]
        num_checked += 1
    assert num_checked > 5000


def test_hours_wrap_around_the_clock() -> None:
    for exchange in list_exchanges("train", "times"):
        if found := re.fullmatch(
            r"(.+) hours? (after|before) (.+) o'clock is (.+) o'clock", exchange.answer
        ):
            gap, way, start, end = found.groups()
            moved = VALUE_OF[start] + VALUE_OF[gap] * (1 if way == "after" else -1)
            assert (moved - VALUE_OF[end]) % 12 == 0


def test_spelling_lists_the_letters_of_the_word() -> None:
    for exchange in list_exchanges("train", "spelling"):
        word = exchange.question.split()[-1]
        if exchange.question.startswith("spell "):
            assert exchange.answer.replace(" ", "") == word


def test_memory_answers_follow_from_earlier_turns(drawn: list[Dialogue]) -> None:
    seen: Counter[str] = Counter()
    for dialogue in drawn:
        if dialogue.family != "memory":
            continue
        utterances = [turn.text for turn in dialogue.turns[:-2] if turn.role == "user"]
        answer = dialogue.turns[-1].text
        if answer.startswith("you said "):
            is_first = "first" in dialogue.turns[-2].text
            assert answer == f"you said {utterances[0 if is_first else -1]}"
            seen["quoted"] += 1
        elif answer in {fact.untold for fact in memory.FACTS}:
            assert not stated(
                utterances, next(fact for fact in memory.FACTS if fact.untold == answer)
            )
            seen["untold"] += 1
        else:
            assert any(
                answer == fact.recalled.format(value=value)
                for fact in memory.FACTS
                for value in stated(utterances, fact)
            )
            seen["recalled"] += 1
    assert min(seen[kind] for kind in ("quoted", "untold", "recalled")) > 50


def stated(utterances: list[str], fact: memory.Fact) -> set[str]:
    values = {
        ask.format_map(row): row["value"]
        for ask in (*fact.statements.asks, *fact.statements.new_asks)
        for row in fact.statements.rows
    }
    return {values[text] for text in utterances if text in values}


def test_invented_words_appear_in_slots_for_any_word() -> None:
    """Invented words appear in questions and in answers that recall, spell or repeat them; no such
    text is held out.
    """
    real = {word for text in texts("train") for word in text.split()}
    counts: Counter[str] = Counter()
    for dialogue in dialogues("invented", NUM_DRAWN, seed=2):
        invented = {
            word for turn in dialogue.turns if turn.role == "user" for word in turn.text.split()
        } - real
        answer = dialogue.turns[-1].text
        counts[dialogue.family] += bool(invented)
        counts[f"{dialogue.family} repeats"] += any(
            word in answer.split() or " ".join(word) == answer for word in invented
        )
    assert (
        min(
            counts[name]
            for name in (
                "memory",
                "memory repeats",
                "spelling",
                "spelling repeats",
                "repeat repeats",
            )
        )
        > 100
    )
    texts_drawn = {
        turn.text
        for dialogue in dialogues("invented", NUM_DRAWN, seed=3)
        for turn in dialogue.turns
    }
    assert texts_drawn.isdisjoint(texts("held_out", "user"))


@pytest.mark.parametrize("split", SPLITS)
def test_repeat_answers_with_the_text(split: Split) -> None:
    rng = Random(8)
    for exchange in (repeat(rng, split) for _ in range(500)):
        assert exchange.question.endswith(exchange.answer)


def test_salad_has_the_requested_number_of_words() -> None:
    rng = Random(9)
    assert {len(salad(rng, "train", 3, 5).split()) for _ in range(200)} == {3, 4, 5}


def test_answer_must_match_word_for_word() -> None:
    turns = (
        ChatTurn(role="user", text="what is one plus one"),
        ChatTurn(role="assistant", text="one plus one is two"),
    )
    dialogue = Dialogue(turns=turns, family="sums")
    assert is_right(dialogue, "one plus one is two")
    assert is_right(dialogue, " One plus one is: 2! ")
    assert not is_right(dialogue, "one plus one is three")
    assert not is_right(dialogue, "one plus one is two two")
    assert not is_right(dialogue, "")
