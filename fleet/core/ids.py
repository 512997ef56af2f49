"""Typed ids; two kinds of id never share a type. Knows no storage."""

import secrets
import time
from hashlib import blake2b
from typing import NewType

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
"""Id of one lifetime of a worker or gateway; never reused. The id also names the process's NIXL
agent.
"""
StageName = NewType("StageName", str)
EdgeName = NewType("EdgeName", str)
RoleName = NewType("RoleName", str)
Walk = NewType("Walk", str)
"""Phase of a stage's work on a request, e.g. `prefill`, `last_prefill`, `decode`."""
NO_WALK, PREFILL, DECODE = Walk(""), Walk("prefill"), Walk("decode")
Epoch = NewType("Epoch", int)
"""Fencing token of a task: Redis's time in microseconds at the grant, or a number above the last
epoch if Redis's clock was set back.
"""
Term = NewType("Term", int)
"""Fencing token of the conductor's leadership."""

CLIENT = StageName("client")
"""The pseudo-stage at which client edges end; its task is owned by a gateway."""


REQUEST, COMPLETION, AUDIO, RESPONSE = "req-", "chatcmpl-", "audio_", "resp_"
"""Prefixes under which clients see a request id: in headers, as the id of a chat completion, as the
id of its audio, and as the id of a response (of a voice session or of `/v1/responses`).
"""
TEXT_COMPLETION = "cmpl-"
"""Prefix under which clients of `/v1/completions` see a request id."""


def new_request_id() -> RequestId:
    """Return a new request id; ids sort by creation time."""
    return RequestId(f"{REQUEST}{time.time_ns() // 1_000_000:012x}{secrets.token_hex(5)}")


def first_id_at(us: int) -> RequestId:
    """Return an id that sorts before every request id created at `us` or later. `us`: microseconds
    since 1970.
    """
    return RequestId(f"{REQUEST}{us // 1000:012x}")


def begun_at(request: str) -> int:
    """Return when a request id was created, in microseconds since 1970; 0 for a text that is no
    request id.
    """
    try:
        return 1000 * int(request.removeprefix(REQUEST)[:12], 16) if len(request) == 26 else 0
    except ValueError:
        return 0


def shown_id(request: RequestId, prefix: str) -> str:
    """Return a request's id with `prefix`, as clients see it for a completion, its audio or a
    response.
    """
    return f"{prefix}{request.removeprefix(REQUEST)}"


def call_id(request: RequestId, index: int) -> str:
    """Return the id of a function call in the answer to a request. `index`: number of the call in
    the answer, from 0. The id follows from the request, so that it is the same after a recovery.
    """
    return f"call_{blake2b(f'{request} {index}'.encode(), digest_size=12).hexdigest()}"


def request_id_of(shown: str) -> RequestId:
    """Return the id of a request from any form in which a person writes it; any other text is
    returned unchanged.
    """
    for prefix in (COMPLETION, AUDIO, RESPONSE, TEXT_COMPLETION):
        if shown.startswith(prefix):
            return RequestId(f"{REQUEST}{shown.removeprefix(prefix)}")
    return RequestId(shown)


def stage_of(role: str) -> StageName:
    """Return the stage of a role; a role may be limited to a walk (`stage.walk`) or a layer span
    (`stage[0:19]`).
    """
    return StageName(role.partition(".")[0].partition("[")[0])


def role_of(worker: WorkerId) -> str:
    """Return the role in a worker's id; "gateway" for the id of a gateway."""
    return worker.partition("@")[0]


def place_of(worker: WorkerId) -> tuple[str, int]:
    """Return (host, pid) from the id of a worker or gateway; ("", 0) for an id without them."""
    host, _, rest = worker.partition("@")[2].partition(":")
    pid = rest.partition(":")[0]
    return (host, int(pid)) if pid.isdecimal() else ("", 0)


def new_worker_id(role: str, host: str, pid: int) -> WorkerId:
    """Return a new id for one lifetime of a worker or gateway. `role`, `host`, `pid`: parts of the
    id.
    """
    return WorkerId(f"{role}@{host}:{pid}:{secrets.token_hex(3)}")
