"""The worker's loop: step the engine, send its output, deliver what arrived, feed the engine.

One pipelined round trip per iteration, without waiting for the conductor. A failure of one request
ends only this request; the loop continues. While Redis refuses writes, the worker only repeats the
refused ones, in their order. Redis's other errors are raised: without Redis the worker has no
rights, and its process begins a new incarnation. EngineStopped is raised too, and ends the process.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from fleet.control import scripts
from fleet.control.outage import Outage
from fleet.control.pacing import Pacing
from fleet.core.clock import now_us
from fleet.core.errors import failure_of
from fleet.core.ids import RequestId
from fleet.drafts.exchange.follower import HeadFollower
from fleet.engine.base import EngineOutput, await_ready
from fleet.worker.context import WorkerContext
from fleet.worker.loop.grants import GrantIntake
from fleet.worker.loop.hand_off_coordinator import HandOffCoordinator
from fleet.worker.loop.inbox import Inbox
from fleet.worker.loop.maintenance import Maintenance
from fleet.worker.loop.outbox import Outbox, is_urgent
from fleet.worker.loop.parking import Parking
from fleet.worker.loop.parts import WorkerParts
from fleet.worker.loop.start import start_request
from fleet.worker.sessions.service import SessionService
from fleet.worker.task.pending_calls import PendingCall, ignore_reply, is_unwritten
from fleet.worker.task.task import Task

log = logging.getLogger(__name__)

IDLE_BLOCK_MS = 200
PULL_POLL_S = 0.0005
AWAIT_PASS_S = 0.05
"""Longest wait for a step that other processes compute; nothing is read from Redis meanwhile."""


class LoopObserver(Protocol):
    """Receiver of a loop's progress reports. `Lease` implements this protocol, and is no longer
    renewed if the reports stop.
    """

    def progress(self) -> None: ...
    def begin_step(self, longest_step_s: float) -> None: ...


class WorkerLoop:
    """The loop of a worker of one role. `turn` is one iteration. All state is touched by the loop's
    thread only.
    """

    def __init__(
        self,
        context: WorkerContext,
        parts: WorkerParts,
        sessions: SessionService | None = None,
        heads: HeadFollower | None = None,
    ) -> None:
        self.worker, self.role = context.worker, context.settings.role
        self.stage, self.engine = context.stage, context.engine
        self.link, self.transfer = context.link, context.transfer
        self.parts, self._sessions = parts, sessions
        self.tasks, self.availability = parts.tasks, parts.availability
        self.hand_offs = HandOffCoordinator(context, parts)
        self.intake = GrantIntake(context, parts, self.hand_offs)
        self._inbox = Inbox(self.worker, parts)
        self._outbox = Outbox(context, parts, self.hand_offs, Parking(context, parts))
        self.maintenance = Maintenance(
            context, parts, self.hand_offs, self.intake, self._outbox, heads
        )
        self._outage = context.outage or Outage(f"worker {self.worker}")
        self._pacing = Pacing()
        self._refused: list[PendingCall] = []
        self._longest_step_s = 0.0
        self._observer: LoopObserver | None = None

    def run(
        self,
        stopping: Callable[[], bool],
        progress: Callable[[], None],
        observer: LoopObserver | None = None,
    ) -> None:
        """Run turns until `stopping` returns True. `progress`: called after each turn. `observer`:
        notified before and after each step.
        """
        self._observer = observer
        while not stopping():
            self.turn()
            progress()
        self.maintenance.read_vitals()

    def may_leave(self) -> bool:
        return self.availability.may_leave(holds_anything=self.tasks.holds_anything())

    def is_stuck(self) -> bool:
        """Return True if the process must be restarted, because a NIXL agent in this process has
        made no progress for too long.
        """
        return bool(self.maintenance.agents.stuck)

    def computes(self) -> bool:
        """Return True if this worker has tasks or accepts new ones. Any thread may call this."""
        return self.availability.accepts_tasks or bool(self.tasks)

    def turn(self) -> None:
        if self._sessions is not None:
            self._sessions.advance()
        if not self._refused:
            began_us = now_us()
            outputs = self._step()
            self._route(outputs, began_us, now_us())
            self._release_held()
        if wait_s := self._pacing.wait_s(len(self.tasks)):
            time.sleep(wait_s)
        self._exchange()
        for task in [task for task in self.tasks.values() if task.may_move()]:
            self.tasks.guard(task, lambda task=task: self._feed(task))
        if self.tasks.take_emptied():
            # else observers of an idle fleet would wait for the next poll
            self.maintenance.read_vitals()

    def _step(self) -> Sequence[EngineOutput]:
        remote = self.engine.remote
        if remote is not None and (suspects := remote.take_suspects()):
            self._suspect(suspects)
        if not await_ready(self.engine, AWAIT_PASS_S):
            self._fail_all_in_outage()
            return ()
        try:
            return self._observed_step()
        except Exception as error:  # the process loop: the batch is lost, the worker is not
            log.exception("a batch of %d failed", len(self.tasks))
            self._lose_batch(error)
            return ()

    def _observed_step(self) -> Sequence[EngineOutput]:
        if self._observer is None:
            return self.engine.step()
        began_s = time.monotonic()
        self._observer.begin_step(self._longest_step_s)
        try:
            return self.engine.step()
        finally:
            self._longest_step_s = max(self._longest_step_s, time.monotonic() - began_s)
            self._observer.progress()

    def _suspect(self, requests: Sequence[RequestId]) -> None:
        """Record in Redis that another process died while it computed steps of these tasks. The
        process that replaces the dead one gets the steps only after this call.
        """
        suspects = [task for request in requests if (task := self.tasks.get(request)) is not None]
        calls = [scripts.suspect_task(task.request, task.stage, task.epoch) for task in suspects]
        result = self.link.exchange(calls, free_slots=0, block_ms=0)
        for notice in result.notices:
            self._inbox.deliver(notice)
        self.intake.accept(result.grants, self._inbox.deliver)

    def _fail_all_in_outage(self) -> None:
        """Fail every task of this worker if layers that other processes hold have been missing for
        too long.
        """
        error = self.engine.remote.outage() if self.engine.remote is not None else None
        if error is not None:
            for task in list(self.tasks.values()):
                self.tasks.fail(task, error)

    def _lose_batch(self, error: Exception) -> None:
        """Treat a failed batch like a death of this worker: each of its tasks is granted again and
        continues from its log, elsewhere or here. If the batch had one task, only this task fails.

        The faulty task of a larger batch is unknown, and so is what the engine still holds of the
        other tasks. After repeated failures a task runs alone, so that only the faulty one fails.
        Raises: EngineStopped if the engine itself has failed.
        """
        self.engine.check()
        held = list(self.tasks.values())
        took_part = [task for task in held if not task.paused] or held
        if len(took_part) == 1:
            self.tasks.fail(took_part[0], failure_of("the engine failed the request", error))
            return
        lost = [(task.request, task.stage, task.epoch) for task in took_part]
        self._outbox.add([(scripts.lose_tasks(lost), ignore_reply)])
        for task in took_part:
            self.tasks.restart_elsewhere(task)

    def _route(self, outputs: Sequence[EngineOutput], began_us: int, ended_us: int) -> None:
        """Turn the outputs of an engine step into chunks of their tasks. `began_us`, `ended_us`:
        start and end of the step.
        """
        last = {output.request_id: output for output in outputs}
        for output in outputs:
            task = self.tasks.get(output.request_id)
            # draws after a stop string that the same step reached
            if task is None or task.is_over():
                continue
            self.hand_offs.record_resumption(task, began_us)
            task.cached_rows += output.num_reused
            if output.error is not None:
                self.tasks.fail(task, output.error)
                continue
            self.tasks.guard(
                task, lambda task=task, output=output: task.add_output(output, len(self.tasks))
            )
            self._end_if_over(task, output)
            if output is last[task.request]:
                task.batches.add(len(last))
                self.hand_offs.start_if_due(task, output, ended_us)

    def _release_held(self) -> None:
        """Release the chunks that the rate limit of their edge's chunk policy held back and that
        are due; release all held chunks if the engine is not ready, since no further output would
        release them.
        """
        num_answers = len(self.tasks) if self.engine.is_ready() else 1
        for task in self.tasks.values():
            task.release_held(num_answers)

    def _end_if_over(self, task: Task, output: EngineOutput) -> None:
        """If a task has ended with `output`, announce what the engine caches for its session. The
        announcement must precede the task's last chunk, after which this worker may lose the right
        to write.
        """
        if task.is_over():
            self.engine.finish(task.request)
        elif not output.final:
            return
        self.parts.cached_sessions.on_turn_ended(task)

    def _exchange(self) -> None:
        """Make the iteration's round trip to Redis: send all writes; handle replies, notices and
        grants.

        Refused writes are sent again before any other, since a chunk that overtook an earlier one
        would leave a gap.
        """
        calls = self._refused or self._outbox.take()
        ask_live = self.maintenance.poll()
        result = self.link.exchange(
            [call for call, _ in calls],
            free_slots=0 if self._refused else self.intake.free_slots(),
            block_ms=self._block_ms(urgent=is_urgent(calls)),
            ask_live=ask_live,
        )
        self._refused = [
            call for call, reply in zip(calls, result.replies, strict=True) if is_unwritten(reply)
        ]
        for (_, settle), reply in zip(calls, result.replies, strict=True):
            if not is_unwritten(reply):
                settle(reply)
        for notice in result.notices:
            self._inbox.deliver(notice)
        for request, live in zip(ask_live, result.still_live, strict=True):
            if not live:
                self.tasks.drop(request, keep_cached=True)
        self.intake.accept(self.intake.choose(result), self._inbox.deliver)
        if result.refusal is not None:
            time.sleep(self._outage.add(result.refusal))
        else:
            self._outage.end()
            self.intake.claim_again(self._inbox.deliver)

    def _block_ms(self, *, urgent: bool) -> int:
        due_ms = math.ceil(min(self.engine.due_in_s() * 1000, IDLE_BLOCK_MS))
        receiver = self.parts.receiver
        if urgent or self._refused or not due_ms or receiver.can_advance(self.tasks.values()):
            return 0
        if not receiver.pulling() and all(task.kv_import is None for task in self.tasks.values()):
            return due_ms
        # Redis checks its clock ten times a second while idle: a block of 1 ms would last 100
        # (measured).
        time.sleep(PULL_POLL_S)
        return 0

    def _feed(self, task: Task) -> None:
        """Move a task's arrived chunks into the engine, start the task's request there once the
        adapter allows it, and pause or resume the request by the task's credit.
        """
        task.dirty = False
        for edge, walk, arrays, final in self.parts.receiver.advance(task):
            pieces = task.adapter.consume(edge, walk, arrays, final=final)
            task.add_fed(edge, len(pieces))
            for piece in pieces:
                task.cached_rows += self.engine.feed(task.request, piece)
        if not task.is_started and task.adapter.may_open():
            start_request(task, self.engine, self.parts.cached_sessions)
        if task.is_over():
            self.engine.finish(task.request)
        was_paused, phase = task.paused, task.next_phase()
        if phase is not task.phase:
            task.enter(phase)
        if task.paused != was_paused:
            self.engine.pause(task.request, paused=task.paused)
