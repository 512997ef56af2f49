"""State of the whole fleet, read from Redis for operators: requests, workers, roles, transfers,
series, logs, events. Knows no HTTP.
"""

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing
from typing import cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from fleet.config import FleetConfig
from fleet.control import keys, scripts
from fleet.control.connect import (
    Reply,
    answer_of,
    pairs,
    run_async,
    stream_entries,
    text,
    unreachable,
)
from fleet.control.redis_status import RedisStatus
from fleet.control.telemetry.feed import Feed
from fleet.control.telemetry.flows import flows_of, read_parked
from fleet.control.telemetry.index import read_page, read_rows
from fleet.control.telemetry.journal import read_journal
from fleet.control.telemetry.logs import (
    checked_entry,
    line_of,
    read_log_page,
    read_trimmed_facts,
    says,
)
from fleet.control.telemetry.queues import (
    letter_view,
    read_letters_async,
    read_orders,
    read_queues,
    read_roles,
    read_waiting_clients,
)
from fleet.control.telemetry.request_trace import GAPS, TURN, read_first_outputs, read_trace
from fleet.control.telemetry.series import (
    GROWTH_STEPS,
    NO_REQUEST,
    SeriesReader,
    Tally,
    growth_of,
    rates_of,
)
from fleet.control.telemetry.workers import (
    drafts_of,
    read_gaps,
    read_load,
    read_worker,
    read_workers,
    transfers_of,
)
from fleet.core.chunk import Chunk, decode_chunk
from fleet.core.errors import FleetError, KeyAtLimit
from fleet.core.events import decode_event
from fleet.core.ids import EdgeName, RequestId, RoleName, WorkerId
from fleet.drafts.figures.speculation import StageDrafts
from fleet.telemetry.counts import KV, LatencyCounts, PullCounts
from fleet.telemetry.journal import JournalEntry
from fleet.telemetry.trace import (
    FirstOutputs,
    RequestFilter,
    RequestPage,
    RequestRow,
    RequestTrace,
    SoundGaps,
)
from fleet.telemetry.views import (
    DeadLetterView,
    FeedEntry,
    LogLine,
    LogPage,
    LogQuery,
    RoleQueue,
    RoleView,
    SeriesPoint,
    Transfers,
    WaitingClient,
    WorkerView,
)


