"""Table of all keys in Redis. Tests check for leaks: a key without a row here fails them."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from fleet.core.errors import NotFound
from fleet.core.ids import EdgeName, RequestId, RoleName, StageName, WorkerId

PREFIX = "{fleet}:"
"""Prefix of all keys. The braces are a hash tag: in a cluster all keys of a fleet are in one slot,
hence on one server (Redis cluster specification).
"""
GROUP = "workers"
"""Consumer group of a role's streams, with the last grant read as its last delivered id."""
IDLE_GROUP = "workers.idle"
"""Name of the consumer group with which a worker blocks on its inbox and its role's streams in one
read. Each grant that arrives wakes one blocked worker of the role.
"""

NONE = PREFIX + "none"
"""Key that scripts declare so that a cluster can route them. The key never holds data."""
DECLARED = (1, NONE)
"""Number and names of the keys that every script call declares. A script computes the names of all
other keys, which are on the same server.
"""
WORKERS = PREFIX + "workers"
LIVE = PREFIX + "live"
LIVE_CLIENTS = PREFIX + "live:clients"
LIVE_KEYS = PREFIX + "live:keys"
WAITING = PREFIX + "waiting"
WAITING_NUMBERS = PREFIX + "waiting:numbers"
WAITING_GATEWAYS = PREFIX + "waiting:gateways"
EVENTS = PREFIX + "events"
CONDUCTOR = PREFIX + "conductor"
DEAD = PREFIX + "dead_letters"
REFUSED = PREFIX + "refused"
RETAINED_AUDIO = PREFIX + "retained_audio"
GONE = PREFIX + "gone"
PLACES = PREFIX + "places"
SUPERVISORS = PREFIX + "supervisors"
WANTED = PREFIX + "wanted"
FENCING = PREFIX + "fencing"
BOUNDARIES = PREFIX + "boundaries"
GRANTED = PREFIX + "granted"
WITHOUT_GATEWAY = PREFIX + "without_gateway"
SETTINGS_GROUPS = PREFIX + "settings_groups"
STATUSES = ("accepting", "leaving", "ordered_off", "standby")
"""Statuses by which the workers of a role are indexed; the same list as `STATUSES` in `lua/common`.
"""
LOGS = PREFIX + "logs"
FACTS = PREFIX + "logs:facts"
LOGS_DROPPED = PREFIX + "logs:dropped"
JOURNAL = PREFIX + "journal"
INDEX_ALL = PREFIX + "index:all"
VOICES = PREFIX + "voices"
LOGINS = PREFIX + "logins"
DRAFTERS = PREFIX + "drafters"
TRAINING = PREFIX + "training"
DRAFT_VERSIONS = PREFIX + "draft_versions"


def worker(worker_id: WorkerId) -> str:
    return f"{PREFIX}worker:{worker_id}"


def worker_tasks(worker_id: WorkerId) -> str:
    return f"{PREFIX}worker:{worker_id}:tasks"


def role(name: RoleName, *, first: bool = False) -> str:
    """Return the key of a role's stream of new grants. With `first`, return the key of the role's
    other stream, for tasks that the role had before, which workers read first.
    """
    return f"{PREFIX}role:{name}:first" if first else f"{PREFIX}role:{name}"


def role_streams(name: RoleName) -> tuple[str, str]:
    """Return the keys of both streams of a role, in the order in which workers read them."""
    return role(name, first=True), role(name)


def role_workers(name: RoleName, status: str) -> str:
    """Return the key of the index of a role's workers with one of the `STATUSES`."""
    return f"{PREFIX}role_workers:{name}:{status}"


def settings_group(group: str) -> str:
    """Return the key of the index of processes whose records have this `settings_group`."""
    return f"{PREFIX}settings_group:{group}"


def alert(incident: str, event: str) -> str:
    return f"{PREFIX}alert:{incident}:{event}"


