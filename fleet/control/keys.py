"""Table of all keys in Redis: a leak check in the tests fails for a key without a row here."""

import re
from dataclasses import dataclass

from fleet.core.errors import NotFound
from fleet.core.ids import EdgeName, RequestId, RoleName, StageName, WorkerId

PREFIX = "fleet:"
GROUP = "workers"
"""Name of all consumer groups. On role streams the group distributes grants; on inboxes it allows one read to block on both."""

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
    """Return the key of a request; its id may be from a URL. Raises: NotFound for an id that would name another kind of key."""
    if ":" in request_id:
        raise NotFound(f"no request {request_id[:80]!r}; the id of a request has no colon", param="request_id")
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
    """Return the key of the requests of one state; `INDEX_ALL` has all. Every score is 0, so members are in the order of ids."""
    return f"{PREFIX}index:{state}"


def gone(worker_id: WorkerId) -> str:
    return f"{PREFIX}gone:{worker_id}"


def series(step: int) -> str:
    """Return the key of one step of the time series; `step`: seconds since 1970, divided by the length of a step."""
    return f"{PREFIX}series:{step}"


def cached_prefix(session: str) -> str:
    return f"{PREFIX}cached_prefix:{session}"


def transcript(audio_id: str) -> str:
    return f"{PREFIX}transcript:{audio_id}"


def voice(session_id: str) -> str:
    return f"{PREFIX}voice:{session_id}"


def voices_of(owner: str) -> str:
    """Return the key of the voice sessions of one client secret; `owner` is its hash."""
    return f"{PREFIX}voices_of:{owner}"


def voice_ended(session_id: str) -> str:
    return f"{PREFIX}voice_ended:{session_id}"


