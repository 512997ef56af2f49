"""State of the conductor: one record per live request, and in it one per task. A copy of the hashes
in Redis, never written back.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from fleet.core.ids import EdgeName, Epoch, RequestId, RoleName, StageName, WorkerId


class TaskState(StrEnum):
    PENDING = "pending"
    GRANTED = "granted"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    LOST = "lost"
    ABORTED = "aborted"


ENDED = frozenset({TaskState.FINISHED, TaskState.FAILED, TaskState.LOST, TaskState.ABORTED})


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRecord:
    """Work of one stage on one request. `alone`: True if no other task may run beside it on its
    worker. `role`: role to which the task was last granted; None before the first grant.

    Invariants: a RUNNING task has an owner; a PENDING task has epoch 0.
    """

    stage: StageName
    state: TaskState = TaskState.PENDING
    epoch: Epoch = Epoch(0)
    owner: WorkerId | None = None
    alone: bool = False
    role: RoleName | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """A live request and its tasks. `outputs`: requested client edges. `ending`: True once
    EndRequest was issued, which must not be repeated.
    """

    id: RequestId
    graph: str
    outputs: tuple[EdgeName, ...]
    tasks: Mapping[StageName, TaskRecord]
    ending: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ConductorState:
    requests: Mapping[RequestId, RequestRecord] = field(
        default_factory=dict[RequestId, RequestRecord]
    )
    conductor_driven: frozenset[StageName] = frozenset()
    """Stages whose walk changes the conductor decides, by configuration."""
    first_roles: Mapping[StageName, RoleName] = field(default_factory=dict[StageName, RoleName])
    """Role to which the first grant of a stage's task goes, by stage."""

    def task(self, request: RequestId, stage: StageName) -> TaskRecord | None:
        record = self.requests.get(request)
        return record.tasks.get(stage) if record else None

    def with_request(self, record: RequestRecord) -> "ConductorState":
        return replace(self, requests={**self.requests, record.id: record})

    def with_task(self, request: RequestId, task: TaskRecord) -> "ConductorState":
        record = self.requests[request]
        return self.with_request(replace(record, tasks={**record.tasks, task.stage: task}))

    def without(self, request: RequestId) -> "ConductorState":
        return replace(
            self, requests={key: value for key, value in self.requests.items() if key != request}
        )
