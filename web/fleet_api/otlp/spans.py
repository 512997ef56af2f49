"""Conversion of a request's trace to spans of OpenTelemetry: the answer, its tasks, and as their
events what happened to them. Pure. Needs the extra `otlp`.

Source: semantic conventions for generative AI 1.41. Prompts and answers are not exported.
"""

from collections.abc import Iterator, Mapping, Sequence

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from fleet.core.ids import CLIENT, StageName
from fleet.core.trace_context import parse_traceparent, span_id_of, trace_id_of
from fleet.telemetry.trace import Receipt, RequestTrace, TaskTrace, TraceEvent

SCOPE = InstrumentationScope("fleet")
PROVIDER = "fleet"
OPERATIONS = {"transcription": "transcription"}
"""Operation by kind of request; the other kinds are chats."""
EVENT_NAMES = {
    "lost": "fleet.recovery",
    "handed_off": "fleet.hand_off",
    "confirmed": "fleet.hand_off.confirmed",
    "delivered": "fleet.delivery",
}
"""Names of span events by `TraceEvent.what`; any other event is named `fleet.` and its `what`."""
US = 1000
Attributes = Mapping[str, str | int | float | Sequence[str]]


def spans_of(trace: RequestTrace, main: StageName, resource: Resource) -> list[ReadableSpan]:
    """Convert the trace of an ended request; the answer's span is the first. `main`: stage that
    writes the text. `resource`: the exporting gateway.
    """
    root = _context(trace, span_id_of(trace.id))
    caller = parse_traceparent(trace.traceparent)
    parent = None if caller is None else _context(trace, caller.span_id, is_remote=True)
    has_failed = trace.state != "finished"
    answer = ReadableSpan(
        name=f"{_operation(trace)} {trace.model}",
        context=root,
        parent=parent,
        resource=resource,
        attributes={**_answer_attributes(trace, main)},
        events=[_event(event) for event in trace.events if not event.stage],
        kind=SpanKind.SERVER,
        status=Status(StatusCode.ERROR, trace.error or trace.state) if has_failed else Status(),
        start_time=trace.created_us * US,
        end_time=trace.ended_us * US,
        instrumentation_scope=SCOPE,
    )
    return [answer, *(_task_span(trace, task, root, resource) for task in trace.tasks)]


def _task_span(
    trace: RequestTrace, task: TaskTrace, root: SpanContext, resource: Resource
) -> ReadableSpan:
    own = [event for event in trace.events if event.stage == task.stage]
    times = [at_us for at_us in (*(event.at_us for event in own), task.granted_us) if at_us]
    begin_us = min(times, default=trace.created_us)
    end_us = max(begin_us, task.finished_us or trace.ended_us)
    events = [*map(_event, own), *map(_arrival, task.receipts)]
    return ReadableSpan(
        name="delivery" if task.stage == CLIENT else task.stage,
        context=_context(trace, span_id_of(trace.id, task.stage)),
        parent=root,
        resource=resource,
        attributes={**_task_attributes(task)},
        events=sorted(events, key=lambda event: event.timestamp),
        status=Status(StatusCode.ERROR, trace.code) if task.state == "failed" else Status(),
        start_time=begin_us * US,
        end_time=end_us * US,
        instrumentation_scope=SCOPE,
    )


def _context(trace: RequestTrace, span_id: str, *, is_remote: bool = False) -> SpanContext:
    sampled = TraceFlags(TraceFlags.SAMPLED)
    trace_id = int(trace_id_of(trace.id, trace.traceparent), 16)
    return SpanContext(trace_id, int(span_id, 16), is_remote, sampled)


def _operation(trace: RequestTrace) -> str:
    return OPERATIONS.get(trace.kind, "chat")


def _answer_attributes(trace: RequestTrace, main: StageName) -> Attributes:
    found: dict[str, str | int | float | Sequence[str]] = {
        "gen_ai.operation.name": _operation(trace),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": trace.model,
        "gen_ai.response.model": trace.model,
        "gen_ai.response.id": trace.id,
        "gen_ai.output.type": "speech" if _has(trace, "audio") else "text",
        "gen_ai.usage.input_tokens": len(trace.prompt_ids),
        "gen_ai.usage.output_tokens": sum(
            edge.items for edge in trace.edges if edge.medium == _written_medium(trace)
        ),
        "fleet.request.state": trace.state,
        "fleet.request.kind": trace.kind,
    }
    if trace.session:
        found["gen_ai.conversation.id"] = trace.session
    if trace.retry_of:
        found["fleet.request.retry_of"] = trace.retry_of
    if trace.state != "finished":
        found["error.type"] = trace.code or trace.state
    if cached := sum(task.cached_rows for task in trace.tasks if task.stage == main):
        found["gen_ai.usage.cache_read.input_tokens"] = cached
    firsts = [edge.first_us for edge in trace.edges if edge.medium and edge.first_us]
    if firsts:
        first_s = (min(firsts) - trace.created_us) / 1e6
        found["gen_ai.response.time_to_first_chunk"] = max(first_s, 0.0)
    return found | dict(_sampling(trace, main))


def _written_medium(trace: RequestTrace) -> str:
    """Return the medium of the text that the answer consists of; "" for speech alone."""
    return next((medium for medium in ("text", "transcript") if _has(trace, medium)), "")


def _has(trace: RequestTrace, medium: str) -> bool:
    return any(edge.medium == medium for edge in trace.edges)


def _sampling(trace: RequestTrace, main: StageName) -> Iterator[tuple[str, int | float]]:
    sampling = trace.sampling.get(main)
    if sampling is None:
        return
    for name in ("temperature", "top_p", "max_tokens", "seed"):
        yield f"gen_ai.request.{name}", getattr(sampling, name)
    for name in ("top_k", "frequency_penalty", "presence_penalty"):
        if getattr(sampling, name):  # 0 is off
            yield f"gen_ai.request.{name}", getattr(sampling, name)


def _task_attributes(task: TaskTrace) -> Attributes:
    return {
        "fleet.stage": task.stage,
        "fleet.role": task.role,
        "fleet.worker": task.owner,
        "fleet.task.state": task.state,
        "fleet.task.cached_rows": task.cached_rows,
        "fleet.batch.mean_size": next(
            (batch.mean for batch in task.batches if batch.worker == task.owner), 0.0
        ),
    }


def _event(event: TraceEvent) -> Event:
    given = {"fleet.worker": event.worker, "fleet.detail": event.detail}
    attributes: dict[str, str | int] = {name: text for name, text in given.items() if text}
    if event.epoch:
        attributes["fleet.epoch"] = event.epoch
    name = EVENT_NAMES.get(event.what, f"fleet.{event.what}")
    return Event(name, attributes, event.at_us * US)


def _arrival(receipt: Receipt) -> Event:
    attributes = {
        "fleet.edge": receipt.edge,
        "fleet.worker": receipt.worker,
        "fleet.chunks": receipt.num_chunks,
        "fleet.chunk_latency_mean_us": receipt.hop_mean_us,
        "fleet.pulled_bytes": receipt.pull_bytes,
    }
    return Event("fleet.delivery", attributes, receipt.first_us * US)
