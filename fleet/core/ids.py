"""Typed names of things; two kinds of id never share a type. Knows nothing of where they are stored."""

import secrets
import time
from typing import NewType

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
"""One worker incarnation (or gateway); never reused. The NIXL agent bears the same name."""
StageName = NewType("StageName", str)
EdgeName = NewType("EdgeName", str)
RoleName = NewType("RoleName", str)
Walk = NewType("Walk", str)
"""One phase of a stage's work on a request, e.g. `prefill`, `last_prefill`, `decode`."""
Epoch = NewType("Epoch", int)
"""The fencing token of a task; max(epoch + 1, Redis TIME in microseconds) at every grant."""
Term = NewType("Term", int)
"""The fencing token of conductor leadership."""

CLIENT = StageName("client")
"""The pseudo-stage at which client edges end; its task is owned by a gateway."""


def new_request_id() -> RequestId:
    """Mint the one id a request has for life; sorts by creation time."""
    return RequestId(f"req-{time.time_ns() // 1_000_000:012x}{secrets.token_hex(5)}")


def stage_of(role: str) -> StageName:
    """The stage of a role, which may be narrowed to a walk (`stage.walk`) or a layer span (`stage[0:19]`)."""
    return StageName(role.partition(".")[0].partition("[")[0])


def role_of(worker: WorkerId) -> str:
    """What it serves, as its id says; "gateway" for a gateway."""
    return worker.partition("@")[0]


def place_of(worker: WorkerId) -> tuple[str, int]:
    """(host, pid), as its id says; ("", 0) for one without."""
    host, _, rest = worker.partition("@")[2].partition(":")
    pid = rest.partition(":")[0]
    return (host, int(pid)) if pid.isdecimal() else ("", 0)


def new_worker_id(role: str, host: str, pid: int) -> WorkerId:
    """Mint the id of one incarnation of a worker or gateway."""
    return WorkerId(f"{role}@{host}:{pid}:{secrets.token_hex(3)}")
