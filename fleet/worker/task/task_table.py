"""The tasks that a worker owns, and every way in which one ends: finished, failed, dropped, parked
or redelivered. Knows no Redis.
"""

import logging
from collections.abc import Callable

from redis.exceptions import RedisError

from fleet.core.errors import BadInput, FleetError, failure_of
from fleet.core.events import TaskFailed
from fleet.core.ids import Epoch, RequestId, StageName
from fleet.engine.base import Engine
from fleet.worker.loop.cached_sessions import CachedSessions
from fleet.worker.task.hand_off import AbandonedImports, Offers
from fleet.worker.task.receiver import Receiver
from fleet.worker.task.sender import Sender
from fleet.worker.task.task import Task

log = logging.getLogger(__name__)


class TaskTable(dict[RequestId, Task]):
    """Tasks that this worker owns, by request. Not thread-safe.

    `lingering`: requests whose task ended here while consumers may still pull tensors that it
    published. `failures`: the failed tasks that the next round trip reports.
    """

    def __init__(
        self,
        engine: Engine,
        sender: Sender,
        receiver: Receiver,
        offers: Offers,
        imports: AbandonedImports,
        cached_sessions: CachedSessions,
    ) -> None:
        super().__init__()
        self._engine = engine
        self._sender = sender
        self._receiver = receiver
        self._offers = offers
        self._imports = imports
        self._cached_sessions = cached_sessions
        self.lingering: set[RequestId] = set()
        self.failures: list[TaskFailed] = []
        self._has_emptied = False

    def holds_anything(self) -> bool:
        """Return True while this worker has a task, or holds tensors or KV blocks that peers may
        still read.
        """
        return bool(self or self.lingering or self._offers.open_requests())

    def runs_alone(self) -> bool:
        return any(task.alone for task in self.values())

    def guard(self, task: Task, work: Callable[[], None]) -> None:
        """Run `work` for a task. Any error except Redis's fails this task only."""
        try:
            work()
        except RedisError:
            raise
        except FleetError as error:
            self.fail(task, error)
        except Exception as error:  # the process loop: this request fails, the others continue
            log.exception("request %s failed", task.request)
            self.fail(task, failure_of(f"stage {task.stage} failed the request", error))

    def fail(self, task: Task, error: FleetError) -> None:
        self.report_failure(task.request, task.stage, task.epoch, error)
        self.drop(task.request)

    def report_failure(
        self, request: RequestId, stage: StageName, epoch: Epoch, error: FleetError
    ) -> None:
        """Report in the next round trip that a task failed. Raises: EngineStopped if the engine
        itself has failed, and so fails every task.
        """
        if not isinstance(error, BadInput):
            self._engine.check()
        log.warning("request %s fails in %s: %s", request, stage, error.message)
        event = TaskFailed(
            request=request,
            stage=stage,
            epoch=epoch,
            code=error.code,
            message=error.message,
            param=error.param,
        )
        self.failures.append(event)

    def take_failures(self) -> list[TaskFailed]:
        failures, self.failures = self.failures, []
        return failures

    def finish(self, task: Task) -> None:
        """End a task whose work is done; its published tensors stay until the request ends, since
        consumers may still pull.
        """
        self._engine.finish(task.request)
        self._receiver.forget(task.request)
        if self._sender.published(task.request):
            self.lingering.add(task.request)
        self._remove(task.request)

    def restart_elsewhere(self, task: Task) -> None:
        """End a task in this worker without a report to Redis; the next owner continues from the
        logs. Published tensors stay until the request ends.
        """
        self._engine.abort(task.request)
        self.finish(task)

    def drop(self, request: RequestId, *, keep_cached: bool = False) -> None:
        """Forget a request in any state: free its tensors and pages, and mark its offer of KV
        blocks to be withdrawn.

        `keep_cached`: True to keep what the engine caches of the session's earlier turns, as after
        a turn that ended normally.
        """
        task = self.get(request)
        if keep_cached and task is not None and self._cached_sessions.has(task.spec.session):
            self._engine.finish(request)
        else:
            self._engine.abort(request)
        self._receiver.forget(request)
        self._sender.release(request)
        self._offers.withdraw(request)
        self.lingering.discard(request)
        self._remove(request)

    def _remove(self, request: RequestId) -> None:
        task = self.pop(request, None)
        if task is not None:
            self._imports.abandon(task.end_import())
        self._has_emptied = not self

    def take_emptied(self) -> bool:
        """Return True if the last task has ended since the previous call and none is open now."""
        has_emptied, self._has_emptied = self._has_emptied and not self, False
        return has_emptied
