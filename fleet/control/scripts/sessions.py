"""Calls of the scripts that write voice sessions and versions of the draft head."""

from collections.abc import Mapping, Sequence

from fleet.control.scripts.calls import Call, script
from fleet.core.ids import StageName, WorkerId


@script
def hold_voice(
    session: str, holder: WorkerId, keep_ms: int, owner: str, *, new: bool, bound: int
) -> Call:
    """Make `holder` the gateway that may write to a voice session. `owner`: credential that opened
    the session. `keep_ms`: time to live of the session.

    `new`: True to open a session, which must not exist yet; False to take over an existing session
    of `owner`. `bound`: largest number of open sessions of one client secret; beyond it, a new
    session replaces a session whose client is away.
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
    """Delete a voice session. `epoch`: epoch at which the caller holds it; None: by right of the
    API, whoever holds it.
    """
    ...


@script
def note_checkpoint(trainer: WorkerId, name: str) -> Call:
    """Record a training checkpoint as the last durable one. Answers "ok", or "unlisted" if the
    trainer is not registered any more or stands by, since another trainer may be active.
    """
    ...


@script
def add_version(trainer: WorkerId, sha256: str, version: bytes) -> Call:
    """Add a version of the draft head. `version`: the encoded version, with number 0. `trainer`: id
    of the trainer; "" for an operator.

    Answers the version with its number, the existing version with the same hash, or "unlisted" if
    the trainer is not registered any more or stands by.
    """
    ...


@script
def promote_version(
    worker: WorkerId, stage: StageName, expected: int | None, number: int, reason: str
) -> Call:
    """Let a stage's workers draft with version `number` of the draft head; 0 is the version at the
    start. `worker`: id of the calling worker; "" for an operator.

    `expected`: the version that must be in use now; None: any. Answers "ok", "stale" if another
    version is in use, "unknown" for a missing version, or "unlisted" if `worker` is not registered
    any more or stands by.
    """
    ...
