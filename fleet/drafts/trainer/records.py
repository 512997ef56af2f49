"""Facts of training that the whole fleet shares, as the trainer reads and writes them. The worker
keeps them in Redis (`fleet.drafts.exchange.records`).
"""

import logging
from typing import Protocol

from fleet.drafts.figures.training import DraftVersion

log = logging.getLogger(__name__)


class TrainingRecords(Protocol):
    """Writes are refused, with None or False, once another trainer is active."""

    def checkpoint(self) -> str:
        """Return the name of the last durable checkpoint; "" before the first one."""
        ...

    def note_checkpoint(self, name: str) -> bool:
        """Make a checkpoint the last durable one."""
        ...

    def add_version(self, version: DraftVersion) -> DraftVersion | None:
        """Add a version, and return it with its number. A version of the same bytes is returned as
        it is.
        """
        ...

    def version_in_use(self) -> DraftVersion | None:
        """Return the version that the fleet drafts with; None for the workers' first head."""
        ...

    def promote(self, version: DraftVersion, present: DraftVersion | None, reason: str) -> bool:
        """Let the fleet draft with a version, if `present` is still in use."""
        ...


def promote_if_better(
    records: TrainingRecords,
    version: DraftVersion,
    present: DraftVersion | None,
    present_acceptance: float,
    margin: float | None,
) -> None:
    """Promote a version whose simulated acceptance length on held-out samples is longer than the
    present version's by the margin; None promotes no version.
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
