"""Rules over the division of a stage's layers, checked as those of `rules.py`. One function per rule. Knows no checkpoint.

The number of the model's layers is not known here; a worker checks it when it starts.
"""

from collections.abc import Iterator

from fleet.config.problems import Place, Problem
from fleet.config.schema import FleetConfig, SpansConfig, StageConfig
from fleet.core.errors import ConfigError
from fleet.core.ids import StageName, WorkerId
from fleet.core.layer_spans import RoutePlan, Topology, plan_route, topology_of
from fleet.graphs import Stage


def stages_can_be_divided(config: FleetConfig) -> Iterator[Problem]:
    for stage, own, spans in _divided(config):
        here: Place = ("stages", stage.name, "spans")
        if not stage.span_builder:
            able = [each.name for each in config.graph_declaration().stages if each.span_builder]
            yield Problem(
                here, f"the layers of {stage.name} cannot be divided; only those of {', '.join(able) or 'no stage'} can"
            )
        elif config.engine_of(stage.name) != "torch":
            yield Problem(here, f"the engine {config.engine_of(stage.name)} has no spans of layers; set torch, or remove spans")
        elif spans.workers and not spans.has_head_on_anchor and not stage.span_head:
            message = f"the anchor of {stage.name} needs the rows after the last layer; write N:last in place of N:output"
            yield Problem((*here, "workers"), message)
        elif own.split is not None:
            yield Problem(here, "a stage is divided by layers or by prefill and decode, not by both; remove spans or split")
        elif config.numerics == "invariant" and spans.wire_dtype not in ("auto", "float32"):
            message = f"numerics: invariant sends rows in float32, not {spans.wire_dtype}; set auto or float32"
            yield Problem((*here, "wire_dtype"), message)


def spans_are_complete(config: FleetConfig) -> Iterator[Problem]:
    for stage, _, spans in _divided(config):
        here: Place = ("stages", stage.name, "spans")
        try:
            topology = topology_of(spans.anchor_span, "anchor")
        except ConfigError as error:
            yield Problem((*here, "anchor"), error.message.removeprefix("anchor: "))
            continue
        if topology is Topology.SINGLE:
            if spans.workers:
                yield Problem((*here, "workers"), "the anchor has all layers (0:output); give it fewer, or remove workers")
            continue
        plan = _plan(spans, topology)
        if not plan.is_complete:
            unused = "".join(f"; {why}" for why in plan.unused.values())
            message = f"no worker has {plan.describe_gap()}, and the anchor, {spans.anchor}, does not have them{unused}"
            yield Problem((*here, "workers"), message)
        elif plan.unused:
            yield Problem((*here, "workers"), f"{'; '.join(plan.unused.values())}; remove what is not used")


def check_spans_of_model(config: FleetConfig, stage: StageName, num_layers: int) -> None:
    """Check a stage's spans against the model's number of layers. Raises: ConfigError naming the field."""
    spans, field = config.stage(stage).spans, f"stages.{stage}.spans"
    if spans is None:
        return
    anchor = spans.anchor_span.of_model(num_layers, f"{field}.anchor")
    named = {WorkerId(f"worker {number}"): span for number, span in enumerate(spans.worker_spans, start=1)}
    workers = {name: span.of_model(num_layers, f"{field}.workers") for name, span in named.items()}
    plan = plan_route(anchor, workers, num_layers, head_on_anchor=spans.has_head_on_anchor)
    if workers and not plan.is_complete:
        message = f"{field}.workers: no worker has {plan.describe_gap()} of the model's {num_layers} layers"
        raise ConfigError(message, param=f"{field}.workers")


def _plan(spans: SpansConfig, topology: Topology) -> RoutePlan:
    """Return the route of workers with the configured spans, for a model that ends where the last of them does."""
    workers = {WorkerId(f"worker {number}"): span for number, span in enumerate(spans.worker_spans, start=1)}
    ends = [each.first if each.last is None else each.last for each in (spans.anchor_span, *spans.worker_spans)]
    num_layers = spans.anchor_span.first + 1 if topology is Topology.REVERSE else max(ends) + 1
    return plan_route(spans.anchor_span, workers, num_layers, head_on_anchor=spans.has_head_on_anchor)


def _divided(config: FleetConfig) -> Iterator[tuple[Stage, StageConfig, SpansConfig]]:
    for stage in config.graph_declaration().stages:
        own = config.stage(stage.name)
        if own.spans is not None:
            yield stage, own, own.spans
