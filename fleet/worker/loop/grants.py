"""From grants to open tasks: claims, and reservations of grants whose task must run alone."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

from redis.exceptions import RedisError

from fleet.control import scripts
from fleet.control.connect import Reply, text, texts
from fleet.control.notices import Grant, Notice
from fleet.core.errors import FleetError, failure_of
from fleet.core.ids import EdgeName, Epoch, RequestId, StageName, Walk
from fleet.worker.context import WorkerContext
from fleet.worker.loop.hand_off_coordinator import HandOffCoordinator
from fleet.worker.loop.parts import WorkerParts
from fleet.worker.loop.start import start_request
from fleet.worker.process.redis_link import TurnResult
from fleet.worker.task.claim import parse_claim
from fleet.worker.task.pending_calls import PendingCall, is_unwritten
from fleet.worker.task.task import Task, open_task

log = logging.getLogger(__name__)

ALONE = "1"
"""Group of a suspect beside which no other task may run."""


class GrantIntake:
    """Claims granted tasks for this worker and opens them. `reserved`: grants of suspects, which
    wait until this worker has no other task.
    """

    def __init__(
        self, context: WorkerContext, parts: WorkerParts, hand_offs: HandOffCoordinator
    ) -> None:
        self._context = context
        self._worker = context.worker
        self._link = context.link
        self._role, self._adapter = context.settings.role, context.settings.built.adapter
        self._hands_off = context.settings.serves.next is not None
        self._tasks, self._hand_offs = parts.tasks, hand_offs
        self._cached_sessions, self._availability = parts.cached_sessions, parts.availability
        graph, stage = context.graph, context.stage
        self._capacity = context.config.stage(stage).max_batch
        self._inputs = [edge.name for edge in graph.edges_to(stage)]
        self._outputs = {edge.name: edge.target for edge in graph.edges_from(stage)}
        self._reads_prompt_audio = graph.stage(stage).reads_prompt_audio
        self.reserved: list[Grant] = []
        self._unclaimed: list[Grant] = []
        """Grants to be claimed again, since Redis refused the claim as a write."""

    def free_slots(self) -> int:
        if self._is_exclusive() or not self._availability.accepts_tasks or not self._can_compute():
            return 0
        if not self._hand_offs.has_room():
            return 0
        return max(0, self._capacity - len(self._tasks) - len(self._unclaimed))

    def _can_compute(self) -> bool:
        """Return False while layers of the model are missing. If they are missing for too long,
        return True: tasks are claimed again, and fail with an error.
        """
        remote = self._context.engine.remote
        return remote is None or remote.accepts_requests() or remote.outage() is not None

    def _is_exclusive(self) -> bool:
        return bool(self.reserved) or self._tasks.runs_alone()

    def choose(self, result: TurnResult) -> list[Grant]:
        """Return the grants to claim: those reserved for this worker and, while slots are free, the
        grants that ended its wait. The others stay in their stream, for any worker of the role.

        A worker that hands its tasks off claims only what was reserved for it, since the
        reservation compares how many tasks the next role has room for.
        """
        num_free = 0 if self._hands_off else self.free_slots() - len(result.grants)
        return result.grants + result.woken[: max(0, num_free)]

    def accept(self, grants: Sequence[Grant], deliver: Callable[[Notice], None]) -> None:
        """Claim grants and open their tasks. `deliver`: function that handles notices which arrive
        with the claims.

        A suspect waits until nothing else runs here. Until then, grants already read from the
        role's stream are still claimed, but grants in this worker's inbox are not, and go to
        another worker when overdue. The waiting grants are reserved in this worker's name, with the
        others of their group. Without the reservation they would become overdue and be granted to a
        second worker, which would have to wait as well.
        """
        to_reserve = [grant for grant in grants if grant.group]
        due = [
            grant
            for grant in grants
            if not grant.group and (grant.entry or not self._is_exclusive())
        ]
        if self.reserved and not self._tasks and not due:
            due = self._take_group()
        self.reserved += (
            to_reserve  # claimed once the reservation has brought the rest of the group
        )
        if due or to_reserve:
            self._claim(due, deliver)

    def _take_group(self) -> list[Grant]:
        """Remove the oldest reserved grant, with the others of its group, and return them."""
        group = self.reserved[0].group
        if group == ALONE:
            return [self.reserved.pop(0)]
        taken = [grant for grant in self.reserved if grant.group == group]
        self.reserved = [grant for grant in self.reserved if grant.group != group]
        return taken

    def claim_again(self, deliver: Callable[[Notice], None]) -> None:
        """Claim the grants whose claim was refused, now that Redis accepts writes."""
        grants, self._unclaimed = self._unclaimed, []
        if grants:
            self.accept(grants, deliver)

    def reservation_calls(self) -> list[PendingCall]:
        return [
            (
                scripts.reserve(self._worker, self._role, g.entry, g.request, g.stage, g.epoch),
                partial(self._settle_reservation, g),
            )
            for g in self.reserved
        ]

    def _settle_reservation(self, grant: Grant, reply: Reply) -> None:
        """Add the grants of the same group that Redis reserved with this one. Drop the reservation
        if Redis answers that it is void, since the task has ended or was granted again; a void
        reservation would keep this worker from claiming anything.
        """
        answer, *rest = texts(reply)
        if answer != "ok":
            self.reserved = [held for held in self.reserved if held != grant]
            return
        group, *others = rest
        known = {(held.request, held.epoch) for held in self.reserved}
        for request, stage, epoch in zip(others[::3], others[1::3], others[2::3], strict=True):
            if (RequestId(request), int(epoch)) not in known:
                other = Grant(
                    request=RequestId(request),
                    stage=StageName(stage),
                    epoch=Epoch(int(epoch)),
                    group=group,
                )
                self.reserved.append(other)

    def _claim(self, grants: Sequence[Grant], deliver: Callable[[Notice], None]) -> None:
        calls = [
            scripts.claim(
                self._worker,
                self._role,
                g.entry,
                g.request,
                g.stage,
                g.epoch,
                self._inputs,
                self._outputs,
                reads_prompt_audio=self._reads_prompt_audio,
            )
            for g in grants
        ]
        reservations = self.reservation_calls()
        result = self._link.exchange(
            [*calls, *(call for call, _ in reservations)], free_slots=0, block_ms=0
        )
        for (_, settle), reply in zip(reservations, result.replies[len(calls) :], strict=True):
            if not is_unwritten(reply):
                settle(reply)
        for grant, reply in zip(grants, result.replies[: len(calls)], strict=True):
            if is_unwritten(reply):
                self._unclaimed.append(grant)
                continue
            answer = cast("list[Reply]", reply)
            if text(answer[0]) == "ok":
                self._open(grant, answer)
            else:
                log.info(
                    "the grant of %s for %s cannot be claimed: %s",
                    grant.stage,
                    grant.request,
                    text(answer[0]),
                )
        for notice in result.notices:  # after the tasks were opened: some may be for them
            deliver(notice)
        self.accept(result.grants, deliver)

    def _open(self, grant: Grant, answer: Sequence[Reply]) -> None:
        """Open a claimed task. If that fails, only this request fails."""
        try:
            self._begin(grant, answer)
        except RedisError:
            raise  # of the connection, not of the request, which continues in another incarnation
        except FleetError as error:
            self._refuse(grant, error)
        except Exception as error:  # the process loop: this request fails, the others continue
            log.exception("request %s could not be opened", grant.request)
            self._refuse(grant, failure_of("the request could not be opened", error))

    def _refuse(self, grant: Grant, error: FleetError) -> None:
        self._tasks.report_failure(grant.request, grant.stage, grant.epoch, error)
        self._tasks.drop(grant.request)

    def _begin(self, grant: Grant, answer: Sequence[Reply]) -> None:
        """Begin a task, or continue it where its logs end. The logs were read when the task was
        claimed; chunks that the inbox delivers again are recognized by their index and ignored.
        """
        spec, fields, logs = parse_claim(answer, self._inputs, list(self._outputs))
        engine, adapter = self._context.engine, self._adapter(spec, logs.blob)
        config = self._context.config
        task = open_task(
            spec, grant.stage, grant.epoch, adapter, config, logs=logs, alone=bool(grant.group)
        )
        _assign_walks(task, fields)
        if adapter.may_open():
            start_request(task, engine, self._cached_sessions)
        self._tasks[task.request] = task
        if logs.offer is not None:
            self._hand_offs.begin_import(task, logs.offer, fields)
            engine.pause(grant.request, paused=True)


def _assign_walks(task: Task, fields: dict[str, bytes]) -> None:
    """Assign to a new task the walks that the conductor decided before this worker claimed it:
    fields `walk:{edge}:{index}` of the task's Redis hash.
    """
    for field, walk in fields.items():
        head, _, rest = field.partition(":")
        edge, _, index = rest.rpartition(":")
        if head == "walk" and edge in task.inbound:
            task.inbound[EdgeName(edge)].assign_walk(int(index), Walk(text(walk)))
