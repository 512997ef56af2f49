"""A worker's link to Redis: one pipelined round trip per iteration sends every write and returns
every notice and grant.

Large chunks, which a notice only names, are read from their logs by a second round trip. A script
reserves grants for the free slots, in the order of the role's streams; the read after it, in the
same round trip, waits for the inbox and for further grants if the worker has nothing else to do.
A worker that would wait, and has just seen its role's streams empty, only waits: what arrives wakes
it.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import redis
from redis.exceptions import ResponseError

from fleet.control import keys
from fleet.control.connect import (
    Reply,
    entry_order,
    exchange,
    exchange_each,
    pairs,
    stream_entries,
    text,
)
from fleet.control.logged_chunks import LogReads
from fleet.control.notices import (
    AnyNotice,
    ChunkNotice,
    Grant,
    Notice,
    UnreadableNotice,
    parse_grant,
    parse_notices,
)
from fleet.control.outage import refuses_writes
from fleet.control.scripts import Arg, Call, read_grants
from fleet.control.training import PURGES
from fleet.core.clock import now_us
from fleet.core.errors import TransferError
from fleet.core.ids import RequestId, RoleName, StageName, WorkerId
from fleet.drafts.figures.head_holders import HeldHead
from fleet.drafts.figures.training import DraftVersion, decode_version
from fleet.process.fleet_secret import FleetSecret
from fleet.telemetry.counts import LatencyCounts
from fleet.telemetry.vitals import Vitals

log = logging.getLogger(__name__)

MAX_NOTICES = 512
TRIM_AFTER = 64
"""Number of inbox entries read before they are deleted, unless the worker is idle: a deletion costs
as much as a read.
"""
ASK_AGAIN_S = 0.005
"""Time after seeing its role's streams empty in which a waiting worker does not ask for grants
again, but waits to be woken. Without this pause, a worker that receives chunk after chunk would ask
as often as it receives: a fifth of what Redis computes for a chunk.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnResult:
    """Result of one round trip. `replies`: one reply per call; `still_live`: one flag per request
    in `ask_live`, True if the request is live.

    `grants`: grants reserved for this worker. `woken`: grants that ended the wait for the role's
    streams, for slots for which the streams had no grants before; the role's other workers may read
    them too, and whoever claims one first has it.

    `refusal`: error with which Redis refused writes, or None. A refused call has such an error as
    its reply; it has changed nothing, and may be sent again.
    """

    replies: list[Reply]
    refusal: ResponseError | None
    notices: list[Notice]
    grants: list[Grant]
    woken: list[Grant]
    still_live: list[bool]