def availability(name: RoleName) -> str:
    return f"{PREFIX}availability:{name}"


def supervisor(supervisor_id: str) -> str:
    return f"{PREFIX}supervisor:{supervisor_id}"


def inbox(worker_id: WorkerId) -> str:
    return f"{PREFIX}inbox:{worker_id}"


def request(request_id: RequestId) -> str:
    """Return the key of a request's hash. The id may come from a URL. Raises: NotFound for an id
    with a colon, which could form the key of something else.
    """
    if ":" in request_id:
        raise NotFound(
            f"no request {request_id[:80]!r}; the id of a request has no colon", param="request_id"
        )
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
    """Return the key of the index of requests in one state; `INDEX_ALL` indexes all requests. Every
    score is 0, so members sort by id.
    """
    return f"{PREFIX}index:{state}"


def dead_letter_blob(request_id: RequestId) -> str:
    return f"{PREFIX}dead_letter:{request_id}:blob"


def gone(worker_id: WorkerId) -> str:
    return f"{PREFIX}gone:{worker_id}"


def gone_tasks(worker_id: WorkerId) -> str:
    return f"{PREFIX}gone:{worker_id}:tasks"


def series(step: int) -> str:
    """Return the key of one step of the time series. `step`: seconds since 1970 divided by the
    length of a step.
    """
    return f"{PREFIX}series:{step}"


def cached_prefix(session: str) -> str:
    return f"{PREFIX}cached_prefix:{session}"


def transcript(audio_id: str) -> str:
    return f"{PREFIX}transcript:{audio_id}"


def voice(session_id: str) -> str:
    return f"{PREFIX}voice:{session_id}"


def voices_of(owner: str) -> str:
    """Return the key of the voice sessions of one API key, or of one client secret. `owner`: name
    of the API key, or owner name of the secret's sessions (`fleet.control.voice.hold`).
    """
    return f"{PREFIX}voices_of:{owner}"


def voice_ended(session_id: str) -> str:
    return f"{PREFIX}voice_ended:{session_id}"


def response(response_id: str) -> str:
    return f"{PREFIX}response:{response_id}"


def secret(name: str) -> str:
    return f"{PREFIX}secret:{name}"


class Row(NamedTuple):
    """Row of the table of keys: one kind of key. `life`: forever, lease (ends with a worker), index
    (ends with the last listed process), live (ends with the request) or retention (has a TTL).
    `owner`: scripts or processes that write the key.
    """

    pattern: str
    redis_type: str
    life: str
    owner: str
    meaning: str


