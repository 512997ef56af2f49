"""Backlog of a draft head: hidden states that it has not read while no drafts were wanted."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from fleet.core.ids import RequestId
from fleet.drafts.drafters import AskedDraft, ComputedRows
from fleet.drafts.eagle3.drafter import HeadDrafter
from fleet.drafts.pass_costs import PassTimes
from fleet.engine.torch.kv_pool import PageTable

REQUEST = RequestId("r")


class OneRequest:
    """A request whose steps a drafter observes, and the drafter's backlog, of which a row takes a
    second to read.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(PassTimes, "of", lambda _, number: float(number))
        self.drafter = HeadDrafter(
            cast(Any, object()),
            cast(Any, SimpleNamespace(shape=SimpleNamespace(num_layers=3))),
            torch.relu,
        )
        self.task: Any = SimpleNamespace(answer_ids=[], num_rows=0)

    def compute(self, rows: Sequence[int], *, draws: int) -> None:
        """Report a step to the drafter that computed `rows` and then sampled `draws` tokens."""
        self.task.answer_ids += [1] * draws
        self.task.num_rows = rows[-1] + 1 + draws
        computed = ComputedRows(
            request=REQUEST,
            task=self.task,
            table=cast(PageTable, None),
            start=rows[0],
            stop=rows[-1] + 1,
            features_NT=torch.zeros(len(rows), 1),
        )
        self.drafter.on_computed([computed])

    def backlog(self) -> float:
        return self.drafter.expected_backlog_s(
            [AskedDraft(request=REQUEST, task=self.task, table=cast(PageTable, None), most=3)]
        )


def test_backlog_has_the_prompt_and_all_passes_but_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = OneRequest(monkeypatch)
    assert one.backlog() == 0
    one.compute(range(4), draws=1)
    assert one.backlog() == 4, "the prompt"
    one.compute([4], draws=1)
    assert one.backlog() == 4
    one.compute([5, 6], draws=2)
    assert one.backlog() == 5


def test_rows_of_the_last_pass_alone_are_no_backlog(monkeypatch: pytest.MonkeyPatch) -> None:
    one = OneRequest(monkeypatch)
    one.compute(range(7), draws=1)
    one.drafter.forget_requests()
    one.compute([7, 8], draws=2)
    assert one.backlog() == 0


def test_request_that_has_ended_has_no_backlog(monkeypatch: pytest.MonkeyPatch) -> None:
    one = OneRequest(monkeypatch)
    one.compute(range(7), draws=1)
    one.drafter.close(REQUEST)
    assert one.backlog() == 0
