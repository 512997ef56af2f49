"""A stage in one process: answers the same requests with each drafter, and times each run. Knows no
model.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fleet.config import FleetConfig
from fleet.core.request import RequestSpec
from fleet.drafts.drafters import (
    NUM_PROMPT_IDS,
    AnswerTable,
    Drafter,
    MatchedProposer,
    MatchingDrafter,
    NgramDrafter,
    Proposer,
)
from fleet.drafts.figures.speculation import EAGLE3, NGRAM, OFF, SUFFIX, SpeculationFigures
from fleet.drafts.speculation import Speculation
from fleet.engine.torch.lm_engine import LMEngine
from fleet.lab.measure.engine_answers import Answers, answer
from fleet.lab.measure.speculation import DraftedRuns, SpeculationWork
from fleet.stages.base import BuiltStage
from fleet.worker.main import build_stage


class ReadDrafter(MatchingDrafter):
    """Drafter that matches against a fixed table of served answers. New answers are not added, so
    that no round profits from an earlier one.
    """

    def __init__(self, table: AnswerTable) -> None:
        super().__init__()
        self._table = table

    def open(self, prompt_ids: Sequence[int]) -> Proposer:
        return MatchedProposer(prompt_ids, self._table)


@dataclass(slots=True)
class _Runs:
    """Accumulated results of one drafter at one batch size."""

    tokens_per_s: list[float] = field(default_factory=list[float])
    num_equal: int = 0
    num_answers: int = 0
    figures: list[SpeculationFigures] = field(default_factory=list[SpeculationFigures])


def measure(config: FleetConfig, work: SpeculationWork) -> list[DraftedRuns]:
    """Answer the requests with each drafter at each batch size, round by round; return the
    results.
    """
    stage = next(stage for stage in config.graph_declaration().stages if stage.verifies_drafts)
    torch.set_num_threads(config.stage(stage.name).threads)
    built, table = (
        build_stage(config, stage.name, Path(config.checkpoint)),
        AnswerTable(sys.maxsize),
    )
    assert isinstance(built.engine, LMEngine), "the engine torch"
    for spec, its in zip(work.taught, answer(built, work.taught, max(work.batches)), strict=True):
        table.add([*spec.prompt_ids[-NUM_PROMPT_IDS:], *its])
    print("taught")
    assert isinstance(built.engine.speculation, Speculation), "a stage that verifies drafts"
    head = built.engine.speculation.drafter_of(EAGLE3)
    assert head is not None, "a configured head"
    drafters: dict[str, Drafter] = {NGRAM: NgramDrafter(), SUFFIX: ReadDrafter(table), EAGLE3: head}
    speculation = Speculation(drafters, OFF, config.stage(stage.name).speculation.num_drafts)
    built.engine.speculation = speculation
    reported: list[DraftedRuns] = []
    for batch in work.batches:
        runs = {name: _Runs() for name in (OFF, *drafters)}
        speculation.use(OFF)
        expected = answer(built, work.asked, batch)
        _run_round(
            built, speculation, work.asked, batch, {name: _Runs() for name in runs}, expected
        )
        for number in range(work.rounds_of(batch)):
            in_turn = dict(reversed(runs.items())) if number % 2 else runs
            _run_round(built, speculation, work.asked, batch, in_turn, expected)
            print(f"batch {batch}")
        for name, one in runs.items():
            reported.append(_reported(config.numerics, name, batch, one))
    return reported


def _run_round(
    built: BuiltStage,
    speculation: Speculation,
    asked: Sequence[RequestSpec],
    batch: int,
    runs: dict[str, _Runs],
    expected: Answers,
) -> None:
    """Answer `asked` with each drafter in turn, add the results to `runs`, and compare the answers
    with `expected`.
    """
    for name, one in runs.items():
        speculation.use(name)
        began_s = time.perf_counter()
        answers = answer(built, asked, batch)
        one.tokens_per_s.append(sum(map(len, answers)) / (time.perf_counter() - began_s))
        one.num_equal += sum(mine == other for mine, other in zip(answers, expected, strict=True))
        one.num_answers += len(answers)
        one.figures.append(speculation.figures())


def _reported(numerics: str, drafter: str, batch: int, runs: _Runs) -> DraftedRuns:
    num_draws = sum(one.num_draws for one in runs.figures)
    drafted = [sum(counts) for counts in zip(*(one.drafted for one in runs.figures), strict=True)]
    accepted = [sum(counts) for counts in zip(*(one.accepted for one in runs.figures), strict=True)]
    total = SpeculationFigures(
        drafter=drafter, num_draws=num_draws, drafted=tuple(drafted), accepted=tuple(accepted)
    )
    return DraftedRuns(
        numerics=numerics,
        drafter=drafter,
        batch=batch,
        tokens_per_s=tuple(runs.tokens_per_s),
        acceptance_length=total.acceptance_length or 1.0,
        shares=total.shares,
        num_equal=runs.num_equal,
        num_answers=runs.num_answers,
    )
