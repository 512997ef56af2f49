"""Commands to the fleet whose state is in memory."""

from dataclasses import dataclass

import msgspec

from fleet.config import FleetConfig
from fleet.control.job_client import JobClient
from fleet.control.operations import Operations, check_drafter, check_managed, check_scale
from fleet.core.clock import now_us
from fleet.core.errors import Conflict, NotFound, quoted
from fleet.core.ids import (
    CLIENT,
    Epoch,
    RequestId,
    RoleName,
    StageName,
    new_request_id,
)
from fleet.core.jobs import read_arguments
from fleet.graphs import get_graph
from fleet.telemetry.trace import (
    RequestRow,
    TraceEvent,
)
from fleet.telemetry.views import (
    Job,
    WorkerOrder,
)
from tests.web.fake_telemetry import FakeTelemetry

STATE_AFTER: dict[WorkerOrder, str] = {"drain": "draining", "resume": "ready", "stop": "leaving"}


@dataclass(slots=True)
class FakeOperations(Operations):
    _fleet: FakeTelemetry

    async def retry(self, request: RequestId, *, by: str | None = None) -> RequestId:
        self._fleet.check_reachable()
        old = await self._fleet.trace(request)
        if old is None:
            raise NotFound(f"no request {quoted(request)}", param="request_id")
        self._fleet.retried.append(request)
        self._fleet.ordered_by += [] if by is None else [by]
        again = new_request_id()
        if self._fleet.on_retry(request, again):
            return again
        event = TraceEvent(at_us=now_us(), what="submitted")
        self._fleet.traces[again] = msgspec.structs.replace(
            old, id=again, retry_of=request, state="submitted", events=(event,)
        )
        self._fleet.rows.append(
            RequestRow(
                id=again,
                state="submitted",
                kind=old.kind,
                model=old.model,
                created_us=now_us(),
                session=old.session,
            )
        )
        return again

    async def scale(self, role: str, number: int, *, by: str = "") -> RoleName:
        self._fleet.check_reachable()
        name = check_scale(FleetConfig(), role, number)
        of_role = [view for view in self._fleet.queue_list if view.role == role]
        check_managed(name, "ok" if any(view.managed for view in of_role) else "unmanaged")
        self._fleet.scaled.append((role, number, by))
        return name

    async def choose_drafter(self, stage: str, drafter: str) -> None:
        self._fleet.check_reachable()
        check_drafter(get_graph("qwen3_omni"), stage, drafter)
        self._fleet.chosen_drafters[stage] = drafter

    async def order_worker(self, worker: str, order: WorkerOrder, *, by: str = "") -> None:
        self._fleet.check_reachable()
        place = next(
            (n for n, view in enumerate(self._fleet.worker_list) if view.id == worker), None
        )
        if place is None:
            raise NotFound(f"no worker {quoted(worker)}", param="worker_id")
        view = self._fleet.worker_list[place]
        if view.gone or not view.role:
            why = "is gone already" if view.gone else f"is {view.state}, and takes no orders"
            raise Conflict(f"{worker} {why}", param="worker_id")
        if order == "resume" and view.state == "leaving":
            raise Conflict(f"{worker} is leaving already", param="worker_id")
        self._fleet.orders.append((worker, order))
        self._fleet.ordered_by.append(by)
        if order == "dump":
            return
        state = view.state if order == "drain" and view.state == "leaving" else STATE_AFTER[order]
        self._fleet.worker_list[place] = msgspec.structs.replace(view, state=state)

    async def redeliver(
        self, request: RequestId, stage: StageName, epoch: Epoch, *, by: str = ""
    ) -> None:
        self._fleet.check_reachable()
        trace = await self._fleet.trace(request)
        if trace is None:
            raise NotFound(f"no request {quoted(request)}", param="request_id")
        task = next((task for task in trace.tasks if task.stage == stage and stage != CLIENT), None)
        if task is None:
            raise NotFound(f"request {request} has no task of stage {stage!r}", param="stage")
        if trace.ended_us:
            raise Conflict(f"request {request} has ended", param="request_id")
        if epoch not in (0, task.epoch):
            raise Conflict(
                f"stage {stage} of {request} has been granted again since it was seen",
                param="epoch",
            )
        self._fleet.redelivered.append((request, stage, epoch))
        self._fleet.ordered_by.append(by)

    async def retry_dead_letter(self, request: RequestId, *, by: str = "") -> RequestId:
        await self.drop_dead_letter(request)
        self._fleet.ordered_by.append(by)
        self._fleet.retried.append(request)
        return new_request_id()

    async def drop_dead_letter(self, request: RequestId) -> None:
        self._fleet.check_reachable()
        if not any(letter.id == request for letter in self._fleet.letters):
            raise NotFound(f"no dead letter {quoted(request)}", param="request_id")
        self._fleet.letters = [letter for letter in self._fleet.letters if letter.id != request]


@dataclass(slots=True)
class FakeJobs(JobClient):
    _fleet: FakeTelemetry

    async def list_jobs(self) -> list[Job]:
        self._fleet.check_reachable()
        return self._fleet.job_list

    async def find(self, job: str) -> Job | None:
        self._fleet.check_reachable()
        return next((view for view in self._fleet.job_list if view.id == job), None)

    async def submit(self, kind: str, arguments: object) -> Job:
        self._fleet.check_reachable()
        checked = read_arguments(kind, arguments)
        number = len(self._fleet.job_list) + 1
        job = Job(
            id=f"job-{number}",
            kind=kind,
            arguments=checked.as_json(),
            state="queued",
            created_us=now_us(),
        )
        self._fleet.job_list.insert(0, job)
        return job

    async def retry(self, job: str) -> Job:
        view = await self._find(job)
        if view.state in ("queued", "started"):
            raise Conflict(f"job {job} has not ended", param="job_id")
        return await self.submit(view.kind, view.arguments or {})

    async def stop(self, job: str) -> None:
        view = await self._find(job)
        if view.state not in ("queued", "started"):
            raise Conflict(f"job {job} has ended", param="job_id")
        state = "stopped" if view.state == "started" else "canceled"
        ended = msgspec.structs.replace(view, state=state, ended_us=now_us())
        self._fleet.job_list = [
            ended if other.id == job else other for other in self._fleet.job_list
        ]

    async def delete(self, job: str) -> None:
        view = await self._find(job)
        if view.state == "started":
            raise Conflict(f"job {job} runs; stop it first", param="job_id")
        self._fleet.job_list = [other for other in self._fleet.job_list if other.id != job]

    async def read_file(self, job: str, name: str) -> bytes:
        view = await self._find(job)
        if name not in view.files:
            raise NotFound(f"name: no file {name!r}", param="name")
        return b"{}"

    async def _find(self, job: str) -> Job:
        view = await self.find(job)
        if view is None:
            raise NotFound(f"no job {quoted(job)}", param="job_id")
        return view
