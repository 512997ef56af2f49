"""State of the fleet as a whole, for the console and `GET /v1/fleet/...`. Data only; no decision
depends on it.

Units: `*_us` are microseconds since 1970 on Redis's clock, 0 if it has not happened. Knows no Redis
and no HTTP.
"""

from typing import Any, Literal

import msgspec

from fleet.core.events import AnyEvent
from fleet.core.ids import Epoch, RequestId, RoleName, StageName, WorkerId
from fleet.drafts.figures.speculation import SpeculationFigures
from fleet.spans.protocol.figures import SpanPart

WorkerOrder = Literal["drain", "resume", "stop", "dump"]
WORKER_ORDERS: tuple[WorkerOrder, ...] = ("drain", "resume", "stop", "dump")
LEVELS = ("debug", "info", "warning", "error", "critical")


class TaskRef(msgspec.Struct, frozen=True, kw_only=True):
    request: RequestId
    stage: StageName


class EdgeTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """Pulls over one edge (`kv`: pages of a split stage), counted since their workers joined.

    Units: `p50_ms`, `p95_ms` of a pull, None without any; `bytes_per_s` over the last minute.
    `num_failed`: pulls that were retried, or whose tensors were recomputed. `in_flight`: current
    pulls.
    `durations`: one count for each of `counts.BOUNDS_US`.
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
    """Transfers of one worker: `slots_used` of its arena, and the memory that peers may read."""

    worker: WorkerId
    role: str
    backend: str
    registered_bytes: int
    used_bytes: int
    slots_used: int
    in_flight: int
    num_pulls: int
    num_failed: int


class Transfers(msgspec.Struct, frozen=True, kw_only=True):
    edges: tuple[EdgeTransfer, ...]
    workers: tuple[WorkerTransfer, ...]


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """Process of a worker or gateway (its role is ""), listed for some minutes after it has gone,
    with the statistics of its last renewal.

    `state`: ready, standby, draining (accepts no new tasks), leaving (ends when its tasks have),
    late (its lease has lapsed, and it is not fenced yet), left (it deregistered), died (its keeper
    saw the process end), lapsed (fenced after its lease).
    `cause`: signal or exit status of a process that died. `hop_p50_us`: chunk latency since it
    joined; None before the first chunk. `tasks`: tasks that it owns. `part`: part of a divided
    model that it has. `speculation`: statistics of a worker that can verify drafts.
    Units: `lease_left_s` is 0 once it has gone; `memory_bytes` of its process; pages of its KV
    pool, `pages_kept` of `pages_used` cached for later turns, which have saved its engine
    `rows_reused` positions; `slots_used` of its transfer arena; `cpu_percent` of one core. `gpu` is
    the name of its GPU: memory used by all processes and reserved by this one, and its utilisation
    in percent, None where the driver does not report it.
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
    """A task that waits for a worker to claim it. `read`: a worker has read the grant and is
    claiming it, unless it has died.
    """

    request: RequestId
    stage: StageName
    epoch: Epoch
    age_s: float
    alone: bool
    read: bool


class RoleView(msgspec.Struct, frozen=True, kw_only=True):
    """Queue and workers of a role.

    Units: `queue_depth` tasks granted and not claimed; `lag` tasks of `queue_depth` that no worker
    has read yet, so the others are being claimed; `oldest_s` seconds since the oldest such task was
    granted, 0 without one. `workers` accept tasks and have `capacity` slots; `draining`, `standby`
    and `starting` count the others. `running` counts the tasks of all. `loaded_percent`: loaded
    weights of the most advanced starting worker; None if no worker loads or it is not known. `gap`:
    layers without which no worker of the stage can compute, if the role hosts spans; "" if none is
    missing.
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
    loaded_percent: int | None = None
    gap: str = ""


class RoleQueue(RoleView, frozen=True, kw_only=True):
    """A role with its rates and its pending grants.

    Units: `in_per_s`, `out_per_s` tasks granted and claimed, over the last minute. `pending`: a
    hundred, the oldest first.
    """

    stage: StageName
    in_per_s: float = 0.0
    out_per_s: float = 0.0
    pending: tuple[PendingGrant, ...] = ()


class DeadLetterView(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was given up after workers of `stage` died over it. `readable`: this version
    can send it again.
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
    """Measurements of the whole fleet over the `SERIES_STEP_S` from `at_us` on.

    `ended` by outcome. Latencies are None without a measurement. `running`, `waiting` by role, as
    last seen.
    """

    at_us: int
    submitted: int = 0
    ended: dict[str, int] = {}
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
SERIES_KEPT_S = 15 * 60


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    """`id` orders lines of all processes by arrival. `process`: worker, conductor, web or jobs.
    `trace`: the traceback of the exception, or of all threads of a worker that was ordered to dump
    them.
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
    """Filter of log lines; empty fields match everything. `level`: this one and above. `text`:
    anywhere in the message.
    """

    text: str = ""
    level: str = ""
    worker: str = ""
    request: str = ""
    process: str = ""


class LogPage(msgspec.Struct, frozen=True, kw_only=True):
    """Newest first. `next` is the `before` of the page that follows, "" at the end. `newest`: the
    id to follow the log from.

    `dropped`: lines of all processes that were lost because Redis was too slow or away.
    """

    lines: tuple[LogLine, ...]
    next: str
    newest: str
    dropped: int


class JobProgress(msgspec.Struct, frozen=True, kw_only=True):
    """`total` 0: unknown. `note`: the last line of its output."""

    done: int = 0
    total: int = 0
    note: str = ""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Background job. `state`: queued, started, finished, failed, stopped, canceled, deferred or
    scheduled, as in rq; unreadable if its record is damaged.

    `arguments`: arguments that differ from their defaults; None if the record names none that this
    version can run.
    `files`: names of the `REPORT_FILES` that it wrote. `result` is the JSON result of its function
    once it is finished; `error` the last line of `traceback`.
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
    """Event of the feed. `id` is the `Last-Event-ID` to continue from. `missed`: events before it
    are gone; read the state again.
    """

    id: str
    event: AnyEvent | None
    missed: bool = False
