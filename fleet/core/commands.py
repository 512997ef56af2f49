"""Commands: decisions of the conductor. The driver turns each into one call of a fenced script."""

import msgspec

from fleet.core.ids import EdgeName, Epoch, RequestId, RoleName, StageName, Walk, WorkerId


class Command(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of all commands, which are decisions of the conductor."""


class GrantTask(Command, frozen=True, kw_only=True):
    """Command to offer a task to `role` again. Refused unless the task's epoch is still
    `expected_epoch`.

    `alone`: True if the task must run without other tasks on its worker.
    """

    request: RequestId
    stage: StageName
    role: RoleName
    expected_epoch: Epoch
    alone: bool = False


class SetWalk(Command, frozen=True, kw_only=True):
    """Command to let the consuming task of `edge` change to `walk` at chunk `from_index`."""

    request: RequestId
    stage: StageName
    edge: EdgeName
    from_index: int
    walk: Walk


class EndRequest(Command, frozen=True, kw_only=True):
    """Command to end a request. `state` is failed or aborted; the epoch of every task is raised.

    `dead_stage`: the stage whose workers died over the request, which becomes a dead letter; None
    otherwise.
    """

    request: RequestId
    state: str
    code: str = ""
    message: str = ""
    param: str | None = None
    dead_stage: StageName | None = None


class AbandonRequest(Command, frozen=True, kw_only=True):
    """Command to abort a request without a gateway, unless a gateway has attached since
    `client_epoch`.
    """

    request: RequestId
    client_epoch: Epoch


class FenceWorker(Command, frozen=True, kw_only=True):
    """Command to revoke the rights of a worker whose lease has lapsed, by raising the epoch of each
    of its tasks. Refused if the lease's deadline is no longer `deadline_us`: the worker has renewed
    it.
    """

    worker: WorkerId
    deadline_us: int
