"""The key table in code: every key has a row here, and a leak checker in the tests fails on any key without one."""

import re
from dataclasses import dataclass

from fleet.core.errors import NotFound
from fleet.core.ids import EdgeName, RequestId, RoleName, StageName, WorkerId

PREFIX = "fleet:"
GROUP = "workers"
"""The one consumer group name; on role streams it shares grants out, on inboxes it lets one blocking read cover both."""

WORKERS = PREFIX + "workers"
LIVE = PREFIX + "live"
EVENTS = PREFIX + "events"
CONDUCTOR = PREFIX + "conductor"
CONFIG = PREFIX + "config"
DEAD = PREFIX + "dead_letters"
REFUSED = PREFIX + "refused"
GONE = PREFIX + "gone"
LOGS = PREFIX + "logs"
LOGS_DROPPED = PREFIX + "logs:dropped"
INDEX_ALL = PREFIX + "index:all"
VOICES = PREFIX + "voices"
LOGINS = PREFIX + "logins"


def worker(worker_id: WorkerId) -> str:
    return f"{PREFIX}worker:{worker_id}"


def worker_tasks(worker_id: WorkerId) -> str:
    return f"{PREFIX}worker:{worker_id}:tasks"


def role(name: RoleName) -> str:
    return f"{PREFIX}role:{name}"


def availability(name: RoleName) -> str:
    return f"{PREFIX}availability:{name}"


def inbox(worker_id: WorkerId) -> str:
    return f"{PREFIX}inbox:{worker_id}"


def request(request_id: RequestId) -> str:
    """The key of a request, whose id may come from an address. Raises: NotFound for one that would name another kind of key."""
    if ":" in request_id:
        raise NotFound(f"no request {request_id[:80]!r}; the id of a request holds no colon", param="request_id")
    return f"{PREFIX}req:{request_id}"


def blob(request_id: RequestId) -> str:
    return f"{PREFIX}req:{request_id}:blob"


def task(request_id: RequestId, stage: StageName) -> str:
    return f"{PREFIX}req:{request_id}:task:{stage}"


def edge(request_id: RequestId, name: EdgeName) -> str:
    return f"{PREFIX}req:{request_id}:edge:{name}"


def loc(request_id: RequestId, name: EdgeName) -> str:
    return f"{PREFIX}req:{request_id}:loc:{name}"


def kv(request_id: RequestId, stage: StageName) -> str:
    return f"{PREFIX}req:{request_id}:kv:{stage}"


def trace(request_id: RequestId) -> str:
    return f"{PREFIX}req:{request_id}:trace"


def index(state: str) -> str:
    """Requests of one state; `INDEX_ALL` has all. Every score is 0, so that they are in the order of their ids."""
    return f"{PREFIX}index:{state}"


def gone(worker_id: WorkerId) -> str:
    return f"{PREFIX}gone:{worker_id}"


def series(step: int) -> str:
    """`step`: seconds since 1970, in steps of the series."""
    return f"{PREFIX}series:{step}"


def cached_prefix(session: str) -> str:
    return f"{PREFIX}cached_prefix:{session}"


def transcript(audio_id: str) -> str:
    return f"{PREFIX}transcript:{audio_id}"


def voice(session_id: str) -> str:
    return f"{PREFIX}voice:{session_id}"


def voices_of(owner: str) -> str:
    """`owner`: a client secret, as `voice.hold` names it."""
    return f"{PREFIX}voices_of:{owner}"


def voice_ended(session_id: str) -> str:
    return f"{PREFIX}voice_ended:{session_id}"


def secret(name: str) -> str:
    return f"{PREFIX}secret:{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One kind of key. `life` is forever, lease (dies with a worker), live (dies with the request) or retention (has a TTL)."""

    pattern: str
    redis_type: str
    life: str
    owner: str
    meaning: str