_TABLE = """
workers | zset | forever | register
    incarnation -> lease deadline, us; the leader fences one that it saw unrenewed for the
    lease's duration
worker:{id} | hash | lease | register
    role, lease's duration, host, pid, metadata, hosts that can read its memory, MAC, load, an
    operator's order; the role to which it hands tasks off; of an anchor its route, what it
    lacks and which workers it needs, of a span worker its anchor, span and memory; of both the
    stats of their steps
worker:{id}:tasks | set | lease | claim
    request|stage that it owns, or that is reserved for it
role_workers:{role}:{status} | zset | index | register, renew, drain, order, fence_worker
    index: listed workers of a role that accept tasks, leave, were ordered off or stand by ->
    lease deadline, us
settings_groups | set | index | register
    index: the compared settings that listed processes have, encoded
settings_group:{group} | zset | index | register, renew, fence_worker
    index: listed processes with these compared settings -> lease deadline, us
places | hash | index | register
    index: host:pid of a process -> its listed worker or gateway
supervisors | zset | lease | share_workers
    `fleet up` that starts and stops workers (host:pid) -> lease deadline, us
supervisor:{id} | hash | lease | share_workers
    role -> number of its workers that this `fleet up` runs, and how many it can run
wanted | hash | forever | scale
    role -> number of workers that a person ordered; deleted when the first `fleet up` joins
fencing | hash | lease | fence_worker
    fenced worker or gateway of which tasks are left to revoke -> how it ended
role:{role} | stream | forever | submit
    new grants waiting for a claim
role:{role}:first | stream | forever | fence_worker
    grants of tasks that the role had before, which are read first
availability:{role} | hash | forever | register
    times of the last loss and leaving; announced starts -> deadline and loaded %; attempts,
    last attempt, duration; us
inbox:{id} | stream | lease | append
    notices: small chunks, indices of large ones, credit, ends, walks, orders, revoked tasks
live | set | forever | submit
    requests that have not ended
live:clients | hash | live | submit
    client -> number of its live requests
live:keys | hash | live | submit
    API key -> number of its live requests that count towards its limits
key_audio:{day} | hash | retention | submit, hold_voice
    API key -> ms of audio in its requests that ended on this day (UTC, days since 1970), and of
    its voice sessions
waiting | zset | live | take_turns
    client with requests that wait at gateways for a place -> its turn: live requests by weight,
    and the time of its last turn
waiting:numbers | hash | live | take_turns
    client -> number of these requests; * -> number of all
waiting:gateways | zset | live | take_turns
    gateway with such requests -> time of its last call, us
waiting:at:{gateway} | hash | live | take_turns
    client -> number of its requests that wait at this gateway
req:{r} | hash | retention | submit
    request, state, error, durations of its retention, the gateway that exports its spans
req:{r}:blob | string | retention | submit
    audio prompt, float32; retained for a minute after its request, for a retry
req:{r}:trace | list | retention | all scripts
    trace events, one line each; bounded
index:{which} | zset | forever | submit
    ids of retained requests: all, by state, and by expiry, us; bounded, pruned when requests
    end
series:{step} | hash | retention | all scripts
    counts of five seconds, durations by bucket, refusals by code; and numbers of running and
    waiting tasks; of the last hour
gone | zset | forever | fence_worker
    workers and gateways that ended in the last 14 days -> time of the end, us; bounded
gone:{id} | hash | retention | fence_worker
    last content of worker:{id}, how it ended, and the first hundred tasks that it held
gone:{id}:tasks | hash | retention | fence_worker, suspect_task
    request|stage for which a process was silent -> chunks appended before, and whether it ran
    alone; counts against the task once the end of the process is observed
suspects:{group} | set | retention | fence_worker, lose_tasks
    request|stage of tasks over which workers died together, to run without other tasks
granted | zset | live | submit
    index: request|stage of each unclaimed grant -> time of the grant, or of the conductor's last
    look at it, us
without_gateway | zset | live | fence_worker, detach
    index: live requests that no gateway reads -> time of the loss, us
boundaries | stream | live | append
    chunks at which the conductor is to decide the walk of their consumer
logs | stream | forever | all processes
    log lines, trimmed
logs:facts | stream | forever | scripts that log a fact
    deaths, dead letters, drains and refused workers under their ids in `logs`, which keeps them
    for less long; trimmed
journal | stream | forever | all scripts
    what happened to processes, roles and answers: ends, joins, orders, lost and recovered tasks,
    failures, refusals; trimmed
alert:{incident}:{event} | string | retention | gateway
    which gateway sends the alert that an incident opened, is worse or ended, and what became of
    it
logs:dropped | string | forever | all processes
    number of lost log lines
req:{r}:task:{stage} | hash | retention | submit
    state, role, owner, epoch, entry in the role's stream, walks, inputs; while parked the edges
    without credit, the former owner and the consumers that it starves; per edge: chunks
    produced, consumed and processed, whether it is read no more, items and bytes written;
    metadata for the trace
req:{r}:edge:{edge} | stream | retention | append
    chunk headers
req:{r}:loc:{edge} | hash | live | append
    index -> location of its tensors
req:{r}:kv:{stage} | hash | live | hand_off
    KV blocks offered in a hand-off: state, epoch, source, rows, location; epoch of the import
cached_prefix:{session} | hash | retention | cache_prefix
    stage -> worker that caches the KV of the conversation's last turn
transcript:{audio} | hash | retention | gateway
    text of a spoken answer, for turns that name the answer by its audio id, and the expiry that
    clients were sent
response:{response} | hash | retention | save_response
    an ended response with its input, and the digest of the key that asked for it
responses | zset | forever | save_response
    index: stored responses -> time of expiry, us; bounded in the bytes of their records
responses:sizes | hash | forever | save_response
    stored response -> size of its record; * -> sum of all; bytes
voice:{session} | hash | retention | hold_voice
    a voice session: holder, epoch, the credential that opened it, time of its start, time up to
    which its audio is counted, time of its client's disconnect, the view for operators, its turns,
    and the state that another gateway needs to continue it
voice_ended:{session} | string | retention | end_voice
    the voice session has ended: 1 and the credential that opened it if an operator ended it,
    else 0
voices | zset | forever | hold_voice
    voice session -> time of expiry, us
voices_of:{owner} | zset | retention | hold_voice
    sessions of one API key, or of one client secret (KEY/HASH), open or queued -> time of
    expiry, us
secret:{name} | string | retention | gateway
    settings of the session that a short-lived client secret opens; the secret is named by its
    hash
logins | zset | retention | gateway
    MAC of a console login's cookie under the API key -> time of expiry, us; bounded
events | stream | forever | all scripts
    events of the fleet, trimmed; a trace that no process depends on
dead_letters | stream | forever | fence_worker, lose_tasks
    requests that were given up: stage, cause, request, size with its audio; bounded in number
    and bytes
dead_letter:{r}:blob | string | forever | fence_worker, lose_tasks
    audio prompt of a dead letter, float32; deleted with its entry
retained_audio | zset | forever | append, ack, fail, abort
    ended request|its audio edges -> time at which that audio and its prompt's are deleted, us
refused | zset | forever | register
    worker and cause of refusal -> time, us; of the last hour, bounded
route_generation | string | forever | set_route
    the generation of the newest route; grows
drafters | hash | forever | gateway, fleet draft, promote_version
    stage -> drafter that an operator chose; hash of its version of the draft head, and of the one
    before
training | hash | forever | claim_training, gateway, fleet train
    trainer that may write to the trainers' folder, and its epoch; counts of hidden-state samples
    by outcome; orders to forget samples
draft_versions | hash | forever | add_version, promote_version, forget_version
    hash -> version of the draft head, as its folder has it; last number; number -> hash; why a
    worker replaced it
refusal_logged | string | retention | submit, admission
    request whose refusal for the queue bound was logged within the last seconds
conductor:last | string | forever | lead
    last leader, until it resigns or its death is observed
conductor | string | lease | lead
    leader|term
"""
"""Rows of the table of keys. The first line of a row has the key's pattern, Redis type, life and
writers; indented lines have its meaning.
"""


def _rows() -> Iterator[Row]:
    for head, meaning in re.findall(r"^(\S.*)\n((?: .*\n)+)", _TABLE, re.MULTILINE):
        yield Row._make([*head.split(" | "), " ".join(meaning.split())])


TABLE = tuple(_rows())


def row_of(key: str) -> Row | None:
    """Return the row of the table that describes a key; None for a key that no row describes."""
    for row in sorted(TABLE, key=lambda r: -len(r.pattern)):
        shape = re.sub(r"\\{[a-z]+\\}", "[^{}]+?", re.escape(row.pattern))
        if row.pattern in ("worker:{id}", "gone:{id}"):
            shape = row.pattern.replace("{id}", "(?!.*:tasks$).+")
        elif row.pattern == "req:{r}":
            shape = "req:[^:]+"
        if re.fullmatch(re.escape(PREFIX) + shape, key):
            return row
    return None