def secret(name: str) -> str:
    return f"{PREFIX}secret:{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One kind of key. `life` is forever, lease (ends with a worker), live (ends with the request) or retention (has a TTL)."""

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
        meaning="role, host, pid, metadata, hosts that can read its memory, MAC, load, an operator's order",
    ),
    Row(
        pattern="worker:{id}:tasks",
        redis_type="set",
        life="lease",
        owner="claim",
        meaning="request|stage that it owns, or that is reserved for it",
    ),
    Row(pattern="role:{role}", redis_type="stream", life="forever", owner="grant", meaning="grants waiting for a claim"),
    Row(
        pattern="availability:{role}",
        redis_type="hash",
        life="forever",
        owner="register",
        meaning="time when its last worker was lost or left; announced starts -> deadline; attempts, last attempt, duration; us",
    ),
    Row(
        pattern="inbox:{id}",
        redis_type="stream",
        life="lease",
        owner="append",
        meaning="notices: chunks, credit, ends, walks, orders, revoked tasks",
    ),
    Row(pattern="live", redis_type="set", life="forever", owner="submit", meaning="requests that have not ended"),
    Row(pattern="req:{r}", redis_type="hash", life="retention", owner="submit", meaning="request, state, error"),
    Row(
        pattern="req:{r}:blob",
        redis_type="string",
        life="retention",
        owner="submit",
        meaning="audio prompt, float32; retained for a minute after its request, for a retry",
    ),
    Row(
        pattern="req:{r}:trace",
        redis_type="list",
        life="retention",
        owner="all scripts",
        meaning="trace events, one line each; bounded",
    ),
    Row(
        pattern="index:{which}",
        redis_type="zset",
        life="forever",
        owner="submit",
        meaning="ids of retained requests: all, by state, and by expiry, us; bounded, pruned when requests end",
    ),
    Row(
        pattern="series:{step}",
        redis_type="hash",
        life="retention",
        owner="all scripts",
        meaning="counts of five seconds, durations by bucket; and numbers of running and waiting tasks",
    ),
    Row(pattern="gone", redis_type="zset", life="forever", owner="fence_worker", meaning="former workers -> time of the end, us"),
    Row(pattern="gone:{id}", redis_type="hash", life="retention", owner="fence_worker", meaning="last content of worker:{id}"),
    Row(pattern="logs", redis_type="stream", life="forever", owner="all processes", meaning="log lines, trimmed"),
    Row(pattern="logs:dropped", redis_type="string", life="forever", owner="all processes", meaning="number of lost log lines"),
    Row(
        pattern="req:{r}:task:{stage}",
        redis_type="hash",
        life="retention",
        owner="grant",
        meaning="state, role, owner, epoch, walks, inputs; produced, consumed and processed per edge; metadata for the trace",
    ),
    Row(pattern="req:{r}:edge:{edge}", redis_type="stream", life="retention", owner="append", meaning="chunk headers"),
    Row(pattern="req:{r}:loc:{edge}", redis_type="hash", life="live", owner="append", meaning="index -> location of its tensors"),
    Row(
        pattern="req:{r}:kv:{stage}",
        redis_type="hash",
        life="live",
        owner="hand_off",
        meaning="KV blocks offered in a hand-off: state, epoch, source, rows, location; epoch of the import",
    ),
    Row(
        pattern="cached_prefix:{session}",
        redis_type="hash",
        life="retention",
        owner="cache_prefix",
        meaning="stage -> worker that caches the KV rows of the conversation's last turn",
    ),
    Row(
        pattern="transcript:{audio}",
        redis_type="string",
        life="retention",
        owner="gateway",
        meaning="text of a spoken answer, for turns that name the answer by its audio id",
    ),
    Row(
        pattern="voice:{session}",
        redis_type="hash",
        life="retention",
        owner="hold_voice",
        meaning="a voice session: holder, epoch, the credential that opened it, time of its start, time of its client's "
        "disconnect, the view for operators, and the state that another gateway needs to continue it",
    ),
    Row(
        pattern="voice_ended:{session}",
        redis_type="string",
        life="retention",
        owner="end_voice",
        meaning="an operator ended the voice session: 1 and the credential that opened it",
    ),
    Row(pattern="voices", redis_type="zset", life="forever", owner="hold_voice", meaning="voice session -> time of expiry, us"),
    Row(
        pattern="voices_of:{owner}",
        redis_type="zset",
        life="retention",
        owner="hold_voice",
        meaning="sessions of one client secret, open or queued -> time of expiry, us; the secret is named by its hash",
    ),
    Row(
        pattern="secret:{name}",
        redis_type="string",
        life="retention",
        owner="gateway",
        meaning="settings of the session that a short-lived client secret opens; the secret is named by its hash",
    ),
    Row(
        pattern="logins",
        redis_type="zset",
        life="retention",
        owner="gateway",
        meaning="MAC of a console login's cookie under the API key -> time of expiry, us; bounded",
    ),
    Row(pattern="events", redis_type="stream", life="forever", owner="all scripts", meaning="events of the fleet, trimmed"),
    Row(pattern="dead_letters", redis_type="stream", life="forever", owner="end_request", meaning="requests that were given up"),
    Row(pattern="refused", redis_type="hash", life="retention", owner="register", meaning="worker -> time and cause of refusal"),
    Row(
        pattern="refusal_logged",
        redis_type="string",
        life="retention",
        owner="submit, admission",
        meaning="request whose refusal for the queue bound was logged within the last seconds",
    ),
    Row(
        pattern="conductor:last",
        redis_type="string",
        life="forever",
        owner="lead",
        meaning="last leader, until it resigns or its death is observed",
    ),
    Row(pattern="conductor", redis_type="string", life="lease", owner="lead", meaning="leader|term"),
    Row(pattern="config", redis_type="string", life="forever", owner="fleet up", meaning="the resolved configuration"),
)


def row_of(key: str) -> Row | None:
    """Return the row of a concrete key, or None: a leak."""
    for row in sorted(TABLE, key=lambda r: -len(r.pattern)):
        shape = re.sub(r"\\{[a-z]+\\}", "[^{}]+?", re.escape(row.pattern))
        if row.pattern == "worker:{id}":
            shape = "worker:(?!.*:tasks$).+"
        elif row.pattern == "req:{r}":
            shape = "req:[^:]+"
        if re.fullmatch(re.escape(PREFIX) + shape, key):
            return row
    return None
