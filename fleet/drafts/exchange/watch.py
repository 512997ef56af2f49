"""Comparison of a new version of the draft head with the one before, by the guesses of this
worker's own requests.

A version that is clearly worse gives way to the one before; the script that writes it compares that
no other is in use by now.
"""

import logging
from collections.abc import Callable

from fleet.drafts.figures.speculation import EAGLE3, SpeculationFigures

log = logging.getLogger(__name__)
FEWEST_DRAFTS, MOST_DRAFTS = 200, 2000
"""Passes with guesses that a comparison needs, and after which a version is no longer compared:
traffic changes too.
"""


class HeadWatch:
    """`floor`: share of the right guesses of the version before; 0: nothing is compared.

    `roll_back` gets the present version, the one before, and the reason.
    """

    def __init__(self, floor: float, roll_back: Callable[[int, int, str], None]) -> None:
        self._floor, self._roll_back = floor, roll_back
        self._last: SpeculationFigures | None = None
        self._before: tuple[int, float] | None = None
        """The version before the present one, and its right guesses per pass with guesses."""

    def observe(self, figures: SpeculationFigures) -> None:
        """Look at the figures; called regularly. Those of other drafters than the head say
        nothing.
        """
        if figures.drafter != EAGLE3:
            return
        last, self._last = self._last, figures
        if last is not None and last.version != figures.version:
            known = _num_drafts(last) >= FEWEST_DRAFTS
            self._before = (last.version, _right_guesses(last)) if known else None
        if self._before is None or not FEWEST_DRAFTS <= _num_drafts(figures) <= MOST_DRAFTS:
            return
        (version, wanted), got = self._before, _right_guesses(figures)
        if got < self._floor * wanted:
            self._before = None
            self._roll_back(
                figures.version,
                version,
                f"{got:.2f} guesses in a row are right, with version {version} {wanted:.2f}",
            )


def _num_drafts(figures: SpeculationFigures) -> int:
    return figures.drafted[0] if figures.drafted else 0


def _right_guesses(figures: SpeculationFigures) -> float:
    return sum(figures.accepted) / max(1, _num_drafts(figures))
