"""What slow answers have in common: told only with enough answers to tell."""

import pytest

from fleet.core.ids import RequestId, StageName
from fleet.telemetry.trace import RequestRow, TaskBrief
from web.console.cohorts import MIN_OTHERS, MIN_SLOW, Cohort, find_cohort

GOOD, BAD = "talker@a:1:0a", "talker@b:2:0b"


def rows(count: int, worker: str, code: str = "") -> list[RequestRow]:
    task = TaskBrief(stage=StageName("talker"), state="finished", worker=worker)
    return [
        RequestRow(
            id=RequestId(f"req-{number}"),
            state="finished",
            kind="voice",
            model="m",
            created_us=1,
            code=code,
            tasks=(task,),
        )
        for number in range(count)
    ]


def test_worker_that_most_slow_answers_share_is_named() -> None:
    slow, others = rows(7, BAD) + rows(2, GOOD), rows(38, GOOD) + rows(3, BAD)
    assert find_cohort(slow, others) == Cohort(
        what="worker",
        name=BAD,
        num_sharing=7,
        num_slow=9,
        num_others_sharing=3,
        num_others=41,
    )


@pytest.mark.parametrize(
    ("slow", "others"),
    [
        (rows(MIN_SLOW - 1, BAD), rows(40, GOOD)),
        (rows(9, BAD), rows(MIN_OTHERS - 1, GOOD)),
        (rows(9, BAD), rows(20, BAD) + rows(20, GOOD)),
        (rows(4, BAD) + rows(5, GOOD), rows(40, GOOD)),
        ([], []),
    ],
    ids=["few slow", "few others", "others share it", "not most", "none"],
)
def test_nothing_is_claimed_without_enough_evidence(
    slow: list[RequestRow], others: list[RequestRow]
) -> None:
    assert find_cohort(slow, others) is None


def test_role_that_every_answer_has_is_no_claim_and_a_code_is_one() -> None:
    slow = rows(5, GOOD, "worker_lost")
    found = find_cohort(slow, rows(10, GOOD))
    assert found is not None and (found.what, found.name) == ("code", "worker_lost")
