"""Counts of drafts that a worker's engine verified, as workers publish them, and the drafters of a
fleet as readers see them.
"""

import msgspec

from fleet.core.ids import StageName, WorkerId

OFF = "off"
"""In place of a drafter's name: none."""
NGRAM, SUFFIX, EAGLE3 = "ngram", "suffix", "eagle3"
DRAFTERS = (NGRAM, SUFFIX, EAGLE3)
AUTO = "auto"
"""In place of a drafter's name: the fastest at present, by measure; maybe none."""
CONFIGURED = "configured"
"""In an operator's order, in place of a drafter's name: the one that the configuration names."""
ORDERS = (OFF, *DRAFTERS, AUTO, CONFIGURED)
"""The orders of an operator."""


class SpeculationFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the drafter is in use; `drafter` is its name, or `off`.

    `automatic`: the drafter was chosen by measured speed, and the counts include its earlier uses.
    `num_draws`: steps of one request that ended in a sampled token, with or without drafts.
    `gains`: tokens/s with a drafter relative to tokens/s without, in decode steps; with
    `automatic`, of each drafter at its last trial. `drafted`, `accepted`: counts by position of the
    draft, from the first on; a draft counts as accepted if all drafts before it were, too.
    `version`: version of the draft head; 0 for the configured one, or none. `failed`: the drafter
    whose `failure` ended drafting.
    """

    drafter: str
    automatic: bool = False
    num_draws: int = 0
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    gains: dict[str, float] = {}
    version: int = 0
    failed: str = ""
    failure: str = ""

    @property
    def ordered(self) -> str:
        """The order that it follows: a drafter's name, `off` or `auto`."""
        return AUTO if self.automatic else self.drafter

    @property
    def acceptance_length(self) -> float | None:
        """Mean number of tokens of one request in one pass; None before the first one."""
        return 1 + sum(self.accepted) / self.num_draws if self.num_draws else None

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of the drafts at each position that were accepted; positions without drafts are
        left out.
        """
        return tuple(
            accepted / drafted
            for accepted, drafted in zip(self.accepted, self.drafted, strict=True)
            if drafted
        )


class WorkerDrafts(msgspec.Struct, frozen=True, kw_only=True):
    """The drafts of one worker. `acceptance_length`: mean tokens of one request in one pass; None
    before the first one.
    """

    worker: WorkerId
    acceptance_length: float | None
    figures: SpeculationFigures


class StageDrafts(msgspec.Struct, frozen=True, kw_only=True):
    """The drafter that the configuration names for a stage, the one that an operator chose instead
    ("": none), and its workers.

    A worker follows a choice within a second.
    """

    stage: StageName
    configured: str
    chosen: str
    workers: tuple[WorkerDrafts, ...]
