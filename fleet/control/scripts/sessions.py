"""Calls of the scripts that write voice sessions, stored responses and versions of the draft
head.
"""

from collections.abc import Mapping, Sequence

import msgspec

from fleet.config.api_keys import NO_LIMITS, KeyLimits
from fleet.control.scripts.calls import Call, script
from fleet.core.ids import StageName, WorkerId
from fleet.drafts.figures.training import DraftVersion, encode_version


def hold_voice(
    session: str,
    holder: WorkerId,
    keep_ms: int,
    owner: str,
    *,
    new: bool,
    bound: int,
    limits: KeyLimits = NO_LIMITS,
) -> Call:
    """Make `holder` the gateway that may write to a voice session. `owner`: API key or client
    secret that opened the session; "" without keys. `keep_ms`: time to live of the session.

    `new`: True to open a session, which must not exist yet; False to take over an existing session
    of `owner`. `bound`: largest number of open sessions of one client secret; beyond it, a new
    session replaces one whose client is away or, if there is none, is refused ("full"). `limits`:
    limits of the API key. Answers an empty list if `new` does not fit, or `owner` differs.
    """
    quota = (limits.max_sessions, limits.audio_s_per_day)
    return Call.of("hold_voice", session, holder, keep_ms, owner, new, bound, quota)


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
    """Delete a voice session. `epoch`: epoch at which the caller holds the session; None to delete
    the session by right of the API, whichever gateway holds it.
    """
    ...


@script
def save_response(response: str, owner: str, record: bytes, ttl_ms: int, max_bytes: int) -> Call:
    """Store the record of a response for `ttl_ms`. `max_bytes`: size of all records together,
    beyond which those that expire first are deleted.
    """
    ...


@script
def forget_response(response: str, owner: str) -> Call:
    """Delete the record of a response. Answers "ok", or "unknown" if `owner` has no such
    response.
    """
    ...


@script
def claim_training(trainer: WorkerId, newest: int) -> Call:
    """Give a trainer the right to write to the trainers' folder. `newest`: highest epoch in the
    folder, which Redis may have lost.

    Answers "ok" with the new epoch and the former one ("0" for none), "held" while another trainer
    has the right and owns tasks, or "unlisted" if the trainer is not registered or stands by.
    """
    ...


@script
def holds_training(trainer: WorkerId, epoch: int) -> Call:
    """Ask whether a trainer still has the right that it claimed at `epoch`. Answers "ok", "stale"
    or "unlisted".
    """
    ...


def add_version(
    trainer: WorkerId, epoch: int | None, version: DraftVersion, newest: int = 0
) -> Call:
    """Add a version of the draft head. The version gets the next number, unless it already has a
    number that no other version has. `trainer`, `epoch`: right of the trainer; "" and None for an
    operator. `newest`: highest number of a version that Redis may have lost.

    Answers the version with its number, the existing version with the same hash, "stale" if another
    trainer has the right, or "unlisted" if the trainer is not registered any more or stands by.
    """
    record = encode_version(msgspec.structs.replace(version, number=0, note=""))
    return Call.of("add_version", trainer, epoch, version.sha256, version.number, newest, record)


@script
def forget_version(trainer: WorkerId, epoch: int, sha256: str) -> Call:
    """Delete the record of a version of the draft head. Answers "ok", "in_use" if a stage uses the
    version or used it before its present one, "stale" or "unlisted".
    """
    ...


ANY_VERSION = "*"


@script
def promote_version(
    worker: WorkerId, epoch: int | None, stage: StageName, expected: str, sha256: str, reason: str
) -> Call:
    """Let a stage's workers draft with a version of the draft head. `sha256`: hash of the version's
    weights; "" for the head with which the fleet started. `worker`: id of the calling worker; ""
    for an operator. `epoch`: epoch of the trainer's right; None for other callers.

    `expected`: the version that must be in use now, or `ANY_VERSION`. Answers "ok", "stale" if
    another version is in use or another trainer has the right, "unknown" for a missing version, or
    "unlisted" if `worker` is not registered any more or stands by.
    """
    ...
