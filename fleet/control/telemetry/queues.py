"""Reads of the pending grants of each role, of waiting requests, and of dead letters. Knows no
internals of workers.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec
from redis.asyncio import Redis

from fleet.control import keys, scripts
from fleet.control.connect import (
    Reply,
    entry_order,
    number,
    pairs,
    run_async,
    stream_entries,
    text,
)
from fleet.control.dead_letters import DeadLetter, letters_of, spec_of
from fleet.control.telemetry.workers import read_workers
from fleet.core.errors import NotFound, UnknownWireVersion, quoted
from fleet.core.ids import Epoch, RequestId, RoleName, StageName
from fleet.telemetry.views import (
    DeadLetterView,
    PendingGrant,
    RoleQueue,
    RoleView,
    WaitingClient,
    WorkerView,
)

MAX_PENDING = 100
Rates = Mapping[str, Mapping[str, float]]


async def read_roles(
    client: Redis, names: Sequence[RoleName], *, grace_us: int = 0
) -> list[RoleView]:
    """Read the roles `names`, in this order, and then any further role that has a worker.
    `grace_us`: time for which a role that lost its last worker still admits requests.
    """
    workers = [worker for worker in await read_workers(client) if worker.role]
    roles = list(dict.fromkeys([*names, *sorted(RoleName(worker.role) for worker in workers)]))
    queues = cast("list[list[object]]", await run_async(client, scripts.queues(roles)))
    expected = cast(
        "list[tuple[bytes, bytes, int, int | bytes]]",
        await run_async(client, scripts.availability(grace_us, roles)),
    )
    return [
        msgspec.structs.replace(
            _role(role, queue, [w for w in workers if w.role == role], starting, loaded),
            admits=bool(text(admits)),
        )
        for role, queue, (admits, _, starting, loaded) in zip(roles, queues, expected, strict=True)
    ]


def _role(
    role: RoleName,
    queue: list[object],
    workers: list[WorkerView],
    starting: int,
    loaded: int | bytes,
) -> RoleView:
    depth, lag, oldest_us = (int(text(number)) for number in queue)
    return RoleView(
        role=role,
        queue_depth=depth,
        lag=lag,
        oldest_s=round(oldest_us / 1e6, 3),
        workers=sum(worker.takes_tasks for worker in workers),
        draining=sum(worker.draining for worker in workers),
        standby=sum(worker.standby for worker in workers),
        running=sum(worker.running for worker in workers),
        capacity=sum(worker.capacity for worker in workers if worker.takes_tasks),
        starting=starting,
        loaded_percent=loaded if isinstance(loaded, int) else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleOrders:
    """Numbers of workers by role. `ordered`: number that an operator ordered; no entry without an
    order. `placed`: number that the present `fleet up` commands are to run.
    """

    ordered: Mapping[RoleName, int]
    placed: Counter[RoleName]

    def wanted_of(self, role: RoleName, configured: int) -> int:
        """Return how many workers a role should have: the ordered number, else the placed one, else
        `configured`, the number in the configuration.
        """
        return self.ordered.get(role, self.placed[role] if role in self.placed else configured)


async def read_orders(client: Redis) -> RoleOrders:
    pipe = client.pipeline(transaction=False)
    pipe.time()
    pipe.zrange(keys.SUPERVISORS, 0, -1, withscores=True)
    pipe.hgetall(keys.WANTED)
    (seconds, _), listed, ordered = cast(
        "tuple[tuple[int, int], list[tuple[bytes, float]], Reply]", tuple(await pipe.execute())
    )
    present = [text(name) for name, deadline_us in listed if deadline_us > seconds * 1_000_000]
    for supervisor in present:
        pipe.hgetall(keys.supervisor(supervisor))
    placed = Counter[RoleName]()
    for shares in cast("list[Reply]", await pipe.execute()) if present else []:
        # written by `share_workers`: the share, and the number of workers that can run
        placed.update(
            {RoleName(role): int(text(v).split()[0]) for role, v in pairs(shares).items()}
        )
    return RoleOrders(
        ordered={RoleName(role): int(text(number)) for role, number in pairs(ordered).items()},
        placed=placed,
    )


async def read_waiting_clients(client: Redis) -> list[WaitingClient]:
    """Read the clients whose requests wait for a place, the longest queue first."""
    found = cast("dict[bytes, bytes]", await client.hgetall(keys.WAITING_NUMBERS))
    waiting = {text(name): int(value) for name, value in found.items() if name != b"*"}
    if not waiting:
        return []
    live = cast("list[bytes | None]", await client.hmget(keys.LIVE_CLIENTS, list(waiting)))
    clients = [
        WaitingClient(client=name, num_waiting=count, num_live=int(text(num_live) or 0))
        for (name, count), num_live in zip(waiting.items(), live, strict=True)
    ]
    return sorted(clients, key=lambda each: -each.num_waiting)


async def read_queues(
    client: Redis,
    roles: Sequence[RoleView],
    stages: Mapping[RoleName, StageName],
    rates: Rates,
) -> list[RoleQueue]:
    """Read the pending grants of roles, at most the `MAX_PENDING` oldest of each. `roles`: views of
    the roles. `stages`: stage of each role. `rates`: tasks granted (`in`) and claimed (`out`) per
    second, by role.
    """
    pipe = client.pipeline(transaction=False)
    for role in roles:
        for stream in keys.role_streams(role.role):
            pipe.xrange(stream, count=MAX_PENDING)
            pipe.xinfo_groups(stream)
    pipe.time()
    answers = tuple(await pipe.execute(raise_on_error=False))
    *replies, (seconds, micros) = cast("tuple[*tuple[object, ...], tuple[int, int]]", answers)
    now_ms = seconds * 1000 + micros / 1000
    streams = [
        _pending(entries, groups, now_ms)
        for entries, groups in zip(replies[::2], replies[1::2], strict=True)
    ]
    return [
        _queue(
            role,
            stages.get(role.role, StageName(role.role)),
            rates,
            [*streams[2 * n], *streams[2 * n + 1]],
        )
        for n, role in enumerate(roles)
    ]


def _queue(
    role: RoleView, stage: StageName, rates: Rates, pending: Sequence[PendingGrant]
) -> RoleQueue:
    return RoleQueue(
        **msgspec.structs.asdict(role),
        stage=stage,
        in_per_s=round(rates["in"].get(role.role, 0.0), 3),
        out_per_s=round(rates["out"].get(role.role, 0.0), 3),
        pending=tuple(pending[:MAX_PENDING]),
    )


def _pending(entries: object, groups: object, now_ms: float) -> list[PendingGrant]:
    """Return the unclaimed grants of one of a role's streams. `entries`, `groups`: replies of
    XRANGE and XINFO GROUPS for it.
    """
    last_read = _last_read(groups)
    found = stream_entries(entries) if isinstance(entries, list) else []
    return [_grant(entry, fields, last_read, now_ms) for entry, fields in found]


def _last_read(groups: object) -> tuple[int, int]:
    """Return the id of the last entry that was read as a grant."""
    found = cast("list[dict[str, object]]", groups) if isinstance(groups, list) else []
    read = [group["last-delivered-id"] for group in found if text(group["name"]) == keys.GROUP]
    return entry_order(text(read[0])) if read else (0, 0)


def _grant(
    entry: str, fields: Mapping[str, bytes], last_read: tuple[int, int], now_ms: float
) -> PendingGrant:
    return PendingGrant(
        request=RequestId(text(fields.get("r"))),
        stage=StageName(text(fields.get("s"))),
        epoch=Epoch(number(fields, "e")),
        age_s=round(max(0.0, now_ms - entry_order(entry)[0]) / 1000, 3),
        alone=bool(fields.get("a")),
        read=entry_order(entry) <= last_read,
    )


async def read_letters_async(client: Redis) -> list[DeadLetter]:
    """Return all dead letters, newest first."""
    return letters_of(await client.xrevrange(keys.DEAD))


async def find_letter(client: Redis, request: RequestId) -> DeadLetter:
    """Return the dead letter of one request. Raises: NotFound."""
    for letter in await read_letters_async(client):
        if letter.request == request:
            return letter
    raise NotFound(
        f"no dead letter {quoted(request)}; GET /v1/fleet/dead-letters lists those there are",
        param="request_id",
    )


def letter_view(letter: DeadLetter) -> DeadLetterView:
    try:
        spec = spec_of(letter)
    except UnknownWireVersion:
        return DeadLetterView(
            id=letter.request,
            stage=letter.stage,
            why=letter.why,
            died_us=letter.died_us,
            readable=False,
        )
    return DeadLetterView(
        id=letter.request,
        stage=letter.stage,
        why=letter.why,
        died_us=letter.died_us,
        kind=spec.kind,
        num_prompt_tokens=len(spec.prompt_ids),
        audio_s=round(sum(clip.num_samples / clip.rate_hz for clip in spec.audio), 3),
    )
