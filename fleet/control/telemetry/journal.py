"""Reader of the journal, the bounded stream of what happened to the fleet. Its entries have the
fields of `fleet.telemetry.journal.JournalEntry` under the same names. Knows no page.
"""

from collections.abc import Collection, Mapping

from redis.asyncio import Redis

from fleet.control import keys
from fleet.control.connect import number, stream_entries, text
from fleet.core.ids import RequestId, StageName, WorkerId
from fleet.telemetry.journal import JournalEntry

BATCH = 1000


async def read_journal(
    client: Redis, *, since_us: int, until_us: int, limit: int, what: Collection[str] = ()
) -> list[JournalEntry]:
    """Return the entries from `since_us` to `until_us` (0: now), both to the millisecond and
    included, oldest first; of more than `limit`, the newest. `what`: kinds of entries to return;
    empty for all. Raises: redis-py's errors.
    """
    first = str(since_us // 1000)
    end = str(until_us // 1000) if until_us else "+"
    batch = BATCH if what else min(limit, BATCH)
    entries: list[JournalEntry] = []
    num_found = batch
    while num_found == batch and len(entries) < limit:
        found = stream_entries(
            await client.xrevrange(keys.JOURNAL, max=end, min=first, count=batch)
        )
        num_found = len(found)
        entries += [
            entry_of(entry, fields)
            for entry, fields in found
            if not what or text(fields.get("what")) in what
        ]
        if found:
            end = f"({found[-1][0]}"
    return entries[:limit][::-1]


def entry_of(entry: str, fields: Mapping[str, bytes]) -> JournalEntry:
    return JournalEntry(
        id=entry,
        at_us=number(fields, "at_us"),
        what=text(fields.get("what")),
        worker=WorkerId(text(fields.get("worker"))),
        role=text(fields.get("role")),
        request=RequestId(text(fields.get("request"))),
        stage=StageName(text(fields.get("stage"))),
        by=text(fields.get("by")),
        code=text(fields.get("code")),
        detail=fields.get("detail", b"").decode(errors="replace"),
        count=number(fields, "count"),
        pause_us=number(fields, "pause_us"),
        serving=number(fields, "serving") if "serving" in fields else None,
        requests=tuple(map(RequestId, filter(None, text(fields.get("requests")).split(",")))),
        message=fields.get("message", b"").decode(errors="replace"),
    )
