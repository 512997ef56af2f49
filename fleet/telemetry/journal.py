"""The journal of a fleet: what happened to its processes and roles, and to the answers that these
events touched. Kept for days, so that whoever is called at night can see what happened before.
Data only; no decision depends on it.

Units: `*_us` are microseconds since 1970 on Redis's clock. Knows no Redis and no HTTP.
"""

import msgspec

from fleet.core.ids import RequestId, StageName, WorkerId

WHAT = (
    "joined",
    "left",
    "died",
    "lapsed",
    "ordered",
    "leaving",
    "led",
    "lost",
    "recovered",
    "failed",
    "refused",
)
"""Kinds of entries. Of a process: `joined`, `left` (it deregistered), `died` (a supervisor saw its
end), `lapsed` (fenced after its lease), `leaving` (by its own decision), `led` (a conductor took
over). Of a task: `lost` with its worker, `recovered` by the next one. Of a request: `failed`. Of a
gateway, once per step of the time series and code: `refused`. An operator's order is `ordered`, and
`detail` says which: drain, stop or resume of a worker; a number of workers of `role`; cancel, retry
or redeliver of a request.
"""


class JournalEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of the journal. `id`: orders the entries. `worker`: process concerned; `role`: its
    role, "" for a gateway. `request`, `stage`: task concerned.

    `requests`, `message`: the latest hundred of the refused requests of the step, and the last
    error's message. `by`: name of the API key with which an order was given. `code`: error code of
    a failure or refusal. `detail`: text for people: cause of an end (signal or exit status), order,
    reason of a failure. `count`: tasks held by a process that ended; refusals of the step.
    `pause_us`: time from the loss of a task until a worker claimed it again. `serving`: number of
    the role's workers that accept tasks after the end, drain or resumption of a worker; None in
    other entries.
    """

    id: str
    at_us: int
    what: str
    worker: WorkerId = WorkerId("")
    role: str = ""
    request: RequestId = RequestId("")
    stage: StageName = StageName("")
    by: str = ""
    code: str = ""
    detail: str = ""
    count: int = 0
    pause_us: int = 0
    serving: int | None = None
    requests: tuple[RequestId, ...] = ()
    message: str = ""
