"""Draft statistics that a worker publishes, and the drafters of a fleet as readers see them."""

import msgspec

from fleet.core.ids import StageName, WorkerId

OFF = "off"
"""Name used for "no drafter"."""
NGRAM, SUFFIX, EAGLE3 = "ngram", "suffix", "eagle3"
DRAFTERS = (NGRAM, SUFFIX, EAGLE3)
AUTO = "auto"
"""Name used for the drafter that is the fastest at present by measurement, which may be none."""
CONFIGURED = "configured"
"""Name used in an operator's order for the drafter that the configuration names."""
ORDERS = (OFF, *DRAFTERS, AUTO, CONFIGURED)
"""Names that an operator may order."""


class SpeculationFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Draft statistics of a worker since its present drafter came into use; `drafter` is its name,
    or `off`.

    `automatic`: the drafter was chosen by measured speed, and the counts include its earlier uses.
    `num_draws`: steps of one request that ended in a sampled token, with or without drafts.
    `drafted`, `accepted`: number of drafts by position in a step; a draft counts as accepted if all
    drafts before it were accepted too. `gains`: tokens/s with a drafter divided by tokens/s
    without, in decode steps; with `automatic`, for each drafter at its last trial. `version`:
    version of the draft head; 0 for the configured head, or none. `head_sha256`: hash of that
    version's weights, by which versions are compared; "" for version 0. `failed`: drafter that was
    switched off by the error `failure`.
    """

    drafter: str
    automatic: bool = False
    num_draws: int = 0
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    gains: dict[str, float] = {}
    version: int = 0
    head_sha256: str = ""
    failed: str = ""
    failure: str = ""

    @property
    def ordered(self) -> str:
        """The order that the worker follows: a drafter's name, `off` or `auto`."""
        return AUTO if self.automatic else self.drafter

    @property
    def acceptance_length(self) -> float | None:
        """Mean number of tokens per request and step, including the sampled one; None before the
        first step.
        """
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
    """Draft statistics of one worker. `acceptance_length`: mean number of tokens per request and
    step; None before the first step.
    """

    worker: WorkerId
    acceptance_length: float | None
    figures: SpeculationFigures


class StageDrafts(msgspec.Struct, frozen=True, kw_only=True):
    """Drafters of a stage: the configured one, the one that an operator chose instead ("" for
    none), and the statistics of its workers.

    Workers follow an operator's choice within a second.
    """

    stage: StageName
    configured: str
    chosen: str
    workers: tuple[WorkerDrafts, ...]
