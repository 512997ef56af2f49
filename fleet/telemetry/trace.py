"""The trace of one request, and the index of requests, as operators read them. Data only; no
decision depends on it.

Units: `*_us` are microseconds since 1970 by Redis's clock unless stated otherwise; 0 for an event
that has not happened. Knows no Redis and no HTTP.
"""

import msgspec

from fleet.core.hand_off import HandOff
from fleet.core.ids import EdgeName, Epoch, RequestId, StageName
from fleet.core.request import Sampling

LIVE_STATES = ("submitted", "running")
END_STATES = ("finished", "failed", "aborted")
STATES = (*LIVE_STATES, *END_STATES)


class RequestFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Filter of a list of requests. An empty or zero field matches every request.

    `stage`: stage that has not finished, for a live request; stage that failed, for a failed
    request; any stage of the request otherwise.
    `worker`: present or last owner of a task of the request. `min_ms`: least duration of the
    request, for a live request until now. `text`: part of the request id. `session`: internal name
    of the conversation.
    `from_us`, `to_us`: a request matches if it was live at some time between them.
    """

    state: str = ""
    stage: str = ""
    worker: str = ""
    kind: str = ""
    model: str = ""
    min_ms: int = 0
    text: str = ""
    from_us: int = 0
    to_us: int = 0
    session: str = ""


class TaskBrief(msgspec.Struct, frozen=True, kw_only=True):
    """Short description of one stage's task in a list of requests. `worker`: the present or last
    owner of the task; "" if it had no owner.
    """

    stage: StageName
    state: str
    worker: str


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """A request in a list of requests. `first_us`: time of the first chunk, by client edge.
    `code`, `error`: code and message of the failure; "" if it has not failed.
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


def matches(row: RequestRow, wanted: RequestFilter, now_us: int) -> bool:
    """Return True if a request matches the filter. `now_us`: time until which a live request's
    duration counts.
    """
    took_us = (row.ended_us or now_us) - row.created_us
    return (
        wanted.state in ("", row.state)
        and wanted.kind in ("", row.kind)
        and wanted.model in ("", row.model)
        and wanted.session in ("", row.session)
        and (
            not wanted.stage
            or any(t.stage == wanted.stage and _at_work(row.state, t.state) for t in row.tasks)
        )
        and (not wanted.worker or any(task.worker == wanted.worker for task in row.tasks))
        and took_us >= wanted.min_ms * 1000
        and (not wanted.to_us or row.created_us <= wanted.to_us)
        and (row.ended_us or now_us) >= wanted.from_us
        and wanted.text in row.id
    )


def _at_work(request_state: str, task_state: str) -> bool:
    if request_state in LIVE_STATES:
        return task_state != "finished"
    return request_state != "failed" or task_state == "failed"


class RequestPage(msgspec.Struct, frozen=True, kw_only=True):
    """Page of a list of requests, newest first. A filter may leave a page short or empty.

    `next`: value of `before` for the following page; "" on the last page. `counts`: number of
    requests in each state that match all fields of the filter but `state`; `counts_all`: False if
    only the newest were counted, and there may be more. `now_us`: time at which the page was read.
    """

    rows: tuple[RequestRow, ...]
    next: str
    counts: dict[str, int]
    now_us: int
    counts_all: bool = True


class TraceEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Event in the trace of a request. `worker`: id of the worker concerned, or "". `detail`: text
    for people, not to be parsed.

    `what`: submitted, granted, claimed, output (the first one), finished, failed, lost, parked,
    handed_off, confirmed, released, kept, attached, restored, delivered, ended.
    """

    at_us: int
    what: str
    stage: str = ""
    epoch: Epoch = Epoch(0)
    worker: str = ""
    detail: str = ""


class Receipt(msgspec.Struct, kw_only=True):
    """Statistics of the chunks that arrived on one input edge of a task while one worker owned the
    task, reported when that ownership ended.

    Units: `first_us`, `last_us`: arrival of the first and last chunk. `hop_mean_us`, `hop_max_us`:
    chunk latency, from the producer's time stamp to the arrival. `num_pulls`, `pull_bytes`,
    `pull_us`: number, size and total duration of the reads from the producer's memory. Times
    between machines include the difference of their clocks.
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


class BatchSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the batches in which one worker computed a task, reported when the worker's
    ownership of the task ended. `num_steps`: engine steps that produced output for the task.
    `mean`, `most`: number of requests, this one included, for which such a step produced output.
    """

    worker: str
    num_steps: int
    mean: float
    most: int


class TaskTrace(msgspec.Struct, frozen=True, kw_only=True):
    """State and times of one stage's task in the trace of a request. `owner`: the present or last
    owner.

    `hand_off`: times of the transfer from the prefill worker to the decode worker; None without a
    transfer. `cached_rows`: positions whose KV was reused from the conversation's earlier turn.
    `deaths`: number of workers that died over the task one after another without an append in
    between. `batches`: sizes of its batches by worker; a worker that died has reported none.
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
    batches: tuple[BatchSizes, ...] = ()


class EdgeTrace(msgspec.Struct, frozen=True, kw_only=True):
    """Traffic of one edge of a request. `produced` and `consumed` count chunks; `items` counts
    tokens, frames or windows in the chunks; `rows` sums the first dimension of each chunk's first
    tensor (tokens, frames or samples). `medium`: text or audio for a client edge; "" for an edge
    inside the graph.

    Units: `num_bytes`: size of the edge's log, inline tensors included. `remote_bytes`: size of the
    tensors that consumers pull from the producer's memory.
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
    """Period in which one worker owned the KV cache of a task. `to_us`: end of the period; 0 if it
    has not ended. `how`: `computed`, or taken over from another worker.
    """

    stage: StageName
    worker: str
    from_us: int
    to_us: int
    how: str


class PlaybackReport(msgspec.Struct, frozen=True, kw_only=True):
    """Playback statistics that the client's player reported. `played_samples`: audio samples of the
    answer that were played so far. `underruns`: number of buffer underruns so far. `at_us`: time of
    the report.
    """

    played_samples: int
    underruns: int
    at_us: int


class SoundGaps(msgspec.Struct, frozen=True, kw_only=True):
    """Gaps in the sound of a whole answer as it was made: times at which a player that begins with
    the first chunk has nothing to play. `num`: number of gaps; `longest_us`: length of the longest.
    """

    num: int
    longest_us: int


class SpokenTurn(msgspec.Struct, frozen=True, kw_only=True):
    """The turn of speech that a request answers. `voiced_end_us`: time of its last voiced sample.
    `decided_us`: time at which the gateway found the turn to be over, after some silence. The clock
    is the gateway's.
    """

    voiced_end_us: int
    decided_us: int


class FirstOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """Times of the first outputs of a request. `claimed_us`: when a worker claimed the main stage's
    task; None if no worker has claimed it. `first_us`: time of each stage's first output, by the
    clock of the stage's machine.
    """

    claimed_us: int | None
    first_us: dict[str, int]


class AudioIn(msgspec.Struct, frozen=True, kw_only=True):
    """An audio clip of the prompt, without its samples."""

    duration_s: float


class RequestTrace(msgspec.Struct, frozen=True, kw_only=True):
    """Complete trace of a request. `retry_of`: id of the request that this request repeats. `key`:
    name of the API key that sent it; "" without keys.
    `now_us`: time at which the trace was read. `body`: the client's request without its audio; ""
    if it was not retained. `traceparent`: the caller's W3C trace context (`core/trace_context.py`);
    "" without one.

    `prompt_ids`: token ids of the prompt, with one placeholder id per audio position. `events`:
    events in the order of time. `playback`: the client's last report. `earlier_playback`: reports
    before it in the order of time, thinned out to at most 64. `turn`: the spoken turn of a voice
    session that the request answers, if the gateway has told its times. `gaps`: gaps in the
    answer's sound; None unless a gateway has read the whole sound.
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
    traceparent: str = ""
    key: str = ""
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
    earlier_playback: tuple[PlaybackReport, ...] = ()
    turn: SpokenTurn | None = None
    gaps: SoundGaps | None = None
