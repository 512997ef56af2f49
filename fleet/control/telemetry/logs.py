"""Search in the fleet's log: lines of all processes, as `fleet.control.log_stream` sends them.

The log is bounded. Facts recorded by scripts are in the stream `LOGS` and, under the same ids, in
`FACTS`, which reaches further back.
"""

import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import cast

from redis.asyncio import Redis

from fleet.control import keys
from fleet.control.connect import entry_order, number, stream_entries, text
from fleet.core.errors import BadInput
from fleet.telemetry.views import LEVELS, LogLine, LogPage, LogQuery

BATCH = 1000
ENTRY = re.compile(r"\d{1,19}-\d{1,19}")

REQUESTS = re.compile(r"\breq-[\w-]+")
"""Pattern of request ids in a message: a line about a worker may name several requests, although
its label holds one at most.
"""


def checked_entry(entry: str, name: str) -> str:
    """Return an entry id that a client sent as the parameter `name`. Raises: BadInput if the id is
    malformed.
    """
    if not ENTRY.fullmatch(entry) or any(int(part) >= 2**64 for part in entry.split("-")):
        raise BadInput(f"{name}: {entry[:40]!r} is not an id of this list", param=name)
    return entry


async def read_log_page(client: Redis, wanted: LogQuery, *, before: str, limit: int) -> LogPage:
    """Read one page of log lines. `wanted`: filter. `before`: id of the last line of the previous
    page. Raises: BadInput for an unknown level or a malformed `before`; redis-py's errors.
    """
    if wanted.level and wanted.level not in LEVELS:
        raise BadInput(
            f"level: no level {wanted.level!r}; use one of {', '.join(LEVELS)}", param="level"
        )
    last = checked_entry(before, "before") if before else ""
    pipe = client.pipeline(transaction=False)
    pipe.get(keys.LOGS_DROPPED)
    pipe.xrevrange(keys.LOGS, count=1)
    dropped, newest = cast(
        "tuple[bytes | None, list[tuple[bytes, object]]]", tuple(await pipe.execute())
    )
    lines, following = await _scan(client, wanted, last, limit)
    return LogPage(
        lines=tuple(lines),
        next=following,
        newest=text(newest[0][0]) if newest else "0-0",
        dropped=int(text(dropped) or 0),
    )


async def _scan(
    client: Redis, wanted: LogQuery, last: str, limit: int
) -> tuple[list[LogLine], str]:
    lines: list[LogLine] = []
    batch = limit + 1 if wanted == LogQuery() else BATCH
    async with aclosing(_lines_before(client, last, batch)) as found:
        async for line in found:
            if not says(line, wanted):
                continue
            if len(lines) == limit:
                return lines, lines[-1].id
            lines.append(line)
    return lines, ""


async def _lines_before(client: Redis, last: str, batch: int) -> AsyncGenerator[LogLine, None]:
    """Yield the log lines before the entry `last` ("": from the end), newest first, and then the
    older facts that the log no longer holds. `batch`: number of lines per read.
    """
    for key in (keys.LOGS, keys.FACTS):
        num_found = batch
        while num_found == batch:
            end = f"({last}" if last else "+"
            found = stream_entries(await client.xrevrange(key, max=end, count=batch))
            num_found = len(found)
            for last, fields in found:
                yield line_of(last, fields)


async def read_trimmed_facts(client: Redis, after: str) -> list[LogLine]:
    """Return the facts after the entry `after` that the log no longer holds, oldest first."""
    kept = stream_entries(await client.xrange(keys.LOGS, count=1))
    if not kept or entry_order(kept[0][0]) <= entry_order(after):
        return []
    found = stream_entries(await client.xrange(keys.FACTS, min=f"({after}", max=f"({kept[0][0]}"))
    return [line_of(entry, fields) for entry, fields in found]


def line_of(entry: str, fields: Mapping[str, bytes]) -> LogLine:
    level = text(fields.get("l"))
    return LogLine(
        id=entry,
        at_us=number(fields, "t"),
        level=level if level in LEVELS else "info",
        logger=text(fields.get("n")),
        message=fields.get("m", b"").decode(errors="replace"),
        process=text(fields.get("p")),
        worker=text(fields.get("w")),
        stage=text(fields.get("s")),
        request=text(fields.get("r")),
        epoch=number(fields, "e"),
        trace=fields.get("x", b"").decode(errors="replace"),
    )


def says(line: LogLine, wanted: LogQuery) -> bool:
    return (
        wanted.text.casefold() in line.message.casefold()
        and (not wanted.level or LEVELS.index(line.level) >= LEVELS.index(wanted.level))
        and wanted.worker in ("", line.worker)
        and (
            wanted.request in ("", line.request) or wanted.request in REQUESTS.findall(line.message)
        )
        and wanted.process in ("", line.process)
    )
