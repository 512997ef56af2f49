"""Operators' orders: retry a request, drain or stop a worker, redeliver a task, handle dead
letters. Knows no HTTP.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import cast

import msgspec
from redis.asyncio import Redis

from fleet.config import FleetConfig
from fleet.control import keys, scripts
from fleet.control.connect import answer_of, run_async, text, texts
from fleet.control.dead_letters import DeadLetter, spec_of
from fleet.control.telemetry.queues import find_letter
from fleet.core.clock import now_us
from fleet.core.errors import BadInput, Conflict, FleetError, NotFound, quoted
from fleet.core.ids import (
    CLIENT,
    Epoch,
    RequestId,
    RoleName,
    StageName,
    WorkerId,
    new_request_id,
    role_of,
)
from fleet.core.request import RequestSpec, decode_request
from fleet.drafts.figures.speculation import CONFIGURED, ORDERS
from fleet.graphs import Graph
from fleet.telemetry.views import MAX_REPLICAS, WorkerOrder

log = logging.getLogger(__name__)
Submit = Callable[[RequestSpec, bytes | None, str | None], Awaitable[None]]
"""Function that submits a request without a client. Arguments: the request, the samples of its
audio prompt, and the name of the API key that ordered the submission. The gateway reads the whole
answer, so that the answer's log is complete.
"""

ORDER_REFUSALS = {
    "gateway": "is a gateway: it has no tasks, and accepts no orders",
    "leaving": "is leaving already; start another with `fleet worker`",
    "needed": "computes layers of a model, and {why}; start one with `fleet worker {role}`",
    "gone": "is gone already: its process has ended; start another with `fleet worker {role}`",
}
UNKNOWN_REQUEST = "no request {request!r:.66}; it never was, or its retention time is over"
REDELIVERY_REFUSALS: dict[str, tuple[type[FleetError], str, str]] = {
    "unknown": (NotFound, "request_id", UNKNOWN_REQUEST),
    "no_task": (
        NotFound,
        "stage",
        "request {request} has no task of stage {shown!r} with a worker",
    ),
    "ended": (
        Conflict,
        "request_id",
        "request {request} has ended; send it again with POST .../retry",
    ),
    "stale": (
        Conflict,
        "epoch",
        "stage {stage} of {request} has been granted again since it was seen; look again",
    ),
}
NOT_REDELIVERED = (
    Conflict,
    "stage",
    "stage {stage} of {request} is {state}: no worker has it, so it cannot be revoked",
)


def check_drafter(graph: Graph, stage: str, drafter: str) -> None:
    """Check a stage and the drafter that an operator chose for it. Raises: NotFound for a stage
    whose draft tokens are not verified, BadInput for an unknown drafter.
    """
    stages = [each.name for each in graph.stages if each.verifies_drafts]
    if stage not in stages:
        raise NotFound(
            f"stage: no drafts are verified for {quoted(stage)}; give one of {', '.join(stages)}",
            param="stage",
        )
    if drafter not in ORDERS:
        message = f"drafter: {quoted(drafter)} is none of {', '.join(ORDERS)}"
        raise BadInput(message, param="drafter")


def check_scale(config: FleetConfig, role: str, number: int) -> RoleName:
    """Check an operator's order that `number` workers serve `role`, and return the role's name.
    Raises: NotFound for an unknown role, Conflict for a role whose number of workers is fixed by
    the configuration, BadInput for a number out of range.
    """
    found = next((each for each in config.roles() if each.name == role), None)
    if found is None:
        known = ", ".join(each.name for each in config.roles())
        raise NotFound(f"role: no role {quoted(role)}; there are {known}", param="role")
    if found.optional or found.hosts_spans:
        why = "one worker of it is active at a time" if found.optional else "its layers are divided"
        raise Conflict(
            f"role: the number of {role} cannot be ordered, since {why}; change its setting",
            param="role",
        )
    if not 0 <= number <= MAX_REPLICAS:
        raise BadInput(
            f"replicas: {number} is not a whole number from 0 to {MAX_REPLICAS}", param="replicas"
        )
    return found.name


def check_managed(role: RoleName, answer: str) -> None:
    """Check the answer of the script `scale`. Raises: Conflict if no `fleet up` is present."""
    if answer != "ok":
        raise Conflict(
            f"role: no `fleet up` runs that could start or stop a {role}; start one more with "
            f"`fleet worker {role}`, or change its number where the workers are started "
            f"(Kubernetes: `kubectl -n fleet scale deployment/{role} --replicas=N`)",
            param="role",
        )


class Operations:
    """Carries out operators' orders on requests, workers, tasks and dead letters. Any method may
    raise RedisUnreachable, and NotFound or Conflict naming the cause.
    """

    def __init__(self, client: Redis, config: FleetConfig, submit: Submit) -> None:
        self._redis = client
        self._submit = submit
        self._config = config
        self._graph = config.graph_declaration()

    async def retry(self, request: RequestId, *, by: str | None = None) -> RequestId:
        """Submit a copy of a request and return the new id. A client reads the answer with
        `GatewayRequests.resume`. `by`: name of the API key that orders it, for the journal; None if
        no operator did.
        """
        raw = cast("bytes | None", await answer_of(self._redis.hget(keys.request(request), "spec")))
        if raw is None:
            raise NotFound(UNKNOWN_REQUEST.format(request=request), param="request_id")
        spec = decode_request(raw)
        blob = (
            cast("bytes | None", await answer_of(self._redis.get(keys.blob(request))))
            if spec.audio
            else None
        )
        return await self._submit_again(spec, blob, by)

    async def _submit_again(
        self, spec: RequestSpec, blob: bytes | None, by: str | None
    ) -> RequestId:
        if spec.graph != self._graph.name:
            raise Conflict(
                f"request {spec.id} is of graph {spec.graph}, and this deployment serves "
                f"{self._graph.name}",
                param="request_id",
            )
        if spec.audio and blob is None:
            raise Conflict(
                f"request {spec.id} cannot be sent again: the audio of its prompt is deleted a "
                "minute after its end, or with its dead letter",
                param="request_id",
            )
        again = msgspec.structs.replace(
            spec, id=new_request_id(), created_us=now_us(), retry_of=spec.id, is_counted=False
        )
        await self._submit(again, blob, by)
        return again.id

    async def order_worker(self, worker: str, order: WorkerOrder, *, by: str = "") -> None:
        """Order a worker to drain, resume, stop or dump its threads. Repeating an order is not a
        conflict. `by`: name of the API key that orders it, for the journal.
        """
        call = scripts.order(WorkerId(worker), order, by)
        raw = await answer_of(run_async(self._redis, call))
        answer, *reasons = texts(raw) if isinstance(raw, list) else [text(cast(bytes, raw))]
        if answer == "ok":
            return
        if answer not in ORDER_REFUSALS:
            raise NotFound(
                f"no worker {worker[:80]!r}; GET /v1/fleet/workers lists those there are",
                param="worker_id",
            )
        role = role_of(WorkerId(worker))
        why = "".join(reasons) or f"no other worker of {role} is free to replace it"
        refusal = ORDER_REFUSALS[answer].format(role=role, why=why)
        raise Conflict(f"{worker} {refusal}", param="worker_id")

    async def scale(self, role: str, number: int, *, by: str = "") -> RoleName:
        """Order how many workers of a role accept tasks; the present `fleet up` commands start and
        stop them. Return the role's name. `by`: name of the API key that orders it.

        Raises: BadInput, NotFound for an unknown role, Conflict if no `fleet up` is present or the
        number is fixed by the configuration.
        """
        name = check_scale(self._config, role, number)
        answer = await answer_of(run_async(self._redis, scripts.scale(name, number, by)))
        check_managed(name, text(answer))
        return name

    async def choose_drafter(self, stage: str, drafter: str) -> None:
        """Let the workers of a stage draft with `drafter`, or with the configured one again
        (`CONFIGURED`). Workers change within half a second.
        """
        check_drafter(self._graph, stage, drafter)
        if drafter == CONFIGURED:
            await answer_of(self._redis.hdel(keys.DRAFTERS, stage))
        else:
            await answer_of(self._redis.hset(keys.DRAFTERS, stage, drafter))

    async def redeliver(
        self, request: RequestId, stage: StageName, epoch: Epoch, *, by: str = ""
    ) -> None:
        """Revoke a task from its owner, so that it is granted again. `epoch`: the epoch that the
        operator saw; 0: any. `by`: name of the API key that orders it, for the journal.
        """
        has_worker = stage != CLIENT
        call = scripts.redeliver(request, stage, epoch, by)
        answer = text(await answer_of(run_async(self._redis, call))) if has_worker else "no_task"
        if answer == "ok":
            log.info(
                "request %s, stage %s is revoked from its owner, to be granted again",
                request,
                stage,
            )
            return
        error, param, message = REDELIVERY_REFUSALS.get(answer, NOT_REDELIVERED)
        raise error(
            message.format(request=request, stage=stage, shown=stage[:80], state=answer),
            param=param,
        )

    async def retry_dead_letter(self, request: RequestId, *, by: str = "") -> RequestId:
        """Submit the request of a dead letter again, as `retry` does, and drop the letter. If
        workers die over it again, the new id becomes a dead letter.
        """
        letter = await answer_of(find_letter(self._redis, request))
        blob = cast(
            "bytes | None", await answer_of(self._redis.get(keys.dead_letter_blob(request)))
        )
        again = await self._submit_again(spec_of(letter), blob, by)
        await answer_of(self._drop(letter))
        return again

    async def drop_dead_letter(self, request: RequestId) -> None:
        await answer_of(self._drop(await answer_of(find_letter(self._redis, request))))

    async def _drop(self, letter: DeadLetter) -> None:
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.unlink(keys.dead_letter_blob(letter.request))
            pipe.xdel(keys.DEAD, letter.entry)
            await pipe.execute()
