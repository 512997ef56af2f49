"""Commands: decisions of the conductor. The driver turns each into one call of a fenced script."""

import msgspec

from fleet.core.ids import EdgeName, Epoch, RequestId, RoleName, StageName, Walk, WorkerId


class Command(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of all commands."""


class GrantTask(Command, frozen=True, kw_only=True):
    """Offer the task to a role again. Refused unless the task's epoch is still `expected_epoch`.

    `alone`: the task must run without others on its worker.
    """

    request: RequestId
    stage: StageName
    role: RoleName
    expected_epoch: Epoch
    alone: bool = False


class SetWalk(Command, frozen=True, kw_only=True):
    """From chunk `from_index` of `edge` on, the consuming task is in `walk`."""

    request: RequestId
    stage: StageName
    edge: EdgeName
    from_index: int
    walk: Walk


class EndRequest(Command, frozen=True, kw_only=True):
    """End the request: `state` is failed or aborted; every task's epoch is raised.

    `dead_stage`: the stage whose workers died over it; the request becomes a dead letter.
    """

    request: RequestId
    state: str
    code: str = ""
    message: str = ""
    param: str | None = None
    dead_stage: StageName | None = None


class AbandonRequest(Command, frozen=True, kw_only=True):
    """Abort a request that no gateway reads, unless one has attached since `client_epoch`."""

    request: RequestId
    client_epoch: Epoch


class FenceWorker(Command, frozen=True, kw_only=True):
    """Revoke the rights of a worker whose lease has lapsed, unless renewed since: raise the epoch
    of each of its tasks.
    """

    worker: WorkerId
    deadline_us: int
