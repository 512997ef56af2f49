"""Typed ids; two kinds of id never share a type. Knows no storage."""

import secrets
import time
from typing import NewType

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
"""Incarnation of a worker or gateway; never reused. The id also names the NIXL agent."""
StageName = NewType("StageName", str)
EdgeName = NewType("EdgeName", str)
RoleName = NewType("RoleName", str)
Walk = NewType("Walk", str)
"""Phase of a stage's work on a request, e.g. `prefill`, `last_prefill`, `decode`."""
Epoch = NewType("Epoch", int)
"""The fencing token of a task: Redis's time in microseconds at the grant, or above the last epoch
if its clock was set back.
"""
Term = NewType("Term", int)
"""The fencing token of conductor leadership."""

CLIENT = StageName("client")
"""The pseudo-stage at which client edges end; its task is owned by a gateway."""


REQUEST, COMPLETION, AUDIO, RESPONSE = "req-", "chatcmpl-", "audio_", "resp_"
"""Prefixes under which clients see a request: in headers, as a chat completion, as its audio, as a
response of a session.
"""


def new_request_id() -> RequestId:
    """Return a new request id; ids sort by creation time."""
    return RequestId(f"{REQUEST}{time.time_ns() // 1_000_000:012x}{secrets.token_hex(5)}")


def shown_id(request: RequestId, prefix: str) -> str:
    """Return the id under which clients see a request as a completion, its audio or a response."""
    return f"{prefix}{request.removeprefix(REQUEST)}"


def request_id_of(shown: str) -> RequestId:
    """Return the id of a request that a person names in any of its forms; any other text as it
    is.
    """
    for prefix in (COMPLETION, AUDIO, RESPONSE):
        if shown.startswith(prefix):
            return RequestId(f"{REQUEST}{shown.removeprefix(prefix)}")
    return RequestId(shown)


def stage_of(role: str) -> StageName:
    """Return the stage of a role; a role may be limited to a walk (`stage.walk`) or a layer span
    (`stage[0:19]`).
    """
    return StageName(role.partition(".")[0].partition("[")[0])


def role_of(worker: WorkerId) -> str:
    """Return the role in a worker's id; "gateway" for a gateway."""
    return worker.partition("@")[0]


def place_of(worker: WorkerId) -> tuple[str, int]:
    """Return (host, pid) of a worker's id; ("", 0) for one without."""
    host, _, rest = worker.partition("@")[2].partition(":")
    pid = rest.partition(":")[0]
    return (host, int(pid)) if pid.isdecimal() else ("", 0)


def new_worker_id(role: str, host: str, pid: int) -> WorkerId:
    """Return a new id for one incarnation of a worker or gateway."""
    return WorkerId(f"{role}@{host}:{pid}:{secrets.token_hex(3)}")
