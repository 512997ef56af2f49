"""Interface to the training records that all trainers of a fleet share. The worker keeps them in
Redis (`fleet.drafts.exchange.records`).
"""

import logging
from typing import Protocol

from fleet.drafts.figures.training import DraftVersion

log = logging.getLogger(__name__)


class TrainingRecords(Protocol):
    """Training records of a fleet: the last durable checkpoint, and the versions of the draft head.

    Writes return None or False once another trainer is active.
    """

    def checkpoint(self) -> str:
        """Return the name of the last durable checkpoint; "" before the first one."""
        ...

    def note_checkpoint(self, name: str) -> bool:
        """Record that checkpoint `name` is the last durable one; return False if another trainer is
        active.
        """
        ...

    def add_version(self, version: DraftVersion) -> DraftVersion | None:
        """Add a version, and return it with its number. If a version with the same bytes exists,
        return the existing one.
        """
        ...

    def version_in_use(self) -> DraftVersion | None:
        """Return the version that the fleet drafts with; None if workers use the head they started
        with.
        """
        ...

    def promote(self, version: DraftVersion, present: DraftVersion | None, reason: str) -> bool:
        """Make `version` the one that the fleet drafts with, if `present` is still in use; return
        whether it is.
        """
        ...


def promote_if_better(
    records: TrainingRecords,
    version: DraftVersion,
    present: DraftVersion | None,
    present_acceptance: float,
    margin: float | None,
) -> None:
    """Promote a version if its simulated acceptance length on held-out samples exceeds
    `present_acceptance` by at least `margin`. A margin of None promotes nothing.
    """
    if margin is None or version.acceptance is None:
        return
    compared = (
        f"{version.acceptance:.2f} tokens in a row on held-out samples, version "
        f"{present.number if present is not None else 0} has {present_acceptance:.2f}"
    )
    if version.acceptance < present_acceptance + margin:
        log.info("version %d is not promoted: %s", version.number, compared)
    elif records.promote(version, present, compared):
        log.info("version %d is promoted: %s", version.number, compared)
