"""Pages of the list of requests, sorted by id, which is the order of creation. The index has ids
only; the data of a request is in its hashes.

Filters other than the state are applied while reading, over a bounded number of requests per page.
"""

from collections import Counter
from collections.abc import Sequence
from typing import cast

import msgspec
from redis.asyncio import Redis

from fleet.control import keys
from fleet.control.connect import text
from fleet.core.errors import BadInput
from fleet.core.ids import CLIENT, EdgeName, RequestId, StageName, first_id_at
from fleet.telemetry.trace import (
    STATES,
    RequestFilter,
    RequestPage,
    RequestRow,
    TaskBrief,
    matches,
)

BATCH, MAX_SCANNED, MAX_COUNTED = 200, 2000, 1000
CLOCKS_US = 60_000_000
"""Time (us) by which a gateway's clock, which dates request ids, may be ahead of Redis's."""
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
    """Read one page of requests. `wanted`: filter. `before`: `next` of the previous page; "" for
    the newest. A filtered page may have fewer than `limit` rows, even none, although `next` is set.
    Raises: BadInput for an unknown state; redis-py's errors.
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
    page = RequestPage(
        rows=tuple(rows),
        next=following,
        counts=dict(zip(STATES, counts, strict=True)),
        now_us=now_us,
    )
    of_any_state = msgspec.structs.replace(wanted, state="")
    if of_any_state == RequestFilter():
        return page
    found, rest = await _scan(client, of_any_state, "", MAX_COUNTED, now_us)
    matching = Counter(row.state for row in found)
    return msgspec.structs.replace(
        page,
        counts={state: matching[state] for state in STATES},
        counts_all=not rest,
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
