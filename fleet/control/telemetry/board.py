"""Everything people look at and order, as one gateway offers it: `web.ports.TelemetryPort` over Redis. Knows no HTTP."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar, cast

import msgspec
import redis
import redis.asyncio
from redis.exceptions import RedisError

from fleet.config import FleetConfig
from fleet.control import keys, scripts
from fleet.control.connect import SOCKET_TIMEOUT_S, connect_for_a_call, pairs, run_async, text
from fleet.control.dead_letters import spec_of
from fleet.control.job_files import read_file, remove_folder
from fleet.control.telemetry.feed import Feed
from fleet.control.telemetry.index import read_page
from fleet.control.telemetry.logs import checked_entry, line_of, read_log_page, says
from fleet.control.telemetry.queues import find_letter, letter_view, read_letters_async, read_queues
from fleet.control.telemetry.request_trace import read_story
from fleet.control.telemetry.series import SeriesReader, Tally, growth_of, rates_of
from fleet.control.telemetry.workers import read_pulls, read_worker_stories, transfers_of
from fleet.control.views import read_roles
from fleet.core.chunk import Chunk, decode_chunk
from fleet.core.clock import now_us
from fleet.core.errors import Conflict, NotFound, RedisUnreachable
from fleet.core.events import decode_event
from fleet.core.ids import CLIENT, EdgeName, Epoch, RequestId, StageName, WorkerId, new_request_id
from fleet.core.pulls import KV
from fleet.core.request import RequestSpec, decode_request
from fleet.core.request_trace import RequestFilter, RequestPage, RequestTrace
from fleet.core.telemetry import (
    DeadLetterView,
    FeedEntry,
    Job,
    LogLine,
    LogPage,
    LogQuery,
    Queue,
    SeriesPoint,
    Transfers,
    WorkerOrder,
    WorkerStory,
)

log = logging.getLogger(__name__)
T = TypeVar("T")
Send = Callable[[RequestSpec, bytes | None], Awaitable[None]]
"""Submits a request whose answer nobody waits for: it is read to its end all the same, so that the log has it."""


class Telemetry:
    """One gateway's. Raises, from any method: RedisUnreachable."""

    def __init__(
        self, url: str, client: redis.asyncio.Redis, reader: redis.asyncio.Redis, config: FleetConfig, send: Send
    ) -> None:
        self._url, self._redis, self._config, self._send = url, client, config, send
        self._graph = config.graph_declaration()
        self._events, self._lines = Feed(reader, keys.EVENTS), Feed(reader, keys.LOGS)
        self._series = SeriesReader(client, self._graph)
        self._tally = Tally()

    async def stop(self) -> None:
        await asyncio.gather(self._events.stop(), self._lines.stop())

    async def requests(self, wanted: RequestFilter, *, before: str = "", limit: int = 50) -> RequestPage:
        return await _ask(read_page(self._redis, wanted, before=before, limit=limit))

    async def story(self, request: RequestId) -> RequestTrace | None:
        return await _ask(read_story(self._redis, request))

    async def log_of(self, request: RequestId, edge: EdgeName) -> Sequence[Chunk]:
        entries = cast("list[tuple[bytes, object]]", await _ask(self._redis.xrange(keys.edge(request, edge))))
        return [decode_chunk(pairs(raw)["h"]) for _, raw in entries]

    async def has_log(self, request: RequestId, edge: EdgeName) -> bool:
        return bool(await _ask(self._redis.exists(keys.edge(request, edge))))

    async def note_heard(self, request: RequestId, *, played_samples: int, underruns: int) -> None:
        await _ask(run_async(self._redis, scripts.record_playback(request, played_samples, underruns)))

    def note_underruns(self, count: int) -> None:
        self._tally.underruns(count)

    def note_rtf(self, rtf: float) -> None:
        self._tally.rtf(rtf)

    async def tell(self) -> None:
        """Add what was counted here to the fleet's series, with what there is to see. Raises: redis's errors."""
        counted = self._tally.take()
        try:
            roles = await read_roles(self._redis, [role.name for role in self._config.roles()])
            pulls = await read_pulls(self._redis)
            seen = {f"running:{role.role}": role.running for role in roles}
            seen |= {f"waiting:{role.role}": role.queue_depth for role in roles}
            seen |= {f"pulled:{edge}": counts.num_bytes for edge, counts in pulls.items()}
            await run_async(self._redis, scripts.record_metrics(counted, seen))
        except RedisError:
            self._tally.give_back(counted)
            raise

    async def retry(self, request: RequestId) -> RequestId:
        raw = cast("bytes | None", await _ask(self._redis.hget(keys.request(request), "spec")))
        if raw is None:
            raise NotFound(f"no request {request!r}; it never was, or its retention time is over", param="request_id")
        spec = decode_request(raw)
        blob = cast("bytes | None", await _ask(self._redis.get(keys.blob(request)))) if spec.audio else None
        if spec.audio and blob is None:
            raise Conflict(
                f"request {request} cannot be sent again: its prompt's sound is kept for a minute after its end, and is gone",
                param="request_id",
            )
        return await self._again(spec, blob)

    async def _again(self, spec: RequestSpec, blob: bytes | None) -> RequestId:
        if spec.graph != self._graph.name:
            raise Conflict(
                f"request {spec.id} is of graph {spec.graph}, and this deployment serves {self._graph.name}", param="request_id"
            )
        anew = msgspec.structs.replace(spec, id=new_request_id(), created_us=now_us(), retry_of=spec.id)
        await self._send(anew, blob)
        return anew.id

    async def workers(self) -> Sequence[WorkerStory]:
        return await _ask(read_worker_stories(self._redis))

    async def order_worker(self, worker: str, order: WorkerOrder) -> None:
        answer = text(await _ask(run_async(self._redis, scripts.order(WorkerId(worker), order))))
        match answer:
            case "ok":
                return
            case "gateway":
                raise Conflict(f"{worker} is a gateway: it takes no tasks, and no orders", param="worker_id")
            case "leaving":
                raise Conflict(f"{worker} is leaving already; start another with `fleet worker`", param="worker_id")
            case "gone":
                raise Conflict(f"{worker} is gone; start another with `fleet worker`", param="worker_id")
            case _:
                raise NotFound(f"no worker {worker[:80]!r}; GET /v1/fleet/workers lists those there are", param="worker_id")

    async def redeliver(self, request: RequestId, stage: StageName, epoch: Epoch) -> None:
        known = stage != CLIENT
        answer = text(await _ask(run_async(self._redis, scripts.redeliver(request, stage, epoch)))) if known else "no_task"
        match answer:
            case "ok":
                log.info("request %s, stage %s is taken back, to be granted again", request, stage)
            case "unknown":
                raise NotFound(f"no request {request!r}; it never was, or its retention time is over", param="request_id")
            case "no_task":
                raise NotFound(f"request {request} has no task of stage {stage[:80]!r} with a worker", param="stage")
            case "ended":
                raise Conflict(f"request {request} has ended; send it again with POST .../retry", param="request_id")
            case "stale":
                raise Conflict(f"stage {stage} of {request} has been granted again since it was seen; look again", param="epoch")
            case state:
                raise Conflict(f"stage {stage} of {request} is {state}: no worker has it to be taken from", param="stage")

    async def queues(self) -> Sequence[Queue]:
        roles = await _ask(read_roles(self._redis, [role.name for role in self._config.roles()]))
        steps = await _ask(self._series.read())
        stages = {str(role.name): role.stage for role in self._config.roles()}
        return await _ask(read_queues(self._redis, roles, stages, {"in": rates_of(steps, "in"), "out": rates_of(steps, "out")}))

    async def dead_letters(self) -> Sequence[DeadLetterView]:
        return [letter_view(letter) for letter in await _ask(read_letters_async(self._redis))]

    async def retry_dead_letter(self, request: RequestId) -> RequestId:
        letter = await _ask(find_letter(self._redis, request))
        again = await self._again(spec_of(letter), letter.blob)
        await _ask(self._redis.xdel(keys.DEAD, letter.entry))
        return again

    async def drop_dead_letter(self, request: RequestId) -> None:
        letter = await _ask(find_letter(self._redis, request))
        await _ask(self._redis.xdel(keys.DEAD, letter.entry))

    async def transfers(self) -> Transfers:
        workers, total = await _ask(read_worker_stories(self._redis)), await _ask(read_pulls(self._redis))
        steps = await _ask(self._series.read())
        edges = [str(edge.name) for edge in self._graph.edges if edge.remote]
        split = any(given.split is not None for given in self._config.stages.values())
        return transfers_of(workers, total, [*edges, *([KV] if split else [])], growth_of(steps, "pulled"))

    async def series(self) -> Sequence[SeriesPoint]:
        return await _ask(self._series.points())

    async def logs(self, wanted: LogQuery, *, before: str = "", limit: int = 200) -> LogPage:
        return await _ask(read_log_page(self._redis, wanted, before=before, limit=limit))

    async def follow_logs(self, wanted: LogQuery, *, after: str = "") -> AsyncGenerator[LogLine, None]:
        first = checked_entry(after, "after") if after else await _ask(self._lines.newest())
        try:
            async with aclosing(self._lines.follow(first)) as entries:
                async for entry, fields in entries:
                    line = line_of(entry, fields)
                    if says(line, wanted):
                        yield line
        except RedisError as error:
            raise _unreachable(error) from error

    async def follow(self, *, after: str = "") -> AsyncGenerator[FeedEntry, None]:
        first = checked_entry(after, "after") if after else await _ask(self._events.newest())
        try:
            if after and not await self._events.kept(first):
                first = await self._events.newest()
                yield FeedEntry(id=first, event=None, missed=True)
            async with aclosing(self._events.follow(first)) as entries:
                async for entry, fields in entries:
                    yield FeedEntry(id=entry, event=decode_event(fields["e"]))
        except RedisError as error:
            raise _unreachable(error) from error

    async def jobs(self) -> Sequence[Job]:
        from fleet.control import jobs

        return await self._with_rq(jobs.jobs)

    async def job(self, job: str) -> Job | None:
        from fleet.control import jobs

        return await self._with_rq(lambda connection: jobs.job(connection, job))

    async def submit_job(self, kind: str, arguments: object) -> Job:
        from fleet.control import jobs

        return await self._with_rq(lambda connection: jobs.submit(connection, kind, arguments))

    async def retry_job(self, job: str) -> Job:
        from fleet.control import jobs

        return await self._with_rq(lambda connection: jobs.retry(connection, job))

    async def stop_job(self, job: str) -> None:
        from fleet.control import jobs

        await self._with_rq(lambda connection: jobs.stop(connection, job))

    async def delete_job(self, job: str) -> None:
        from fleet.control import jobs

        await self._with_rq(lambda connection: jobs.delete(connection, job))
        # A folder on another machine is removed by the worker there.
        await asyncio.to_thread(remove_folder, self._config.data_dir, job)

    async def job_file(self, job: str, name: str) -> bytes:
        if await self.job(job) is None:
            raise NotFound(f"job_id: no job {job[:80]!r}; GET /v1/fleet/jobs lists those there are", param="job_id")
        return await asyncio.to_thread(read_file, self._config.data_dir, job, name)

    async def _with_rq(self, work: Callable[[redis.Redis], T]) -> T:
        """rq waits for its answers, so it is asked aside, over a connection of its own."""

        def ask() -> T:
            with connect_for_a_call(self._url, SOCKET_TIMEOUT_S) as connection:
                return work(connection)

        return await _ask(asyncio.to_thread(ask))


async def _ask(call: Awaitable[T]) -> T:
    try:
        return await call
    except RedisError as error:
        raise _unreachable(error) from error


def _unreachable(error: RedisError) -> RedisUnreachable:
    return RedisUnreachable(f"Redis does not answer ({error})")
