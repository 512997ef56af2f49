"""Benchmark of a large fleet's control plane: the CPU time of the conductor beside few and many
live requests, and the cost of a submission beside few and many workers.

The conductor is a real process on a Redis of its own. The benchmark acts as the gateway and as the
workers: it submits requests, claims their tasks, and, in the windows with traffic, appends and
acknowledges chunks, and submits and aborts further requests, at the same rate beside few live
requests and many.
"""

import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import psutil
from rich.console import Group

from fleet.config import FleetConfig
from fleet.control import keys, scripts
from fleet.control.connect import connect, exchange, run
from fleet.core.chunk import WireTensor
from fleet.core.ids import Epoch, RequestId, RoleName, StageName, new_request_id
from fleet.core.request import RequestSpec
from fleet.lab.measure import processes
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.measurement import (
    BenchOptions,
    Context,
    Measurement,
    argument,
    whole_number,
)
from fleet.lab.measure.pair import (
    CONSUMER,
    GATEWAY_ID,
    PRODUCER,
    WORKERS,
    BareRedis,
    ack_of,
    all_ok,
    append_of,
    bare_redis,
    claim_of,
    links_of,
    num_commands,
    ok,
    register_workers,
    submit_of,
    workers_in,
)
from fleet.lab.report.result import Result
from fleet.lab.report.stats import Ratio, at_most
from fleet.lab.report.tables import figure, table_of, titled
from fleet.worker.process.redis_link import RedisLink

FEW_LIVE, FEW_WORKERS, MANY_WORKERS = 20, 10, 1000
SMALL_LIVE, SMALL_WORKERS, SMALL_SECONDS = 200, 100, 1
LIVE_RATIO, MOST_SHARE, SUBMIT_RATIO = 1.5, 0.05, 1.2
"""Targets. `LIVE_RATIO`: largest ratio of the conductor's CPU time beside many and beside few live
requests. `MOST_SHARE`: largest share of a core that the conductor may use. `SUBMIT_RATIO`: largest
ratio of a submission's time beside many and beside few workers.
"""
BOUND = 1_000_000
OPENED_AT_ONCE = 200
TICK_S = 0.1
CHUNKS_PER_TICK, REQUESTS_PER_TICK = 20, 2
CODES = {"codes": WireTensor("int32", (1, 16), bytes(64))}
NUM_SUBMISSIONS, ROUNDS = 20, 20
"""Number of submissions per round, and number of rounds. The round with the smallest mean counts,
since Redis's times include waits for a CPU core.
"""
START_S, STOP_S, POLL_S = 60.0, 10.0, 0.05


class ConductorWindow(msgspec.Struct, frozen=True, kw_only=True):
    """CPU time of the conductor and of Redis in a window of `seconds`. `live`: number of live
    requests. `chunks`: number of chunks appended meanwhile; 0 in a window without traffic.
    """

    live: int
    seconds: float
    chunks: int
    conductor_s: float
    redis_s: float

    @property
    def share(self) -> float:
        """Share of a core that the conductor used."""
        return self.conductor_s / self.seconds

    @property
    def is_idle(self) -> bool:
        return self.chunks == 0


