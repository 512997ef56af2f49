"""Pages of the list of requests, sorted by id, which is the order of creation. The index has ids
only; the data of a request is in its hashes.

Filters other than the state are applied while reading, over a bounded number of requests per page.
"""

from collections.abc import Sequence
from typing import cast

from redis.asyncio import Redis

from fleet.control import keys
from fleet.control.connect import text
from fleet.core.errors import BadInput
from fleet.core.ids import CLIENT, EdgeName, RequestId, StageName, first_id_at
from fleet.telemetry.trace import (
    LIVE_STATES,
    STATES,
    RequestFilter,
    RequestPage,
    RequestRow,
    TaskBrief,
)

BATCH, MAX_SCANNED = 200, 2000
CLOCKS_US = 60_000_000
"""Time by which a gateway's clock, which request ids have, may be ahead of Redis's."""
FIELDS: tuple[str, ...] = (
    "state",
    "kind",
    "model",
    "created_us",
    "ended_us",
    "code",
    "message",
    "session",
    "stages",
    "outputs",
    "failed_stage",
)


async def read_page(
    client: Redis, wanted: RequestFilter, *, before: str, limit: int
) -> RequestPage:
    """Read one page of requests. `wanted`: filter. `before`: id of the last request of the previous
    page. Raises: BadInput for an unknown state; redis-py's errors.
    """
    if wanted.state and wanted.state not in STATES:
        raise BadInput(
            f"state: no state {wanted.state!r}; use one of {', '.join(STATES)}", param="state"
        )
    pipe = client.pipeline(transaction=False)
    for state in STATES:
        pipe.zcard(keys.index(state))
    pipe.time()
    *counts, (seconds, micros) = cast(
        "tuple[*tuple[int, ...], tuple[int, int]]", tuple(await pipe.execute())
    )
    now_us = seconds * 1_000_000 + micros
    rows, following = await _scan(client, wanted, before, limit, now_us)
    return RequestPage(
        rows=tuple(rows),
        next=following,
        counts=dict(zip(STATES, counts, strict=True)),
        now_us=now_us,
    )


async def _scan(
    client: Redis, wanted: RequestFilter, before: str, limit: int, now_us: int
) -> tuple[list[RequestRow], str]:
    key = keys.index(wanted.state) if wanted.state else keys.INDEX_ALL
    plain = wanted == RequestFilter(state=wanted.state)
    batch = min(BATCH, limit + 1) if plain else BATCH
    rows: list[RequestRow] = []
    scanned, last = 0, before
    if wanted.to_us:
        bound = first_id_at(wanted.to_us + CLOCKS_US)
        last = min(before or bound, bound)
    while scanned < MAX_SCANNED:
        newest = f"({last}" if last else "+"
        found = cast(
            "list[bytes]", await client.zrevrangebylex(key, newest, "-", start=0, num=batch)
        )
        ids = [RequestId(text(member)) for member in found if wanted.text in text(member)]
        by_id = {row.id: row for row in await read_rows(client, ids)}
        for place, member in enumerate(found):
            last = text(member)
            row = by_id.get(RequestId(last))
            rows += [row] if row is not None and matches(row, wanted, now_us) else []
            if len(rows) == limit:
                more = place + 1 < len(found) or len(found) == batch
                return rows, last if more else ""
        if len(found) < batch:
            return rows, ""
        scanned += batch
    return rows, last


async def read_rows(client: Redis, ids: Sequence[RequestId]) -> list[RequestRow]:
    """Read the descriptions of the requests `ids`. Requests that are no longer retained are left
    out.
    """
    if not ids:
        return []
    pipe = client.pipeline(transaction=False)
    for request in ids:
        pipe.hmget(keys.request(request), FIELDS)
    raw = cast("list[list[bytes | None]]", await pipe.execute())
    heads = {
        r: head for r, fields in zip(ids, raw, strict=True) if (head := _head(fields))["state"]
    }
    wanted = [(r, stage, _edges(head)) for r, head in heads.items() for stage in _stages(head)]
    for request, stage, edges in wanted:
        pipe.hmget(
            keys.task(request, stage), ["state", "holder", *(f"first_us:{edge}" for edge in edges)]
        )
    answers = cast("list[list[bytes | None]]", await pipe.execute()) if wanted else []
    tasks: dict[RequestId, list[TaskBrief]] = {request: [] for request in heads}
    first: dict[RequestId, dict[EdgeName, int]] = {request: {} for request in heads}
    for (request, stage, edges), (state, holder, *times) in zip(wanted, answers, strict=True):
        failed = heads[request]["failed_stage"] == stage
        tasks[request].append(
            TaskBrief(stage=stage, state="failed" if failed else text(state), worker=text(holder))
        )
        first[request] |= {edge: int(at) for edge, at in zip(edges, times, strict=True) if at}
    return [_row(request, head, tasks[request], first[request]) for request, head in heads.items()]


def _head(fields: Sequence[bytes | None]) -> dict[str, str]:
    return {name: text(value) for name, value in zip(FIELDS, fields, strict=True)}


def _row(
    request: RequestId, head: dict[str, str], tasks: Sequence[TaskBrief], first: dict[EdgeName, int]
) -> RequestRow:
    return RequestRow(
        id=request,
        state=head["state"],
        kind=head["kind"],
        model=head["model"],
        created_us=int(head["created_us"] or 0),
        ended_us=int(head["ended_us"] or 0),
        code=head["code"],
        error=head["message"],
        session=head["session"],
        tasks=tuple(tasks),
        first_us=first,
    )


def _stages(head: dict[str, str]) -> list[StageName]:
    return [StageName(name) for name in head["stages"].split(",") if name and name != CLIENT]


def _edges(head: dict[str, str]) -> list[EdgeName]:
    return [EdgeName(name) for name in head["outputs"].split(",") if name]


def matches(row: RequestRow, wanted: RequestFilter, now_us: int) -> bool:
    """Return True if a request matches the filter. `now_us`: time until which a live request's
    duration counts.
    """
    took_us = (row.ended_us or now_us) - row.created_us
    return (
        wanted.state in ("", row.state)
        and wanted.kind in ("", row.kind)
        and wanted.model in ("", row.model)
        and wanted.session in ("", row.session)
        and (
            not wanted.stage
            or any(t.stage == wanted.stage and _at_work(row.state, t.state) for t in row.tasks)
        )
        and (not wanted.worker or any(task.worker == wanted.worker for task in row.tasks))
        and took_us >= wanted.min_ms * 1000
        and (not wanted.to_us or row.created_us <= wanted.to_us)
        and (row.ended_us or now_us) >= wanted.from_us
        and wanted.text in row.id
    )


def _at_work(request_state: str, task_state: str) -> bool:
    if request_state in LIVE_STATES:
        return task_state != "finished"
    return request_state != "failed" or task_state == "failed"