class Telemetry:
    """Reader of the fleet's state for one gateway, with bounded reads; also collects the gateway's
    own measurements for the fleet's time series. Any method may raise RedisUnreachable.
    """

    def __init__(
        self,
        client: Redis,
        reader: Redis,
        config: FleetConfig,
        status: RedisStatus,
    ) -> None:
        self._redis = client
        self._config = config
        self._status = status
        self._graph = config.graph_declaration()
        self._events = Feed(reader, keys.EVENTS)
        self._lines = Feed(reader, keys.LOGS)
        self._series = SeriesReader(client, self._graph)
        self._tally = Tally()

    async def stop(self) -> None:
        await asyncio.gather(self._events.stop(), self._lines.stop())

    def redis_trouble(self) -> str:
        """Return why Redis admits no requests although it can be read, with the remedy; "" if it
        admits requests.
        """
        return self._status.trouble

    async def list_requests(
        self, wanted: RequestFilter, *, before: str = "", limit: int = 50
    ) -> RequestPage:
        """Return a page of requests. `wanted`: filter. `before`: `next` of the previous page; ""
        for the newest. Raises: BadInput.
        """
        return await answer_of(read_page(self._redis, wanted, before=before, limit=limit))

    async def rows_of(self, requests: Sequence[RequestId]) -> list[RequestRow]:
        """Return the descriptions of single requests, without those that are no longer retained."""
        return await answer_of(read_rows(self._redis, requests))

    async def trace(self, request: RequestId) -> RequestTrace | None:
        return await answer_of(read_trace(self._redis, request))

    async def first_outputs(self, request: RequestId) -> FirstOutputs:
        return await answer_of(read_first_outputs(self._redis, self._graph, request))

    async def edge_log(self, request: RequestId, edge: EdgeName) -> Sequence[Chunk]:
        """Return the retained chunks of a request's edge, from the first; empty if the log is gone.
        Audio is retained for a minute after the request's end.
        """
        reply = await answer_of(self._redis.xrange(keys.edge(request, edge)))
        return [decode_chunk(fields["h"]) for _, fields in stream_entries(reply)]

    async def has_edge_log(self, request: RequestId, edge: EdgeName) -> bool:
        return bool(await answer_of(self._redis.exists(keys.edge(request, edge))))

    async def num_live(self) -> int:
        """Return the number of live requests in the whole fleet."""
        return int(await answer_of(self._redis.scard(keys.LIVE)))

    async def waiting_clients(self) -> list[WaitingClient]:
        """Return the clients whose requests wait for a place, at any gateway; the largest numbers
        first.
        """
        return await answer_of(read_waiting_clients(self._redis))

    async def record_playback(
        self, request: RequestId, *, played_samples: int, underruns: int
    ) -> None:
        """Save the playback statistics that a client's player reported. Ignored if the request is
        unknown or no longer retained.
        """
        await answer_of(
            run_async(self._redis, scripts.record_playback(request, played_samples, underruns))
        )

    async def record_turn(self, request: RequestId, *, voiced_end_us: int, decided_us: int) -> None:
        """Save, for the request that answers a user's turn, when the speech of the turn ended and
        when the turn was decided to be over. Ignored if the request is unknown or no longer
        retained.
        """
        await self._note(request, TURN, voiced_end_us, decided_us)

    async def record_gaps(self, request: RequestId, gaps: SoundGaps) -> None:
        """Save the gaps in the sound of a whole answer. Ignored if the request is unknown or no
        longer retained.
        """
        await self._note(request, GAPS, gaps.num, gaps.longest_us)

    async def _note(self, request: RequestId, name: str, *numbers: int) -> None:
        value = ",".join(map(str, numbers))
        await answer_of(run_async(self._redis, scripts.note_request(request, name, value)))

    async def claim_export(self, request: RequestId, gateway: WorkerId) -> bool:
        """Claim, for `gateway`, the sending of an ended request's spans to a collector. Return
        False if the sending was claimed before, or if the request is unknown.
        """
        call = scripts.claim_export(request, gateway)
        return text(await answer_of(run_async(self._redis, call))) == "ok"

    def record_underruns(self, count: int) -> None:
        """Add a client's playback underruns to the fleet's time series."""
        self._tally.underruns(count)

    def record_rtf(self, rtf: float) -> None:
        """Add the real-time factor of a whole answer (seconds to compute a second of audio) to the
        fleet's time series.
        """
        self._tally.rtf(rtf)

    def record_refusal(self, error: FleetError, request: RequestId = NO_REQUEST) -> None:
        """Add a request that was not admitted to the fleet's time series and to its journal.
        `request`: id of the request; "" for a voice session.
        """
        limit = error.param if isinstance(error, KeyAtLimit) else None
        self._tally.refusal(error.code, limit or "", request, error.message)

    async def write_series(self, gateway: WorkerId) -> None:
        """Add the counts that this gateway has recorded to the fleet's time series, and write the
        present gauges. The recorded counts begin again from 0, unless an error occurs.
        `gateway`: present id of this gateway. Raises: redis-py's errors.
        """
        counted, refused = self._tally.take(), self._tally.take_refused()
        try:
            load = await read_load(self._redis, "running", "pulls", "sent")
            gauges = {f"pulled:{edge}": counts.num_bytes for edge, counts in load.pulls.items()}
            for edge, sent in load.sent.items():
                gauges |= {f"chunks:{edge}": sent.num_chunks, f"bytes:{edge}": sent.num_bytes}
            roles = list(dict.fromkeys([*self._role_names(), *sorted(load.running)]))
            waiting = cast(
                "list[list[object]]", await run_async(self._redis, scripts.queues(roles))
            )
            for role, (depth, *_) in zip(roles, waiting, strict=True):
                gauges |= {
                    f"running:{role}": load.running.get(role, 0),
                    f"waiting:{role}": int(text(depth)),
                }
            named = {name: requests.value for name, requests in refused.items()}
            call = scripts.record_metrics(gateway, counted, gauges, named)
            await run_async(self._redis, call)
        except RedisError:
            self._tally.give_back(counted, refused)
            raise

    async def workers(self, *, with_gone: bool = False) -> list[WorkerView]:
        """Return the workers by role, then the gateways. `with_gone`: append processes that ended
        in the last `GONE_LISTED_S` seconds, latest first.
        """
        return await answer_of(read_workers(self._redis, with_gone=with_gone))

    async def worker(self, worker: WorkerId) -> WorkerView | None:
        """Return a present worker or gateway, or one that ended in the last `GONE_KEPT_DAYS`; None
        if there was none.
        """
        return await answer_of(read_worker(self._redis, worker))

    async def journal(
        self, *, since_us: int = 0, until_us: int = 0, limit: int = 1000, what: Collection[str] = ()
    ) -> list[JournalEntry]:
        """Return the entries of the journal from `since_us` to `until_us` (0: now), oldest first;
        of more than `limit`, the newest. `what`: kinds of entries; empty for all.
        """
        read = read_journal(
            self._redis, since_us=since_us, until_us=until_us, limit=limit, what=what
        )
        return await answer_of(read)

    async def drafts(self) -> list[StageDrafts]:
        """Return the stages whose draft tokens are verified, with the speculation statistics of
        their workers.
        """
        chosen = pairs(cast("Reply", await answer_of(self._redis.hgetall(keys.DRAFTERS))))
        workers = await self.workers()
        return [
            StageDrafts(
                stage=stage.name,
                configured=self._config.stage(stage.name).speculation.drafter,
                chosen=text(chosen.get(stage.name)),
                workers=drafts_of(stage.name, workers),
            )
            for stage in self._graph.stages
            if stage.verifies_drafts
        ]

    async def roles(self) -> list[RoleView]:
        """Return the roles of the deployment, then further roles that have a worker."""
        grace_us = int(self._config.lease.no_worker_timeout_s * 1e6)
        roles = await answer_of(read_roles(self._redis, self._role_names(), grace_us=grace_us))
        gaps = await self._gaps()
        configured = {role.name: role.replicas for role in self._config.roles()}
        orders = await answer_of(read_orders(self._redis))
        return [
            msgspec.structs.replace(
                role,
                gap=gaps.get(role.role, ""),
                wanted=orders.wanted_of(role.role, configured.get(role.role, 0)),
                managed=role.role in orders.placed,
                placed=orders.placed[role.role],
            )
            for role in roles
        ]

    async def _gaps(self) -> dict[RoleName, str]:
        """Return the roles of span workers whose stage has anchors but no anchor with a complete
        route, each with the layers that the first anchor lacks.
        """
        found = dict[RoleName, str]()
        for role in (role for role in self._config.roles() if role.hosts_spans):
            gaps = await answer_of(read_gaps(self._redis, RoleName(role.stage)))
            if gaps and all(gaps):
                found[role.name] = gaps[0]
        return found

    async def missing_roles(self) -> list[RoleName]:
        """Return the roles that answers need and that have no live worker that accepts tasks (a
        starting worker does not count), or too few span workers.
        """
        names = [role.name for role in self._config.roles() if not role.optional]
        gaps = await self._gaps()
        seconds, micros = await answer_of(self._redis.time())
        pipe = self._redis.pipeline(transaction=False)
        for name in names:
            pipe.zcount(
                keys.role_workers(name, "accepting"), f"({seconds * 1_000_000 + micros}", "+inf"
            )
        return [
            name
            for name, live in zip(names, await answer_of(pipe.execute()), strict=True)
            if not live or name in gaps
        ]

    async def refused_workers(self) -> dict[str, str]:
        """Return the workers whose registration was refused in the last hour, oldest first, each
        with the reason.
        """
        raw = cast("list[bytes]", await answer_of(self._redis.zrange(keys.REFUSED, 0, -1)))
        entries = (text(entry).partition(" ") for entry in raw)
        return {worker: why for worker, _, why in entries}

    async def queues(self) -> list[RoleQueue]:
        roles = await self.roles()
        steps = await answer_of(self._series.read(GROWTH_STEPS))
        stages = {role.name: role.stage for role in self._config.roles()}
        rates = {"in": rates_of(steps, "in"), "out": rates_of(steps, "out")}
        return await answer_of(read_queues(self._redis, roles, stages, rates))

    async def dead_letters(self) -> list[DeadLetterView]:
        """Return the dead letters, the newest first."""
        return [letter_view(letter) for letter in await answer_of(read_letters_async(self._redis))]

    async def transfers(self) -> Transfers:
        workers = await self.workers()
        load = await answer_of(read_load(self._redis, "pulls", "sent"))
        steps = await answer_of(self._series.read(GROWTH_STEPS))
        parked = await answer_of(read_parked(self._redis, self._graph))
        return Transfers(
            flows=flows_of(self._graph, load.sent, parked, steps),
            edges=transfers_of(self._pull_counts(load.pulls), growth_of(steps, "pulled")),
            workers=tuple(view.transfer for view in workers if view.transfer is not None),
        )

    def _pull_counts(self, counts: Mapping[str, PullCounts]) -> dict[str, PullCounts]:
        """Return the pull counts by edge. Edges with remote tensors come first, even without a
        pull.
        """
        edges = [str(edge.name) for edge in self._graph.edges if edge.remote]
        split = any(stage.split is not None for stage in self._config.stages.values())
        names = [*edges, *([KV] if split else []), *sorted(counts)]
        return {name: counts.get(name, PullCounts()) for name in names}

    async def hop_counts(self) -> LatencyCounts:
        """Return the histogram of chunk latencies, summed over the listed workers since each
        joined.
        """
        return (await answer_of(read_load(self._redis, "hops"))).hops

    async def series(self) -> list[SeriesPoint]:
        """Return the points of the time series for the last `SERIES_KEPT_S` seconds, oldest first.
        A step without counts is a point of zeros.
        """
        return await answer_of(self._series.points())

    async def logs(self, wanted: LogQuery, *, before: str = "", limit: int = 200) -> LogPage:
        """Return a page of log lines. `wanted`: filter. `before`: `next` of the previous page; ""
        for the newest. Raises: BadInput.
        """
        return await answer_of(read_log_page(self._redis, wanted, before=before, limit=limit))

    async def follow_logs(
        self, wanted: LogQuery, *, after: str = ""
    ) -> AsyncGenerator[LogLine, None]:
        """Yield log lines that match `wanted` as they are logged, without end. `after`: id of the
        line to continue from; "": from now on.
        """
        first = checked_entry(after, "after") if after else await answer_of(self._lines.newest())
        try:
            async with aclosing(self._matching_lines(first, wanted)) as lines:
                async for line in lines:
                    yield line
        except RedisError as error:
            raise unreachable(error) from error

    async def _matching_lines(self, first: str, wanted: LogQuery) -> AsyncGenerator[LogLine, None]:
        for line in await read_trimmed_facts(self._redis, first):
            if says(line, wanted):
                yield line
        async with aclosing(self._lines.follow(first)) as entries:
            async for entry, fields in entries:
                line = line_of(entry, fields)
                if says(line, wanted):
                    yield line

    async def follow_events(self, *, after: str = "") -> AsyncGenerator[FeedEntry, None]:
        """Yield events as they happen, without end. `after`: id of the event to continue from; "":
        from now on. If events after `after` are no longer stored, the first entry is `missed`, and
        new events follow.
        """
        first = checked_entry(after, "after") if after else await answer_of(self._events.newest())
        try:
            if after and not await self._events.has_all_after(first):
                first = await self._events.newest()
                yield FeedEntry(id=first, event=None, missed=True)
            async with aclosing(self._events.follow(first)) as entries:
                async for entry, fields in entries:
                    yield FeedEntry(id=entry, event=decode_event(fields["e"]))
        except RedisError as error:
            raise unreachable(error) from error

    def _role_names(self) -> list[RoleName]:
        return [role.name for role in self._config.roles()]
