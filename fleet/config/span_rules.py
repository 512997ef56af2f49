"""Rules about the division of a stage's layers among workers, one function per rule. Knows no
checkpoint.

The number of the model's layers is not known here, so a worker repeats the checks with the number
before it loads weights.
"""

from collections.abc import Iterator, Sequence

from fleet.config.problems import Place, Problem
from fleet.config.schema import FleetConfig
from fleet.config.stage_schema import SpansConfig, StageConfig
from fleet.config.values import AUTO
from fleet.core.errors import ConfigError
from fleet.core.ids import StageName, WorkerId
from fleet.graphs import Stage
from fleet.spans.protocol.layers import LayerSpan, RoutePlan, plan_route, topology_of


def stages_can_be_divided(config: FleetConfig) -> Iterator[Problem]:
    for stage, own, spans in _divided(config):
        here, engine = _place(stage.name), config.engine_of(stage.name)
        if not stage.span_builder:
            yield Problem(here, f"the layers of {stage.name} cannot be divided; remove spans")
        elif engine != "torch":
            yield Problem(
                here,
                f"the engine {engine} cannot divide a model's layers; set engine: torch, or "
                "remove spans",
            )
        elif own.split is not None:
            yield Problem(
                here,
                "a stage is divided by layers or by prefill and decode, not by both; remove "
                "spans or split",
            )
        elif config.numerics == "invariant" and spans.wire_dtype not in ("auto", "float32"):
            message = (
                f"numerics: invariant sends rows in float32, not {spans.wire_dtype}; set "
                "auto or float32"
            )
            yield Problem((*here, "wire_dtype"), message)
        elif not stage.span_head:
            yield from _heads(stage, spans)


def _heads(stage: Stage, spans: SpansConfig) -> Iterator[Problem]:
    """Yield an error for each span worker with an output head, in stages where only the anchor can
    have the head.
    """
    for number, span in enumerate(_worker_spans(spans)):
        if span.has_output:
            message = (
                f"{span} has the output head, which only the anchor of {stage.name} can "
                f"have; write {span.first}:last"
            )
            yield Problem((*_place(stage.name), "workers", number), message)


def spans_are_complete(config: FleetConfig) -> Iterator[Problem]:
    for stage, _, spans in _divided(config):
        yield from problems_of_spans(stage.name, spans)


def problems_of_spans(
    stage: StageName, spans: SpansConfig, num_layers: int | None = None
) -> Iterator[Problem]:
    """Yield the mistakes in a stage's division into spans. `num_layers`: number of the model's
    layers; None if unknown.
    """
    here = _place(stage)
    if not spans.is_auto:
        for key, given in (
            ("replicas", spans.replicas != 1),
            ("memory_mib", spans.memory_mib is not None),
        ):
            if given:
                yield Problem(
                    (*here, key), "is for automatic spans only; set workers: auto, or remove it"
                )
    elif num_layers is not None:
        spans = spans.of_model(num_layers)
    if spans.anchor != AUTO:
        yield from _problems_of_known(here, spans, num_layers)
    elif not spans.is_auto:
        yield Problem(
            (*here, "anchor"),
            "auto is for automatic spans of workers only; set workers: auto, or write the "
            "anchor's span",
        )


def _problems_of_known(
    here: Place, spans: SpansConfig, num_layers: int | None
) -> Iterator[Problem]:
    """Yield the mistakes in a division whose anchor span is known, not `auto`."""
    anchor = spans.anchor_span
    beyond = None if num_layers is None else _first_beyond(here, spans, num_layers)
    if beyond is not None:
        yield beyond
    elif anchor.first == 0 and (
        anchor.last is None or (spans.is_auto and anchor.last + 1 == num_layers)
    ):
        if spans.workers:
            yield Problem(
                (*here, "workers"),
                f"the anchor has all layers ({anchor}); give it fewer, or remove workers",
            )
        elif not anchor.has_output:
            yield Problem(
                (*here, "anchor"),
                f"{anchor} leaves the output head to workers, and there are none; write 0:output",
            )
    elif mistake := _mistake_of(anchor):
        yield Problem((*here, "anchor"), mistake)
    elif not spans.workers and anchor.last is not None:
        yield Problem(
            (*here, "workers"),
            f"no worker has the layers after {anchor.last}; list the spans of workers for them",
        )
    elif not spans.is_auto:
        yield from _problems_of_route((*here, "workers"), spans, num_layers)


def _mistake_of(anchor: LayerSpan) -> str:
    """Return why an anchor cannot have this span; "" if it can."""
    try:
        topology_of(anchor, "anchor")
    except ConfigError as error:
        return error.message.removeprefix("anchor: ")
    return ""


def _first_beyond(here: Place, spans: SpansConfig, num_layers: int) -> Problem | None:
    """Return a problem for the first span that exceeds the model's `num_layers` layers; None if all
    spans fit.
    """
    given = [((*here, "anchor"), spans.anchor_span)]
    given += [
        ((*here, "workers", number), span) for number, span in enumerate(_worker_spans(spans))
    ]
    for place, span in given:
        try:
            span.of_model(num_layers, "span")
        except ConfigError as error:
            return Problem(place, error.message.removeprefix("span: "))
    return None


def _problems_of_route(
    here: Place, spans: SpansConfig, num_layers: int | None
) -> Iterator[Problem]:
    plan = _plan(spans, num_layers)
    unused = "; ".join(f"{worker} is not used: {reason}" for worker, reason in plan.unused.items())
    if not plan.is_complete:
        message = (
            f"no worker has {plan.describe_gap()}; together with the anchor "
            f"({spans.anchor}), workers must have the whole model"
        )
        yield Problem(here, f"{message}; {unused}" if unused else message)
    elif unused:
        yield Problem(here, f"{unused}; remove {'it' if len(plan.unused) == 1 else 'them'}")


def _plan(spans: SpansConfig, num_layers: int | None) -> RoutePlan:
    """Return the route that the configured spans form. Workers are named by their position in the
    list, counted from 1. If `num_layers` is None, the model is assumed to end where the last span
    does.
    """
    given = _worker_spans(spans)
    workers = {WorkerId(f"worker {number}"): span for number, span in enumerate(given, start=1)}
    ends = [each.first if each.last is None else each.last for each in (spans.anchor_span, *given)]
    return plan_route(
        spans.anchor_span,
        workers,
        num_layers or max(ends) + 1,
        head_on_anchor=spans.has_head_on_anchor,
    )


def _worker_spans(spans: SpansConfig) -> Sequence[LayerSpan]:
    """Return the spans that the configuration's list `spans.workers` gives, parsed and in the
    order of the list; empty for `auto`, which gives no spans.
    """
    return [] if spans.is_auto else [LayerSpan.parse(each, "workers") for each in spans.workers]


def _place(stage: StageName) -> Place:
    return "stages", stage, "spans"


def _divided(config: FleetConfig) -> Iterator[tuple[Stage, StageConfig, SpansConfig]]:
    for stage in config.graph_declaration().all_stages:
        own = config.stage(stage.name)
        if own.spans is not None:
            yield stage, own, own.spans