class SubmissionCost(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of a submission beside `workers` listed workers: Redis's time, and the number of
    commands that it ran.
    """

    workers: int
    redis_us: float
    commands: float


class LiveRequestsResult(Result, frozen=True, kw_only=True):
    """Windows beside few and many live requests, each without traffic and with it, and submissions
    beside few and many workers.
    """

    windows: tuple[ConductorWindow, ...]
    submissions: tuple[SubmissionCost, SubmissionCost]

    def tables(self) -> Sequence[Group]:
        conductor = table_of("live requests", "chunks/s", "conductor, % of a core", "Redis, %")
        for window in self.windows:
            conductor.add_row(
                f"{window.live}",
                figure(window.chunks / window.seconds),
                figure(100 * window.share),
                figure(100 * window.redis_s / window.seconds),
            )
        submission = table_of("workers", "Redis's time, us", "commands")
        for cost in self.submissions:
            submission.add_row(f"{cost.workers}", figure(cost.redis_us), figure(cost.commands))
        return [
            titled("the conductor beside live requests", conductor),
            titled("a submission beside listed workers", submission),
        ]

    def targets(self) -> Sequence[Ratio]:
        few, many = self.submissions
        beside = f"{many.workers} workers / {few.workers}"
        return [
            *self._conductor_targets(is_idle=True),
            *self._conductor_targets(is_idle=False),
            at_most(f"time of a submission, {beside}", many.redis_us / few.redis_us, SUBMIT_RATIO),
            at_most(f"commands of a submission, {beside}", many.commands / few.commands, 1.0),
        ]

    def _conductor_targets(self, *, is_idle: bool) -> list[Ratio]:
        few, many = (window for window in self.windows if window.is_idle == is_idle)
        what = "without traffic" if is_idle else "with traffic"
        ratio = many.share / few.share if few.share else 0.0
        return [
            at_most(f"conductor {what}, {many.live} live requests / {few.live}", ratio, LIVE_RATIO),
            at_most(
                f"conductor {what} at {many.live} live requests", many.share, MOST_SHARE, "cores"
            ),
        ]


def measure_live_requests(context: Context) -> LiveRequestsResult:
    """Measure the conductor, then submissions. Raises: ConfigError if there is no Redis to start;
    BenchError if the conductor does not lead or ends.
    """
    options = context.options
    many, seconds, workers = options.live, options.live_seconds, MANY_WORKERS
    if options.small:
        many, seconds, workers = SMALL_LIVE, SMALL_SECONDS, SMALL_WORKERS
    step = context.steps("windows and submissions", 5)
    windows: list[ConductorWindow] = []
    with (
        bare_redis() as server,
        _conductor(server, options) as conductor,
        _LiveRequests(server.url) as live,
    ):
        for count, has_traffic in product((FEW_LIVE, many), (False, True)):
            live.open(count)
            windows.append(_window(server, conductor, live, seconds, has_traffic))
            step()
    submissions = _submission_costs(context.resolve(), FEW_WORKERS, workers)
    step()
    return LiveRequestsResult(windows=tuple(windows), submissions=submissions)


@contextmanager
def _conductor(server: BareRedis, options: BenchOptions) -> Iterator[psutil.Process]:
    """Run `fleet conductor` on a Redis for the duration of the block, which begins once the
    conductor leads. Raises: BenchError if the conductor does not lead in time.
    """
    command = [*processes.FLEET, "conductor"]
    command += ["--config", f"{options.config}"] if options.config else []
    command += [part for override in options.overrides for part in ("--set", override)]
    with tempfile.TemporaryDirectory(prefix="fleet-bench-live-") as folder:
        log = Path(folder) / "conductor.log"
        env = processes.own_environment(server.url)
        process = processes.start(command, env, log, signal.SIGKILL)
        try:
            if not _leads(server, process.poll):
                tail = processes.end_of(log)
                raise BenchError(f"the conductor does not lead; end of its log:\n{tail}")
            yield psutil.Process(process.pid)
        finally:
            processes.stop([process], STOP_S)


def _leads(server: BareRedis, status: Callable[[], int | None]) -> bool:
    """Wait until a conductor leads. Return False if its process ends first, or `START_S` passes.
    `status`: returns the exit status of the process, None while it runs.
    """
    deadline = time.monotonic() + START_S
    with connect(server.url) as client:
        while status() is None and time.monotonic() < deadline:
            if client.exists(keys.CONDUCTOR):
                return True
            time.sleep(POLL_S)
    return False


def _window(
    server: BareRedis,
    conductor: psutil.Process,
    live: "_LiveRequests",
    seconds: float,
    has_traffic: bool,
) -> ConductorWindow:
    began_s, conductor_s, redis_s = time.monotonic(), _cpu_s(conductor), server.cpu_s()
    num_chunks, next_s = 0, began_s
    while time.monotonic() < began_s + seconds:
        if has_traffic:
            num_chunks += live.make_traffic()
        next_s = max(next_s + TICK_S, time.monotonic())
        time.sleep(next_s - time.monotonic() if next_s > time.monotonic() else 0)
    return ConductorWindow(
        live=len(live.opened),
        seconds=time.monotonic() - began_s,
        chunks=num_chunks,
        conductor_s=_cpu_s(conductor) - conductor_s,
        redis_s=server.cpu_s() - redis_s,
    )


def _cpu_s(process: psutil.Process) -> float:
    """Return the CPU time of a process, on Linux to the nanosecond: a conductor without work may
    need less than a clock tick.
    """
    tasks = Path(f"/proc/{process.pid}/task").glob("*/schedstat")
    if nanoseconds := sum(int(task.read_text().split()[0]) for task in tasks):
        return nanoseconds / 1e9
    times = process.cpu_times()
    return times.user + times.system


class _LiveRequests:
    """Live requests of one edge. The two tasks of each request are owned by workers that this
    process acts as.

    `opened`: the requests with the epochs of their tasks.
    """

    def __init__(self, url: str) -> None:
        self._client = connect(url, one_connection=True)
        self._links = links_of(partial(RedisLink, self._client))
        self.opened: list[tuple[RequestId, Mapping[StageName, Epoch]]] = []
        self._num_chunks: list[int] = []
        self._next = 0
        workers = [(worker, RoleName(stage)) for stage, worker in WORKERS.items()]
        register_workers(partial(run, self._client), workers)

    def __enter__(self) -> "_LiveRequests":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def open(self, count: int) -> None:
        """Submit requests and claim their tasks until `count` requests are live."""
        while len(self.opened) < count:
            epochs: dict[RequestId, dict[StageName, Epoch]] = {}
            submitted = self._submit(min(OPENED_AT_ONCE, count - len(self.opened)))
            for stage in WORKERS:
                turn = self._links[stage].exchange((), free_slots=len(submitted), block_ms=0)
                claims = [claim_of(stage, grant) for grant in turn.grants]
                for grant, reply in zip(turn.grants, exchange(self._client, claims), strict=True):
                    ok(reply)
                    epochs.setdefault(grant.request, {})[stage] = grant.epoch
            self.opened += [(request, epochs[request]) for request in submitted]
            self._num_chunks += [0] * len(submitted)

    def make_traffic(self) -> int:
        """Append, read and acknowledge one chunk of each of the next `CHUNKS_PER_TICK` requests,
        and submit and abort others; return the number of chunks.
        """
        chosen = [(self._next + n) % len(self.opened) for n in range(CHUNKS_PER_TICK)]
        self._next = (chosen[-1] + 1) % len(self.opened)
        appends: list[scripts.Append] = []
        acks: list[scripts.Ack] = []
        for number in chosen:
            (request, epochs), index = self.opened[number], self._num_chunks[number]
            appends.append(append_of(request, epochs[PRODUCER], index, CODES, first_row=index))
            acks.append(ack_of(request, epochs[CONSUMER], index + 1))
            self._num_chunks[number] += 1
        all_ok(run(self._client, scripts.append(appends)))
        self._links[CONSUMER].exchange([scripts.ack(acks)], free_slots=0, block_ms=0)
        self._links[PRODUCER].exchange((), free_slots=0, block_ms=0)
        others = self._submit(REQUESTS_PER_TICK)
        exchange(self._client, [scripts.abort(request, "api", "") for request in others])
        return len(chosen)

    def _submit(self, count: int) -> list[RequestId]:
        requests = [new_request_id() for _ in range(count)]
        for reply in exchange(self._client, [submit_of(request, BOUND) for request in requests]):
            ok(reply)
        return requests


def _submission_costs(
    config: FleetConfig, few: int, many: int
) -> tuple[SubmissionCost, SubmissionCost]:
    """Measure submissions to the fleet of `config`, beside few and many workers in turn."""
    with bare_redis() as one, bare_redis() as other:
        beside_few, beside_many = _Listed(one.url, config, few), _Listed(other.url, config, many)
        rounds = [(beside_few.mean_cost(), beside_many.mean_cost()) for _ in range(ROUNDS)]
        beside_few.close()
        beside_many.close()
    best_few, best_many = (min(costs) for costs in zip(*rounds, strict=True))
    return (
        SubmissionCost(workers=few, redis_us=best_few[0], commands=best_few[1]),
        SubmissionCost(workers=many, redis_us=best_many[0], commands=best_many[1]),
    )


class _Listed:
    """A Redis at `url` with `count` registered workers, in the roles of the fleet in turn."""

    def __init__(self, url: str, config: FleetConfig, count: int) -> None:
        self._client = connect(url, one_connection=True)
        self._graph = config.graph_declaration()
        self._roles = [role.name for role in config.roles()]
        register_workers(partial(run, self._client), workers_in(self._roles, count))

    def close(self) -> None:
        self._client.close()

    def mean_cost(self) -> tuple[float, float]:
        """Submit one round of requests. Return Redis's time (us) and number of commands per
        submission.
        """
        media = tuple(self._graph.media)
        used_us, num_commands = self._use()
        for _ in range(NUM_SUBMISSIONS):
            request = new_request_id()
            call = scripts.submit(
                RequestSpec(id=request, graph=self._graph.name, prompt_ids=(1,), outputs=media),
                None,
                bound=BOUND,
                stages=self._graph.stages_for(media),
                gateway=GATEWAY_ID,
                edges=[edge.name for edge in self._graph.edges_for(media)],
                roles=self._roles,
            )
            ok(run(self._client, call))
        later_us, later = self._use()
        return (later_us - used_us) / NUM_SUBMISSIONS, (later - num_commands) / NUM_SUBMISSIONS

    def _use(self) -> tuple[float, int]:
        """Return the time that Redis has spent in scripts (us), and the number of commands that
        Redis has run without INFO, both since the server started.
        """
        stats: Any = self._client.info("commandstats")
        return stats.get("cmdstat_evalsha", {"usec": 0})["usec"], num_commands(stats)


MEASUREMENT = Measurement(
    place=35,
    key="live_requests",
    run=measure_live_requests,
    option="--live-requests",
    help="measure the conductor beside 10,000 live requests, and submissions beside 1,000 workers",
    about={
        "--live-requests": "the CPU time of the conductor beside 20 and --live live requests, "
        "without traffic and with it; then Redis's time and commands of a submission beside 10 and "
        "1,000 listed workers"
    },
    arguments=(
        argument(
            "--live",
            type=whole_number(FEW_LIVE),
            default=10_000,
            metavar="N",
            help="live requests (10000)",
        ),
        argument(
            "--live-seconds",
            type=whole_number(),
            default=30,
            metavar="S",
            help="length of each measured window (30)",
        ),
    ),
    has_small=True,
)
