"""One request's story, and the index of requests, as people read them. Data only; nothing is decided by any of it.

Units: `*_us` are microseconds since 1970, 0 where it has not happened; by Redis's clock where nothing else is said.
Knows no Redis and no HTTP.
"""

import msgspec

from fleet.core.hand_off import HandOff
from fleet.core.ids import EdgeName, Epoch, RequestId, StageName
from fleet.core.request import Sampling

LIVE_STATES = ("submitted", "running")
END_STATES = ("finished", "failed", "aborted")
STATES = (*LIVE_STATES, *END_STATES)


class RequestFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which requests of the index are wanted; what is empty (0) asks for nothing.

    `stage`: of a live request, one that is still at work on it; of a failed one, that which failed; of others, any it ran.
    `worker`: it holds, or held last, a task of the request. `min_ms`: how long it took, or has taken so far. `text`: a part of
    its id.
    """

    state: str = ""
    stage: str = ""
    worker: str = ""
    kind: str = ""
    model: str = ""
    min_ms: int = 0
    text: str = ""


class TaskBrief(msgspec.Struct, frozen=True, kw_only=True):
    """`worker`: who holds or held it last, "" where nobody did."""

    stage: StageName
    state: str
    worker: str


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the index. `first_us`: by client edge, when its first chunk was in the log. `code`, `error`: why it failed."""

    id: RequestId
    state: str
    kind: str
    model: str
    created_us: int
    ended_us: int = 0
    code: str = ""
    error: str = ""
    session: str = ""
    tasks: tuple[TaskBrief, ...] = ()
    first_us: dict[EdgeName, int] = {}


class RequestPage(msgspec.Struct, frozen=True, kw_only=True):
    """Newest first. `next` is the `before` of the page that follows, "" at the end: a page may be short, and even empty, where a
    filter leaves out many. `counts` are those of the whole index, by state. `now_us`: when this was read.
    """

    rows: tuple[RequestRow, ...]
    next: str
    counts: dict[str, int]
    now_us: int


class TraceEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a story. `worker`: whose it is, "" where nobody's; `detail` is for people.

    `what`: submitted, granted, claimed, output (the first of all), finished, failed, lost, handed_off, confirmed, released, kept,
    attached, delivered, ended.
    """

    at_us: int
    what: str
    stage: str = ""
    epoch: Epoch = Epoch(0)
    worker: str = ""
    detail: str = ""


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """How one input edge's chunks reached one owner of the task that consumes them, as that owner told at its end.

    Units: `hop_*_us` the ages of chunks on arrival, from the producer's stamp; `pull_us` the time spent in all its pulls of
    `pull_bytes`; times between machines hold the difference of their clocks.
    """

    edge: EdgeName
    worker: str
    num_chunks: int
    first_us: int
    last_us: int
    hop_mean_us: int
    hop_max_us: int
    num_pulls: int = 0
    pull_bytes: int = 0
    pull_us: int = 0
    pull_max_us: int = 0
    num_failed_pulls: int = 0


class TaskTrace(msgspec.Struct, frozen=True, kw_only=True):
    """`owner`: who holds or held it last. `hand_off`: how its decode came to another worker than its prefill. `spared`: the rows
    of it that the conversation's earlier turn had computed. `deaths`: workers that died over it since it last made anything.
    """

    stage: StageName
    state: str
    role: str
    owner: str
    walk: str
    epoch: Epoch
    granted_us: int = 0
    claimed_us: int = 0
    first_us: int = 0
    finished_us: int = 0
    deaths: int = 0
    cached_rows: int = 0
    hand_off: HandOff | None = None
    receipts: tuple[Receipt, ...] = ()


class EdgeTrace(msgspec.Struct, frozen=True, kw_only=True):
    """`produced` and `consumed` count chunks; `items` counts what they hold (tokens, frames, windows), `rows` those of its first
    tensor (tokens, frames, samples). `medium`: what it carries to the client, "" inside the graph.

    Units: `num_bytes` of what went through the log, inline tensors included; `remote_bytes` of what was pulled beside it.
    """

    name: EdgeName
    source: StageName
    target: StageName
    produced: int
    consumed: int
    items: int
    rows: int = 0
    num_bytes: int = 0
    remote_bytes: int = 0
    first_us: int = 0
    last_us: int = 0
    medium: str = ""


class KVSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Who owned the keys and values of a task, from when until when (0: still). `how` it came to them: computed, taken over."""

    stage: StageName
    worker: str
    from_us: int
    to_us: int
    how: str


class PlaybackReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the listener's own player said: `played_samples` of the answer, and how often it ran dry."""

    played_samples: int
    underruns: int
    at_us: int


class FirstOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """`claimed_us`: when a worker claimed the main stage's task, None if it did not; `first_us`: the first output of each stage,
    by the clock of its machine.
    """

    claimed_us: int | None
    first_us: dict[str, int]


class AudioIn(msgspec.Struct, frozen=True, kw_only=True):
    """One clip of the prompt."""

    duration_s: float


class RequestTrace(msgspec.Struct, frozen=True, kw_only=True):
    """One request, complete. `retry_of`: the request that this one repeats. `now_us`: when this was read. `body`: what the client
    sent, without its sound; "" where it was not kept.

    `prompt_ids` holds one placeholder id per audio position. `marks` are in order; `kept`: whether it can be sent again.
    """

    id: RequestId
    graph: str
    state: str
    kind: str
    model: str
    code: str
    error: str | None
    param: str
    created_us: int
    ended_us: int
    now_us: int
    session: str
    retry_of: str
    body: str = ""
    outputs: tuple[EdgeName, ...]
    params: dict[str, str]
    sampling: dict[StageName, Sampling]
    prompt_ids: tuple[int, ...]
    audio: tuple[AudioIn, ...]
    tasks: tuple[TaskTrace, ...]
    edges: tuple[EdgeTrace, ...]
    marks: tuple[TraceEvent, ...] = ()
    kv: tuple[KVSpan, ...] = ()
    heard: PlaybackReport | None = None
