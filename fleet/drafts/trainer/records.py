"""Interface to the training records that all trainers of a fleet share. The worker keeps them in
Redis (`fleet.drafts.exchange.records`).
"""

import logging
from collections.abc import Sequence
from typing import Protocol

from fleet.drafts.figures.training import DraftVersion

log = logging.getLogger(__name__)


class TrainingRecords(Protocol):
    """Training records of a fleet: which trainer may write, and the versions of the draft head.
    Checkpoints are not recorded: the trainers' folder alone has them.

    Writes return None or False once another trainer is active. Any method may raise
    RedisUnreachable.
    """

    def claim(self, newest: int) -> int | None:
        """Become the trainer that writes; return the epoch, or None while another trainer may
        write. `newest`: newest epoch in the trainers' folder, which the new epoch exceeds.
        """
        ...

    def holds(self) -> bool:
        """Return True if this is still the trainer that writes, at the epoch of the last claim."""
        ...

    def versions(self) -> Sequence[DraftVersion]: ...

    def add_version(self, version: DraftVersion, newest: int) -> DraftVersion | None:
        """Record a version, and return the record with its number; None if this trainer may not
        write. If a version with the same bytes exists, return its record. A version that has a
        number keeps it, unless another version has it. `newest`: highest number that the folder
        knows, which a new number exceeds.
        """
        ...

    def forget_version(self, version: DraftVersion) -> bool:
        """Remove the record of a version and return True. Return False and remove nothing if the
        version is in use, or was in use before the present one, or this trainer may not write.
        """
        ...

    def version_in_use(self) -> DraftVersion | None:
        """Return the version that the fleet drafts with; None if workers use the head they started
        with.
        """
        ...

    def promote(self, version: DraftVersion, present: DraftVersion | None, reason: str) -> bool:
        """Make `version` the one that the fleet drafts with, if `present` (None: the head with
        which workers start) is still in use. Return True if `version` is in use now. `reason`: note
        for operators.
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
    `present_acceptance` by at least `margin`. Nothing is promoted if `margin` or the version's
    acceptance is None, or if `present` is no longer in use.
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
