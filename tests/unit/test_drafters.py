"""Draft tokens of the drafters that search for matches in the text so far."""

import random

import pytest

from fleet.drafts.drafters import (
    MAX_MATCH,
    NUM_PROMPT_IDS,
    AnswerTable,
    NgramDrafter,
    SuffixDrafter,
    longest_matches,
)


def test_ngram_continues_as_after_the_same_tokens_before() -> None:
    proposer = NgramDrafter().open([1, 2, 3, 4, 5, 9, 1, 2])
    assert proposer.propose(3) == [3, 4, 5]
    proposer.add([3])
    assert proposer.propose(2) == [4, 5]
    proposer.add([7, 8])
    assert proposer.propose(3) == []


def test_ngram_prefers_the_longest_match() -> None:
    assert NgramDrafter().open([5, 1, 2, 6, 1, 2, 7, 5, 1, 2]).propose(1) == [6]


def test_guesses_run_into_the_answer_itself() -> None:
    """Drafts of a repetition continue beyond the known tokens: the match runs into the answer
    itself.
    """
    assert NgramDrafter().open([1, 2, 1, 2, 1, 2]).propose(4) == [1, 2]


def test_suffix_takes_the_most_frequent_continuation() -> None:
    drafter = SuffixDrafter(1000)
    for answer in ([1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 5, 7], [1, 2, 5, 6]):
        drafter.learn([8, 8], answer)
    assert drafter.open([9, 9, 1, 2]).propose(2) == [5, 6]


def test_suffix_guesses_the_first_tokens_from_the_end_of_the_prompt() -> None:
    drafter = SuffixDrafter(1000)
    drafter.learn([*range(100, 120), 40, 41], [1, 2, 3])
    assert drafter.open([7, 40, 41]).propose(3) == [1, 2, 3]
    assert drafter.open([100, 101]).propose(3) == [], (
        f"only the last {NUM_PROMPT_IDS} ids of a prompt are stored"
    )


def test_aborted_answers_are_not_in_the_table() -> None:
    drafter = SuffixDrafter(1000)
    drafter.open([1, 2]).add([3, 4])
    assert drafter.open([1, 2]).propose(2) == []


@pytest.mark.parametrize("drafter", [NgramDrafter(), SuffixDrafter(10)])
def test_short_prompts_have_no_guesses(drafter: NgramDrafter | SuffixDrafter) -> None:
    assert drafter.open([]).propose(3) == [] and drafter.open([5]).propose(3) == []
    assert drafter.open([5, 5, 5]).propose(0) == ()


def test_table_drops_the_oldest_answers_and_all_that_it_has_of_them() -> None:
    rng = random.Random(1)
    table, answers = (
        AnswerTable(60),
        [rng.choices(range(4), k=rng.randint(3, 20)) for _ in range(200)],
    )
    for answer in answers:
        table.add(answer)
        assert table.num_tokens <= 60
    kept = list[list[int]]()
    while sum(map(len, kept)) + len(answers[-1 - len(kept)]) <= 60:
        kept.append(answers[-1 - len(kept)])
    pairs = {(answer[at - 2], answer[at - 1]) for answer in kept for at in range(2, len(answer))}
    found = {
        (first, second)
        for first in range(4)
        for second in range(4)
        if list(table.places([first, second]))
    }
    assert found == pairs
    table.add(list(range(61)))
    assert table.num_tokens == sum(map(len, kept)), (
        "an answer that is longer than the table is not stored"
    )


def test_longest_matches_are_kept_up_to_a_bounded_length() -> None:
    last = [9, *range(20, 20 + MAX_MATCH)]
    equal, longer, short, at_start = (
        [8, *last[1:], 1],
        [*last, 2],
        [7, 7, *last[-2:], 3],
        [*last[-2:], 4],
    )
    places = [(ids, len(ids) - 1) for ids in (short, equal, longer, at_start)]
    assert longest_matches(places, last) == places[1:3], "more equal tokens do not count"
    assert longest_matches([places[0], places[3]], last) == [places[0], places[3]]
    assert longest_matches([], last) == []
