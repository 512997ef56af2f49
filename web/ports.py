"""What the gateway needs of the control plane. `fleet.control.client.FleetClient` satisfies it; tests use a fake.

Knows no Redis and no HTTP.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Protocol

from fleet.core.chunk import Chunk
from fleet.core.hand_off import HandOff
from fleet.core.ids import EdgeName, Epoch, RequestId, StageName
from fleet.core.request import RequestSpec
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


class WorkerView(Protocol):
    """One live worker, or a gateway (its role is ""). Units: `started_us` since 1970, on Redis's clock."""

    @property
    def id(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def pid(self) -> int: ...
    @property
    def started_us(self) -> int: ...
    @property
    def lease_left_s(self) -> float: ...
    @property
    def draining(self) -> bool: ...
    @property
    def standby(self) -> bool: ...
    @property
    def running(self) -> int: ...
    @property
    def capacity(self) -> int: ...


class RoleView(Protocol):
    """What waits for a role and who serves it; `fleet.control.views.RoleView` says what each number counts."""

    @property
    def role(self) -> str: ...
    @property
    def queue_depth(self) -> int: ...
    @property
    def lag(self) -> int: ...
    @property
    def oldest_s(self) -> float: ...
    @property
    def draining(self) -> int: ...
    @property
    def standby(self) -> int: ...
    @property
    def running(self) -> int: ...
    @property
    def capacity(self) -> int: ...


class TaskView(Protocol):
    @property
    def stage(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def owner(self) -> str | None: ...
    @property
    def walk(self) -> str | None: ...
    @property
    def hand_off(self) -> HandOff | None: ...
    @property
    def cached_rows(self) -> int: ...


class EdgeView(Protocol):
    """Units: `produced` and `consumed` count chunks; `items` what they hold (tokens, frames)."""

    @property
    def name(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def target(self) -> str: ...
    @property
    def produced(self) -> int: ...
    @property
    def consumed(self) -> int: ...
    @property
    def items(self) -> int: ...


class RequestView(Protocol):
    """One request's story, from the truth in Redis."""

    @property
    def state(self) -> str: ...
    @property
    def error(self) -> str | None: ...
    @property
    def created_us(self) -> int: ...
    @property
    def tasks(self) -> Sequence[TaskView]: ...
    @property
    def edges(self) -> Sequence[EdgeView]: ...


class FirstOutputs(Protocol):
    """Units: microseconds since 1970; `claimed_us` when a worker took the main stage's task (None: not yet, or not known), on
    Redis's clock; `first_us` when each stage made its first output, by its own machine's clock.
    """

    @property
    def claimed_us(self) -> int | None: ...
    @property
    def first_us(self) -> Mapping[str, int]: ...


class HeldVoice(Protocol):
    """A voice session in this gateway's hands; `fleet.control.voice.HeldVoice` says what each field means."""

    @property
    def epoch(self) -> int: ...
    @property
    def age_s(self) -> float: ...
    @property
    def fields(self) -> Mapping[str, bytes]: ...
    @property
    def replaced(self) -> Sequence[str]: ...


class ClientStream(Protocol):
    """The client edges of one request: the rows of each in order, each once, ending when every requested edge is final.

    Raises: FleetError from `__anext__` when the request failed.
    """

    @property
    def request_id(self) -> str: ...

    def __aiter__(self) -> AsyncIterator[Chunk]: ...

    async def abort(self, reason: str) -> None:
        """Stop the request everywhere. Idempotent; nothing happens to one that has ended."""
        ...

    def run_on(self) -> None:
        """Stop iterating: the request runs to its end without a listener, and `FleetPort.resume` returns its answer."""
        ...


class TelemetryPort(Protocol):
    """What people look at, and what they order. Bounded answers, read from Redis alone; `fleet.core` says what each field means.

    Raises: RedisUnreachable from any method; NotFound, Conflict (saying why) from those that act on one thing.
    """

    async def requests(self, wanted: RequestFilter, *, before: str = "", limit: int = 50) -> RequestPage:
        """`before`: a page's `next`. Raises: BadInput."""
        ...

    async def story(self, request: RequestId) -> RequestTrace | None: ...

    async def log_of(self, request: RequestId, edge: EdgeName) -> Sequence[Chunk]:
        """What is kept of an edge, from its first chunk; sound is kept for a minute only."""
        ...

    async def has_log(self, request: RequestId, edge: EdgeName) -> bool:
        """Return True while anything of an edge is kept."""
        ...

    async def note_heard(self, request: RequestId, *, played_samples: int, underruns: int) -> None:
        """What the listener's player says. Nothing happens to a request that is not known any more."""
        ...

    def note_underruns(self, count: int) -> None:
        """That a listener's player ran dry, for the fleet's count of it."""
        ...

    def note_rtf(self, rtf: float) -> None:
        """Seconds that it took to make a second of sound, over a whole answer, for the fleet's percentiles."""
        ...

    async def retry(self, request: RequestId) -> RequestId:
        """Send the same request again, under the id that is returned. Its answer goes to the log; `resume` takes it over."""
        ...

    async def workers(self) -> Sequence[WorkerStory]:
        """Those there are by role, then gateways, then those that have gone in the last minutes, the latest first."""
        ...

    async def order_worker(self, worker: str, order: WorkerOrder) -> None:
        """What is in force already is no conflict."""
        ...

    async def redeliver(self, request: RequestId, stage: StageName, epoch: Epoch) -> None:
        """Take a task back from whoever has it, to be granted anew. `epoch`: at which it was seen; 0: whatever it is."""
        ...

    async def queues(self) -> Sequence[Queue]: ...

    async def dead_letters(self) -> Sequence[DeadLetterView]:
        """The newest first."""
        ...

    async def retry_dead_letter(self, request: RequestId) -> RequestId:
        """As `retry`. The letter is dropped then: one that kills its workers again comes back under its new id."""
        ...

    async def drop_dead_letter(self, request: RequestId) -> None: ...

    async def transfers(self) -> Transfers: ...

    async def series(self) -> Sequence[SeriesPoint]:
        """The last `SERIES_KEPT_S`, the oldest first, without a gap: a step in which nothing was told is a point of zeros."""
        ...

    async def logs(self, wanted: LogQuery, *, before: str = "", limit: int = 200) -> LogPage:
        """Raises: BadInput."""
        ...

    def follow_logs(self, wanted: LogQuery, *, after: str = "") -> AsyncGenerator[LogLine, None]:
        """Lines as they come, without end; from now on, or from the line after `after`."""
        ...

    def follow(self, *, after: str = "") -> AsyncGenerator[FeedEntry, None]:
        """Facts as they come, without end; from now on, or from the fact after `after`."""
        ...

    async def jobs(self) -> Sequence[Job]:
        """The newest first."""
        ...

    async def job(self, job: str) -> Job | None: ...

    async def submit_job(self, kind: str, arguments: object) -> Job:
        """Raises: BadInput naming the argument, the cause and the remedy; see `fleet.core.jobs.read_arguments`."""
        ...

    async def retry_job(self, job: str) -> Job:
        """The same job again, under a new id; one that has not ended is a conflict."""
        ...

    async def stop_job(self, job: str) -> None:
        """End one that runs, or take one out of the queue."""
        ...

    async def delete_job(self, job: str) -> None:
        """Forget one that does not run, with its files."""
        ...

    async def job_file(self, job: str, name: str) -> bytes:
        """One of `fleet.core.jobs.REPORT_FILES` that a job left. Raises: NotFound, Conflict for one that is too large."""
        ...


class LoginPort(Protocol):
    """Logins of the console by name, known to every gateway. Raises: RedisUnreachable from any method."""

    async def add(self, name: str, keep_s: int) -> None:
        """Keep a new login; the one that was not used for the longest time ends if there are too many."""
        ...

    async def ends_us(self, name: str) -> int | None:
        """Return when the login ends, in microseconds since 1970, which may be past; None if it is not known."""
        ...

    async def renew(self, name: str, keep_s: int) -> None:
        """Prolong a login that is still there."""
        ...

    async def remove(self, name: str) -> None: ...


class FleetPort(Protocol):
    """Raises: RedisUnreachable from any method."""

    @property
    def telemetry(self) -> TelemetryPort: ...

    @property
    def logins(self) -> LoginPort: ...

    async def submit(self, spec: RequestSpec, blob: bytes | None) -> ClientStream:
        """Raises: Overloaded, NoWorker."""
        ...

    async def check_admission(self, request: RequestId, outputs: tuple[EdgeName, ...]) -> int:
        """Return the number of further requests that `submit` would admit now, this one included. Raises: as `submit`."""
        ...

    async def resume(self, request: RequestId) -> tuple[RequestSpec, ClientStream] | None:
        """Take a request over from the gateway that held it; None if it is not known."""
        ...

    def detach_all(self) -> None:
        """End every stream with GatewayStopping, but none of their requests."""
        ...

    async def workers(self) -> Sequence[WorkerView]: ...

    async def roles(self) -> Sequence[RoleView]: ...

    async def missing_roles(self) -> Sequence[str]: ...

    async def request_view(self, request: RequestId) -> RequestView | None: ...

    async def abort_request(self, request: RequestId) -> bool:
        """Whether it was live."""
        ...

    async def keep_transcript(self, audio_id: str, transcript: str, keep_s: int) -> None:
        """What a spoken answer said, for follow-up turns that name it by id."""
        ...

    async def transcript(self, audio_id: str) -> str | None: ...

    async def first_outputs(self, request: RequestId) -> FirstOutputs: ...

    async def hold_voice(self, session: str, keep_s: float, owner: str, *, new: bool = False) -> HeldVoice | None:
        """Take a voice session: its former holder may write to it no more. None if `owner` has none of that name (or, `new`, if
        there is one). `owner`: the credential that opened it; "" is the API key.

        Raises: SecretInUse if `owner` is a client secret with `voice.sessions_per_secret` others open.
        """
        ...

    async def keep_voice(
        self, session: str, epoch: int, keep_s: float, fields: Mapping[str, bytes], gone: Sequence[str] = ()
    ) -> bool:
        """Write fields of a held session, delete `gone`, and let it live so long again. False: it is held no more."""
        ...

    async def end_voice(self, session: str, epoch: int | None = None) -> bool:
        """Delete a session, where `epoch` is given only if it is still held. Whether there was one."""
        ...

    async def voice_ended(self, session: str, owner: str) -> bool:
        """Return True if an operator ended the voice session of this owner within the last minutes."""
        ...

    async def voices(self) -> Mapping[str, bytes]:
        """What their holders say of the voice sessions there are, by name: field `view`."""
        ...

    async def keep_secret(self, name: str, value: bytes, keep_s: int) -> None:
        """For any gateway to find, until then."""
        ...

    async def secret(self, name: str) -> bytes | None: ...

    @property
    def id(self) -> str:
        """This gateway's name in the fleet."""
        ...

    async def ping(self) -> bool: ...

    async def live_count(self) -> int: ...