TABLE: tuple[Row, ...] = (
    Row(pattern="workers", redis_type="zset", life="forever", owner="register", meaning="incarnation -> lease deadline, us"),
    Row(
        pattern="worker:{id}",
        redis_type="hash",
        life="lease",
        owner="register",
        meaning="role, host, pid, metadata, hosts that can read it, MAC, load, the order of an operator",
    ),
    Row(
        pattern="worker:{id}:tasks",
        redis_type="set",
        life="lease",
        owner="claim",
        meaning="request|stage it owns, or that is put to it",
    ),
    Row(pattern="role:{role}", redis_type="stream", life="forever", owner="grant", meaning="grants waiting for a claim"),
    Row(
        pattern="availability:{role}",
        redis_type="hash",
        life="forever",
        owner="register",
        meaning="when its last worker was lost or left, starts -> until when, tries, the last try, how long a start took; us",
    ),
    Row(
        pattern="inbox:{id}",
        redis_type="stream",
        life="lease",
        owner="append",
        meaning="chunks, credit, ends, walks, orders, tasks taken back",
    ),
    Row(pattern="live", redis_type="set", life="forever", owner="submit", meaning="requests not yet ended"),
    Row(pattern="req:{r}", redis_type="hash", life="retention", owner="submit", meaning="request, state, error"),
    Row(
        pattern="req:{r}:blob",
        redis_type="string",
        life="retention",
        owner="submit",
        meaning="audio prompt, float32; a minute longer than its request, to send it again",
    ),
    Row(
        pattern="req:{r}:trace",
        redis_type="list",
        life="retention",
        owner="all scripts",
        meaning="trace events, a line each; bounded",
    ),
    Row(
        pattern="index:{which}",
        redis_type="zset",
        life="forever",
        owner="submit",
        meaning="requests kept: all, by state, and when they expire, us; orders only, bounded, pruned as others end",
    ),
    Row(
        pattern="series:{step}",
        redis_type="hash",
        life="retention",
        owner="all scripts",
        meaning="what was counted in five seconds, durations by bounds; and how many tasks ran and waited",
    ),
    Row(pattern="gone", redis_type="zset", life="forever", owner="fence_worker", meaning="workers that have gone -> when, us"),
    Row(pattern="gone:{id}", redis_type="hash", life="retention", owner="fence_worker", meaning="what its worker:{id} was"),
    Row(pattern="logs", redis_type="stream", life="forever", owner="all processes", meaning="log lines, trimmed"),
    Row(pattern="logs:dropped", redis_type="string", life="forever", owner="all processes", meaning="lines that were lost"),
    Row(
        pattern="req:{r}:task:{stage}",
        redis_type="hash",
        life="retention",
        owner="grant",
        meaning="state, role, owner, epoch, walks, inputs, produced, consumed and worked off per edge, what was told of it",
    ),
    Row(pattern="req:{r}:edge:{edge}", redis_type="stream", life="retention", owner="append", meaning="chunk headers"),
    Row(pattern="req:{r}:loc:{edge}", redis_type="hash", life="live", owner="append", meaning="index -> where its tensors are"),
    Row(
        pattern="req:{r}:kv:{stage}",
        redis_type="hash",
        life="live",
        owner="hand_off",
        meaning="computed blocks on offer: state, epoch, source, rows, where they are; at which epoch they were taken",
    ),
    Row(
        pattern="cached_prefix:{session}",
        redis_type="hash",
        life="retention",
        owner="cache_prefix",
        meaning="stage -> worker that caches the prefix of the conversation's last turn",
    ),
    Row(
        pattern="transcript:{audio}",
        redis_type="string",
        life="retention",
        owner="gateway",
        meaning="what a spoken answer said, for turns that name it",
    ),
    Row(
        pattern="voice:{session}",
        redis_type="hash",
        life="retention",
        owner="hold_voice",
        meaning="a voice session: holder, epoch, the credential that opened it, when it began, since when its client is away, "
        "how it fares, and what another gateway needs to continue it",
    ),
    Row(
        pattern="voice_ended:{session}",
        redis_type="string",
        life="retention",
        owner="end_voice",
        meaning="present where an operator ended the voice session: 1 and the credential that opened it",
    ),
    Row(pattern="voices", redis_type="zset", life="forever", owner="hold_voice", meaning="voice session -> when it ends, us"),
    Row(
        pattern="voices_of:{owner}",
        redis_type="zset",
        life="retention",
        owner="hold_voice",
        meaning="sessions that one client secret has open or in line -> when they end, us; the secret is named by its hash",
    ),
    Row(
        pattern="secret:{name}",
        redis_type="string",
        life="retention",
        owner="gateway",
        meaning="hash of a short-lived client key -> the session it opens",
    ),
    Row(
        pattern="logins",
        redis_type="zset",
        life="retention",
        owner="gateway",
        meaning="MAC of a console login's cookie under the API key -> when the login ends, us; bounded",
    ),
    Row(pattern="events", redis_type="stream", life="forever", owner="all scripts", meaning="facts, trimmed"),
    Row(pattern="dead_letters", redis_type="stream", life="forever", owner="end_request", meaning="requests that killed workers"),
    Row(pattern="refused", redis_type="hash", life="retention", owner="register", meaning="worker -> when, and why refused"),
    Row(
        pattern="refusal_logged",
        redis_type="string",
        life="retention",
        owner="submit, admission",
        meaning="the request whose refusal for the queue bound was logged in the last seconds",
    ),
    Row(
        pattern="conductor:last",
        redis_type="string",
        life="forever",
        owner="lead",
        meaning="who led last, until it gives the lead up or is seen to die",
    ),
    Row(pattern="conductor", redis_type="string", life="lease", owner="lead", meaning="leader|term"),
    Row(pattern="config", redis_type="string", life="forever", owner="fleet up", meaning="the resolved configuration"),
)


def row_of(key: str) -> Row | None:
    """The row a concrete key belongs to, or None: a leak."""
    for row in sorted(TABLE, key=lambda r: -len(r.pattern)):
        shape = re.sub(r"\\{[a-z]+\\}", "[^{}]+?", re.escape(row.pattern))
        if row.pattern == "worker:{id}":
            shape = "worker:(?!.*:tasks$).+"
        elif row.pattern == "req:{r}":
            shape = "req:[^:]+"
        if re.fullmatch(re.escape(PREFIX) + shape, key):
            return row
    return None
