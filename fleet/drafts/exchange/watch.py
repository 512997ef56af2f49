"""Comparison of a new version of the draft head with the version before, by the drafts of this
worker's own requests. Pure.
"""

from dataclasses import dataclass

from fleet.drafts.figures.speculation import EAGLE3, SpeculationFigures

FEWEST_DRAFTS, MOST_DRAFTS = 200, 2000
"""Drafted steps that a comparison needs, and drafted steps after which a version is no longer
compared, because traffic changes too.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RollBack:
    """Advice to return from `version` of the draft head, in use, to the version `before`, with the
    hashes of their weights.
    """

    version: int
    before: int
    sha256: str
    sha256_before: str
    reason: str


class HeadWatch:
    """Detects versions of the draft head that are worse than the version before. Versions are
    compared by the hash of their weights.

    `floor`: least ratio of accepted drafts per drafted step, new version to the version before; 0
    switches the comparison off.
    """

    def __init__(self, floor: float) -> None:
        self._floor = floor
        self._last: SpeculationFigures | None = None
        self._before: SpeculationFigures | None = None
        """The last statistics of the version before the present one; None if they do not exist, if
        they counted fewer than `FEWEST_DRAFTS` drafted steps, or after a roll-back was returned.
        """

    def observe(self, figures: SpeculationFigures) -> RollBack | None:
        """Compare the present version with the one before; return a roll-back if it is worse, else
        None. Called regularly, with cumulative counts; statistics of other drafters than the draft
        head are ignored. A roll-back is returned once.
        """
        if figures.drafter != EAGLE3:
            return None
        last, self._last = self._last, figures
        if last is not None and last.head_sha256 != figures.head_sha256:
            self._before = last if _num_drafts(last) >= FEWEST_DRAFTS else None
        before = self._before
        if before is None or not FEWEST_DRAFTS <= _num_drafts(figures) <= MOST_DRAFTS:
            return None
        wanted, accepted = _num_accepted(before), _num_accepted(figures)
        if accepted >= self._floor * wanted:
            return None
        self._before = None
        return RollBack(
            version=figures.version,
            before=before.version,
            sha256=figures.head_sha256,
            sha256_before=before.head_sha256,
            reason=f"{accepted:.2f} guesses in a row are right, with version {before.version} "
            f"{wanted:.2f}",
        )


def _num_drafts(figures: SpeculationFigures) -> int:
    return figures.drafted[0] if figures.drafted else 0


def _num_accepted(figures: SpeculationFigures) -> float:
    return sum(figures.accepted) / max(1, _num_drafts(figures))
