"""The trace of one request, and the index of requests, as operators read them. Data only; no
decision depends on it.

Units: `*_us` are microseconds since 1970, 0 if it has not happened; by Redis's clock unless stated
otherwise. Knows no Redis and no HTTP.
"""

import msgspec

from fleet.core.hand_off import HandOff
from fleet.core.ids import EdgeName, Epoch, RequestId, StageName
from fleet.core.request import Sampling

LIVE_STATES = ("submitted", "running")
END_STATES = ("finished", "failed", "aborted")
STATES = (*LIVE_STATES, *END_STATES)


class RequestFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Filter of the index of requests; empty fields (0) match everything.

    `stage`: stage that has not finished, if the request is live; stage that failed, if it has
    failed; else any stage.
    `worker`: present or last owner of a task of the request. `min_ms`: least duration, so far if it
    is live. `text`: part of the request id.
    """

    state: str = ""
    stage: str = ""
    worker: str = ""
    kind: str = ""
    model: str = ""
    min_ms: int = 0
    text: str = ""


class TaskBrief(msgspec.Struct, frozen=True, kw_only=True):
    """`worker`: the present or last owner, "" if it had none."""

    stage: StageName
    state: str
    worker: str


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """Line of the index. `first_us`: time of the first chunk, by client edge. `code`, `error`:
    cause of a failure.
    """

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
    """Page of the index, newest first. `next` is the `before` of the page that follows, "" at the
    end: a filter may leave a page short or empty. `counts`: requests in the whole index, by state.
    `now_us`: time of the read.
    """

    rows: tuple[RequestRow, ...]
    next: str
    counts: dict[str, int]
    now_us: int


class TraceEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Event of a trace. `worker`: the worker concerned, or "". `detail` is for people.

    `what`: submitted, granted, claimed, output (the first one), finished, failed, lost, handed_off,
    confirmed, released, kept, attached, delivered, ended.
    """

    at_us: int
    what: str
    stage: str = ""
    epoch: Epoch = Epoch(0)
    worker: str = ""
    detail: str = ""


class Receipt(msgspec.Struct, kw_only=True):
    """Arrivals of one input edge's chunks at one owner of the consuming task, as reported at the
    end of its ownership.

    Units: `hop_*_us` are chunk latencies, from the producer's time stamp to the arrival; `pull_us`
    is the time spent in all pulls of `pull_bytes`; times between machines include the difference of
    their clocks.
    """

    edge: EdgeName
    worker: str = ""
    num_chunks: int = 0
    first_us: int = 0
    last_us: int = 0
    hop_mean_us: int = 0
    hop_max_us: int = 0
    num_pulls: int = 0
    pull_bytes: int = 0
    pull_us: int = 0
    pull_max_us: int = 0
    num_failed_pulls: int = 0


class TaskTrace(msgspec.Struct, frozen=True, kw_only=True):
    """`owner`: the present or last one. `hand_off`: timings of the transfer of its decode to
    another worker than its prefill's.
    `cached_rows`: rows reused from the conversation's earlier turn. `deaths`: workers that died
    over it since its last append.
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
    """Traffic of one edge. `produced` and `consumed` count chunks; `items` counts their items
    (tokens, frames, windows), and `rows` the rows of their first tensor (tokens, frames, samples).
    `medium` of a client edge: text or audio; "" inside the graph.

    Units: `num_bytes` of the log, inline tensors included; `remote_bytes` of pulled tensors.
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
    """Ownership of a task's KV cache by one worker, from `from_us` to `to_us` (0: still). `how`:
    computed, or taken over.
    """

    stage: StageName
    worker: str
    from_us: int
    to_us: int
    how: str


class PlaybackReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of the client's player: `played_samples` of the answer, and the number of its
    underruns.
    """

    played_samples: int
    underruns: int
    at_us: int


class FirstOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """`claimed_us`: when a worker claimed the main stage's task, None if it did not; `first_us`:
    the first output of each stage, by the clock of its machine.
    """

    claimed_us: int | None
    first_us: dict[str, int]


class AudioIn(msgspec.Struct, frozen=True, kw_only=True):
    """Audio clip of the prompt."""

    duration_s: float


class RequestTrace(msgspec.Struct, frozen=True, kw_only=True):
    """Complete trace of a request. `retry_of`: the request that this one repeats. `now_us`: time of
    the read. `body`: the client's request without its audio; "" if it was not retained.

    `prompt_ids` has one placeholder id per audio position. `events` are in order. `playback`: the
    last report of the client.
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
    events: tuple[TraceEvent, ...] = ()
    kv: tuple[KVSpan, ...] = ()
    playback: PlaybackReport | None = None
