"""Calls of the scripts that write voice sessions and versions of the draft head."""

from collections.abc import Mapping, Sequence

from fleet.control.scripts.calls import Call, script
from fleet.core.ids import StageName, WorkerId


@script
def hold_voice(
    session: str, holder: WorkerId, keep_ms: int, owner: str, *, new: bool, bound: int
) -> Call:
    """`new`: the session must not exist yet; else it must exist and be `owner`'s. `bound`: most
    open sessions of a client secret.
    """
    ...


def save_voice(
    session: str,
    epoch: int,
    ttl_ms: int,
    owner: str,
    fields: Mapping[str, bytes],
    removed: Sequence[str],
) -> Call:
    removals = (len(removed), *removed)
    return Call.of("save_voice", session, epoch, ttl_ms, owner, removals, fields)


@script
def end_voice(session: str, epoch: int | None) -> Call:
    """`epoch` None: by right of the API, regardless of the holder."""
    ...


@script
def note_checkpoint(trainer: WorkerId, name: str) -> Call:
    """Make a checkpoint the last durable one. Answers "ok", or "unlisted" once another trainer may
    be active.
    """
    ...


@script
def add_version(trainer: WorkerId, sha256: str, version: bytes) -> Call:
    """Add a version of the draft head, encoded with number 0. `trainer`: "" for an operator.

    Answers the version with its number, the known version of the same hash, or "unlisted".
    """
    ...


@script
def promote_version(
    worker: WorkerId, stage: StageName, expected: int | None, number: int, reason: str
) -> Call:
    """Let a stage draft with another version of the draft head; 0 is the version of the start.
    `worker`: "" for an operator.

    `expected`: the present version; None: any. Answers "ok", "stale" if another version is present,
    "unknown" or "unlisted".
    """
    ...
