"""State of the fleet as a whole, for the console and `GET /v1/fleet/...`. Data only; no decision
depends on it.

Units: `*_us` are microseconds since 1970 on Redis's clock, 0 for an event that has not happened.
Knows no Redis and no HTTP.
"""

from typing import Any, Literal

import msgspec

from fleet.core.events import AnyEvent
from fleet.core.ids import EdgeName, Epoch, RequestId, RoleName, StageName, WorkerId
from fleet.drafts.figures.speculation import SpeculationFigures
from fleet.spans.protocol.figures import SpanPart

WorkerOrder = Literal["drain", "resume", "stop", "dump"]
WORKER_ORDERS: tuple[WorkerOrder, ...] = ("drain", "resume", "stop", "dump")
MAX_REPLICAS = 64
"""Largest number of workers of a role that a person can order."""
GONE_LISTED_S, MAX_GONE_LISTED = 600, 200
"""Seconds for which a process that has ended is listed, and largest number of such processes."""
GONE_KEPT_DAYS, MAX_GONE_KEPT = 14, 1000
"""Days for which the record of a process that has ended is kept, and largest number of records."""
LEVELS = ("debug", "info", "warning", "error", "critical")


class TaskRef(msgspec.Struct, frozen=True, kw_only=True):
    request: RequestId
    stage: StageName


class EdgeTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of the pulls (reads of another worker's memory) for one edge, summed over the
    listed workers since each joined. `edge`: edge name, or `kv` for KV pages between the halves of
    a split stage.

    Units: `p50_ms`, `p95_ms`: pull duration, None without a pull. `bytes_per_s`: mean of the last
    minute. `num_failed`: pulls that were retried, or whose tensors were recomputed. `in_flight`:
    pulls in progress. `durations`: one count for each bucket of `counts.BOUNDS_US`.
    """

    edge: str
    num_pulls: int
    num_bytes: int
    num_failed: int
    in_flight: int
    bytes_per_s: float
    p50_ms: float | None
    p95_ms: float | None
    durations: tuple[int, ...] = ()


class WorkerTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """Transfer statistics of one worker. `backend`: transport of pulls. `registered_bytes`: memory
    that other workers may read. `used_bytes`, `slots_used`: use of its transfer arena. `in_flight`:
    pulls in progress. `num_pulls`, `num_failed`: pulls since the worker joined.
    """

    worker: WorkerId
    role: str
    backend: str
    registered_bytes: int
    used_bytes: int
    slots_used: int
    in_flight: int
    num_pulls: int
    num_failed: int


class EdgeFlow(msgspec.Struct, frozen=True, kw_only=True):
    """Traffic of one edge of the graph over the whole fleet. `chunks_per_s`, `bytes_per_s`: mean of
    the last minute, of chunks and of the tensors in them. `num_waiting`: tasks of the producer that
    keep their slot and wait for the consumer's credit. `num_parked`: tasks that have given up their
    slot until there is credit, among at most a hundred live requests drawn at random.
    """

    edge: EdgeName
    source: StageName
    target: StageName
    chunks_per_s: float = 0.0
    bytes_per_s: float = 0.0
    num_waiting: int = 0
    num_parked: int = 0


class Transfers(msgspec.Struct, frozen=True, kw_only=True):
    """Reads of other workers' memory by edge and by worker, and the traffic of all edges."""

    flows: tuple[EdgeFlow, ...] = ()
    edges: tuple[EdgeTransfer, ...]
    workers: tuple[WorkerTransfer, ...]


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """A worker or gateway process (`role` is "" for a gateway), listed for `GONE_LISTED_S` after it
    has ended and kept for `GONE_KEPT_DAYS`, with the statistics of its last lease renewal.

    `state`: ready, standby, draining (accepts no new tasks), leaving (ends when its tasks have),
    late (its lease has lapsed, and it is not fenced yet), left (it deregistered), died (its keeper
    saw the process end), lapsed (fenced after its lease).
    `cause`: signal or exit status of a process that died. `hop_p50_us`, `hop_p95_us`: chunk latency
    since the process joined; None before the first chunk. `tasks`: tasks that the worker owns.
    `held`: tasks that a process held when it ended, the first hundred of them.
    `part`: layers of a divided model that the worker has. `speculation`: statistics of a worker
    that can verify draft tokens.
    Units: `lease_left_s`: 0 after the end of the process. `memory_bytes`: memory of the process.
    `cpu_percent`: percentage of one core. `pages_used`, `pages_total`: pages of the KV pool.
    `pages_kept`: pages cached for later turns. `rows_reused`: positions whose KV was taken from
    that cache. `slots_used`: slots of the transfer arena.
    `gpu`: name of the GPU. `gpu_used_bytes`: memory used by all processes; `gpu_own_bytes`: memory
    reserved by this process; `gpu_percent`: utilisation, None where the driver does not report it.
    """

    id: WorkerId
    role: str
    host: str
    pid: int
    state: str
    started_us: int
    ended_us: int = 0
    cause: str = ""
    lease_left_s: float = 0.0
    device: str = ""
    package: str = ""
    checkpoint: str = ""
    protocol: str = ""
    running: int = 0
    capacity: int = 0
    memory_bytes: int = 0
    cpu_percent: int = 0
    gpu: str = ""
    gpu_total_bytes: int = 0
    gpu_used_bytes: int = 0
    gpu_own_bytes: int = 0
    gpu_percent: int | None = None
    pages_used: int = 0
    pages_total: int = 0
    pages_kept: int = 0
    rows_reused: int = 0
    slots_used: int = 0
    hop_p50_us: int | None = None
    hop_p95_us: int | None = None
    tasks: tuple[TaskRef, ...] = ()
    held: tuple[TaskRef, ...] = ()
    transfer: WorkerTransfer | None = None
    part: SpanPart | None = None
    speculation: SpeculationFigures | None = None

    @property
    def gone(self) -> bool:
        return self.ended_us > 0

    @property
    def takes_tasks(self) -> bool:
        return self.state == "ready"

    @property
    def draining(self) -> bool:
        return self.state in ("draining", "leaving")

    @property
    def standby(self) -> bool:
        return self.state == "standby"


class PendingGrant(msgspec.Struct, frozen=True, kw_only=True):
    """A granted task that waits for a worker to claim it. `read`: True if a worker has read the
    grant and is about to claim it, unless that worker has died.
    """

    request: RequestId
    stage: StageName
    epoch: Epoch
    age_s: float
    alone: bool
    read: bool


class RoleView(msgspec.Struct, frozen=True, kw_only=True):
    """Queue and workers of one role.

    `queue_depth`: tasks granted and not claimed; `lag`: part of `queue_depth` that no worker has
    read yet (the rest is being claimed); `oldest_s`: seconds since the oldest unclaimed task was
    granted, 0 without one.
    `workers`: workers that accept tasks; `capacity`: number of their slots; `draining`, `standby`,
    `starting`: number of workers in that state. `running`: tasks running on all workers of the
    role.
    `admits`: True if new requests that need the role are admitted: it has a worker that accepts
    tasks, lost its last one a moment ago, or has one that starts.
    `wanted`: workers that should accept tasks: the number that a person ordered, else the number
    that the present `fleet up` commands run, or the configured one. `managed`: True if a `fleet up`
    starts and stops them. `placed`: workers that these commands run or are starting; fewer than
    `wanted` where a start failed.
    `loaded_percent`: percentage of its weights that the most advanced starting worker has loaded;
    None if unknown or if no worker loads. `gap`: missing layers without which no worker of the
    stage can compute, in a role of span workers; "" if no layer is missing.
    """

    role: RoleName
    queue_depth: int = 0
    lag: int = 0
    oldest_s: float = 0.0
    workers: int = 0
    draining: int = 0
    standby: int = 0
    running: int = 0
    capacity: int = 0
    starting: int = 0
    wanted: int = 0
    managed: bool = False
    placed: int = 0
    admits: bool = False
    loaded_percent: int | None = None
    gap: str = ""


class RoleQueue(RoleView, frozen=True, kw_only=True):
    """A role with its rates and its pending grants.

    Units: `in_per_s`, `out_per_s`: tasks granted and claimed per second, mean of the last minute.
    `pending`: the oldest hundred unclaimed grants, the oldest first.
    """

    stage: StageName
    in_per_s: float = 0.0
    out_per_s: float = 0.0
    pending: tuple[PendingGrant, ...] = ()


class WaitingClient(msgspec.Struct, frozen=True, kw_only=True):
    """A client with requests that wait at gateways for a place. `client`: name, with the client's
    weight after `*` unless that is 1; "" for all clients together, without `limits.fair_shares`.
    """

    client: str
    num_waiting: int
    num_live: int


class DeadLetterView(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was given up after workers of `stage` died over it. `readable`: True if this
    version of Fleet can send the request again.
    """

    id: RequestId
    stage: StageName
    why: str
    died_us: int
    kind: str = ""
    num_prompt_tokens: int = 0
    audio_s: float = 0.0
    readable: bool = True


class SeriesPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of the whole fleet for one step of `SERIES_STEP_S` seconds that begins at `at_us`.

    `submitted`: number of new requests. `ended`: number of ended requests, by end state. `refused`:
    number of requests and voice sessions that were not admitted, by error code. `running`,
    `waiting`: number of tasks by role, as last seen. `task_*_ms`: task duration by stage.
    `rtf_p95`: real-time factor (seconds to compute a second of audio). Latencies are None in a step
    without a measurement.
    """

    at_us: int
    submitted: int = 0
    ended: dict[str, int] = {}
    refused: dict[str, int] = {}
    first_text_p50_ms: float | None = None
    first_text_p95_ms: float | None = None
    first_audio_p50_ms: float | None = None
    first_audio_p95_ms: float | None = None
    rtf_p95: float | None = None
    underruns: int = 0
    running: dict[str, int] = {}
    waiting: dict[str, int] = {}
    task_p50_ms: dict[str, float] = {}
    task_p95_ms: dict[str, float] = {}


SERIES_STEP_S = 5
SERIES_KEPT_S = 3600


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    """Line of the fleet's log. `id` orders the lines of all processes by arrival in Redis.
    `process`: worker, conductor, web or jobs. `trace`: traceback of an exception, or of all threads
    of a worker that was ordered to dump them.
    """

    id: str
    at_us: int
    level: str
    logger: str
    message: str
    process: str
    worker: str = ""
    stage: str = ""
    request: str = ""
    epoch: int = 0
    trace: str = ""


class LogQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Filter of log lines; an empty field matches every line. `level`: the lowest level to return.
    `text`: text to find anywhere in the message.
    """

    text: str = ""
    level: str = ""
    worker: str = ""
    request: str = ""
    process: str = ""


class LogPage(msgspec.Struct, frozen=True, kw_only=True):
    """Page of log lines, newest first. `next`: value of `before` for the following page; "" on the
    last page. `newest`: id after which to follow the log.

    `dropped`: number of lines that all processes have lost so far because Redis was too slow or
    away.
    """

    lines: tuple[LogLine, ...]
    next: str
    newest: str
    dropped: int


class JobProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a background job: `done` of `total` units; `total` is 0 if unknown. `note`: last
    line of the job's output.
    """

    done: int = 0
    total: int = 0
    note: str = ""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Background job. `state`: queued, started, finished, failed, stopped, canceled, deferred or
    scheduled, as in rq; unreadable if its record is damaged.

    `arguments`: the arguments that differ from their defaults; None if the record has no arguments
    that this version of Fleet can run. `files`: names of the `REPORT_FILES` that the job wrote.
    `result`: JSON result of a finished job. `error`: last line of `traceback`.
    """

    id: str
    kind: str
    arguments: dict[str, Any] | None
    state: str
    created_us: int
    started_us: int = 0
    ended_us: int = 0
    progress: JobProgress | None = None
    files: tuple[str, ...] = ()
    result: str = ""
    error: str = ""
    traceback: str = ""


class FeedEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Entry of the event feed. `id`: `Last-Event-ID` from which to continue. `missed`: True if
    events before this entry are gone, so that the reader must read the whole state again; `event`
    is then None.
    """

    id: str
    event: AnyEvent | None
    missed: bool = False