class RedisLink:
    """Connection of a worker's loop to Redis. Not thread-safe. Raises redis's errors, except
    refusals of writes. `hops`: statistics of the age of chunks on arrival.

    `secret`: secret with which the records of peers must be signed; None if records are not signed.
    """

    def __init__(
        self,
        client: redis.Redis,
        worker: WorkerId,
        role: RoleName,
        secret: FleetSecret | None = None,
    ) -> None:
        self._secret = secret
        self._refused: set[WorkerId] = set()
        self._client = client
        self._inbox = keys.inbox(worker)
        self._role = role
        self._worker = worker
        self._read_up_to: str | None = None
        self._num_untrimmed, self._found_nothing = 0, False
        self._seen_empty_at = -ASK_AGAIN_S
        self.hops = LatencyCounts()

    @property
    def worker(self) -> WorkerId:
        return self._worker

    def exchange(
        self,
        calls: Sequence[Call],
        *,
        free_slots: int,
        block_ms: int,
        ask_live: Sequence[RequestId] = (),
    ) -> TurnResult:
        """Send `calls`, then read notices and, if `free_slots` > 0, up to `free_slots` grants of
        the role. `block_ms`: longest wait of the read (0: none); `ask_live`: requests to ask about.
        """
        num_free = min(free_slots, MAX_NOTICES)
        awaited, now = num_free if block_ms > 0 else 0, time.monotonic()
        asks = num_free > 0 and not (awaited and now - self._seen_empty_at < ASK_AGAIN_S)
        sent = [*calls, read_grants(self._worker, self._role, num_free)] if asks else calls
        commands: list[Sequence[Arg]] = []
        is_due = self._read_up_to is not None and (
            self._num_untrimmed >= TRIM_AFTER or self._found_nothing
        )
        if self._read_up_to and is_due:
            commands.append(("XTRIM", self._inbox, "MINID", _after(self._read_up_to)))
        if ask_live:
            commands.append(("SMISMEMBER", keys.LIVE, *ask_live))
        commands.append(self._read_command(awaited, block_ms))
        replies = exchange_each(self._client, sent, *commands)
        refusal = _refusal_in(replies)
        if is_due and not isinstance(replies[len(sent)], ResponseError):
            self._read_up_to, self._num_untrimmed = None, 0
        grants = _grants(replies[len(calls)]) if asks else []
        is_served = not asks or isinstance(replies[len(calls)], list)
        received, woken, num_entries = self._parse(
            [] if isinstance(replies[-1], ResponseError) else replies[-1]
        )
        if asks or woken:
            is_empty = is_served and not grants and not woken
            self._seen_empty_at = now if is_empty else -ASK_AGAIN_S
        # The bound on grants may have cut the read short; the rest of the inbox must not wait for
        # one more iteration each. The claims of grants read it anyway.
        cut_short = 0 < awaited <= num_entries and not grants
        received = self._complete(received, cut_short=cut_short)
        live = [bool(flag) for flag in cast("list[int]", replies[-2])] if ask_live else []
        notices = [notice for notice in received if not isinstance(notice, Grant)]
        self._count_hops(notices)
        return TurnResult(
            replies=replies[: len(calls)],
            refusal=refusal,
            notices=notices,
            grants=grants + [notice for notice in received if isinstance(notice, Grant)],
            woken=_new_among(woken, grants)[: num_free - len(grants)] if is_served else [],
            still_live=live,
        )

    def _complete(self, received: list[AnyNotice], *, cut_short: bool) -> list[AnyNotice]:
        """Read the chunks that notices only name, and the rest of an inbox whose read was
        `cut_short`; return all notices and grants.
        """
        reads, rest = LogReads(received), [self._read_command(0, 0)] if cut_short else []
        if not reads.commands and not rest:
            return received
        replies = exchange(self._client, (), *reads.commands, *rest)
        received = reads.resolve(replies[: len(reads.commands)])
        return (
            received + self._complete(self._parse(replies[-1])[0], cut_short=False)
            if rest
            else received
        )

    def _count_hops(self, notices: Sequence[Notice]) -> None:
        arrived_us = now_us()
        for notice in notices:
            if isinstance(notice, ChunkNotice):
                self.hops.add(arrived_us - notice.chunk.produced_us)
            elif isinstance(notice, UnreadableNotice):
                raise notice.error

    def _read_command(self, awaited: int, block_ms: int) -> Sequence[Arg]:
        """Return the read of the inbox, which also waits for up to `awaited` grants."""
        streams = [self._inbox, *(keys.role_streams(self._role) if awaited else ())]
        block: list[Arg] = ["BLOCK", block_ms] if block_ms > 0 else []
        head: list[Arg] = [
            "XREADGROUP",
            "GROUP",
            keys.IDLE_GROUP,
            self._worker,
            "COUNT",
            awaited or MAX_NOTICES,
            *block,
            "NOACK",
        ]
        return (*head, "STREAMS", *streams, *[">"] * len(streams))

    def _parse(self, reply: Reply) -> tuple[list[AnyNotice], list[Grant], int]:
        """Return the notices of the inbox, the grants in the role's streams, and the number of
        inbox entries that were read.
        """
        received: list[AnyNotice] = []
        woken: list[Grant] = []
        num_entries = 0
        for name, entries in cast("list[tuple[bytes, list[tuple[bytes, object]]]]", reply or []):
            if text(name) == self._inbox:
                received += [notice for _, raw in entries for notice in parse_notices(pairs(raw))]
                self._read_up_to, num_entries = text(entries[-1][0]), len(entries)
            else:
                woken += _grants(entries)
        self._num_untrimmed += num_entries
        self._found_nothing = not num_entries
        return received, woken, num_entries

    def find_workers(self, role: RoleName) -> list[WorkerId]:
        """Return every listed worker of a role, whatever its status."""
        reads = [("ZRANGE", keys.role_workers(role, status), 0, -1) for status in keys.STATUSES]
        by_status = cast("list[list[bytes]]", exchange(self._client, (), *reads))
        return [WorkerId(text(name)) for names in by_status for name in names]

    def are_queued(self, tasks: Sequence[tuple[RequestId, StageName]]) -> list[bool]:
        """Return, for each task, True if it is granted and no worker has claimed it yet."""
        if not tasks:
            return []
        pipe = self._client.pipeline(transaction=False)
        for request, stage in tasks:
            pipe.hget(keys.task(request, stage), "state")
        return [state == b"granted" for state in cast("list[bytes | None]", pipe.execute())]

    def chosen_drafter(self, stage: StageName) -> str:
        """Return the drafter that an operator chose for a stage; "" if none was chosen."""
        return text(cast("bytes | None", self._client.hget(keys.DRAFTERS, stage)))

    def chosen_version(self, stage: StageName) -> str:
        """Return the hash of the draft head version that a stage is to use; "" is the draft head
        with which the workers started.
        """
        return text(cast("bytes | None", self._client.hget(keys.DRAFTERS, f"{stage}:version")))

    def read_version(self, sha256: str) -> DraftVersion | None:
        found = cast("bytes | None", self._client.hget(keys.DRAFT_VERSIONS, sha256))
        return decode_version(found) if found is not None else None

    def find_head_holders(self, sha256: str, roles: Sequence[RoleName]) -> dict[WorkerId, HeldHead]:
        """Return the workers of these roles that hold the draft head version with this hash, and
        where its weights can be read.
        """
        statuses = ("accepting", "standby", "leaving", "ordered_off")
        sets = [keys.role_workers(role, status) for role in roles for status in statuses]
        listed = [
            WorkerId(text(raw))
            for name in sets
            for raw in cast("list[bytes]", self._client.zrange(name, 0, -1))
        ]
        held = {worker: self._held_head(worker) for worker in listed if worker != self._worker}
        return {
            worker: head
            for worker, head in held.items()
            if head is not None and head.sha256 == sha256
        }

    def _held_head(self, worker: WorkerId) -> HeldHead | None:
        held = cast("bytes | None", self._client.hget(keys.worker(worker), "held_head"))
        return Vitals.decode({"held_head": held or b""}).held_head or None

    def num_purges(self) -> int:
        """Return the number of times that operators have ordered the trainer to delete its
        samples.
        """
        return int(text(cast("bytes | None", self._client.hget(keys.TRAINING, PURGES))) or 0)

    def find_unlisted(self, workers: Sequence[WorkerId]) -> list[WorkerId]:
        """Return those of `workers` that are no longer listed, in one round trip. Their ids are
        never used again.
        """
        if not workers:
            return []
        (leases,) = exchange(self._client, (), ("ZMSCORE", keys.WORKERS, *workers))
        return [
            worker
            for worker, lease in zip(workers, cast("list[object]", leases), strict=True)
            if lease is None
        ]

    def read_peer_metadata(self, worker: WorkerId) -> bytes | None:
        """Return the metadata needed to read from a peer; None if the peer is gone.

        Raises: TransferError if the peer's record is not signed with the fleet's secret.
        """
        record = pairs(self._client.hgetall(keys.worker(worker)))
        if record and self._secret is not None and not self._secret.verifies(worker, record):
            why = (
                f"worker {worker} is not read from: its record in Redis is not signed with "
                "security.fleet_secret; "
                "either another process changed the record, or the worker has another secret"
            )
            if worker not in self._refused:
                self._refused.add(worker)
                log.warning("%s", why)
            raise TransferError(why)
        return record.get("transfer")


def _refusal_in(replies: Sequence[Reply]) -> ResponseError | None:
    """Return the first error by which Redis refused a write, or None. Raises: any other error among
    the replies.
    """
    errors = [reply for reply in replies if isinstance(reply, ResponseError)]
    for error in errors:
        if not refuses_writes(error):
            raise error
    return errors[0] if errors else None


def _grants(reply: Reply) -> list[Grant]:
    """Parse grants from entries of a role's streams; a refused read has none."""
    entries = stream_entries(reply) if isinstance(reply, list) else ()
    return [parse_grant(fields, entry) for entry, fields in entries]


def _new_among(woken: Sequence[Grant], grants: Sequence[Grant]) -> list[Grant]:
    read = {(grant.request, grant.epoch) for grant in grants}
    return [grant for grant in woken if (grant.request, grant.epoch) not in read]


def _after(entry: str) -> str:
    """Return the smallest stream id above `entry`."""
    milliseconds, sequence = entry_order(entry)
    return f"{milliseconds}-{sequence + 1}"
