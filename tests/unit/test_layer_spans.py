"""Spans of layers: notation, implied topology, and routes over workers, which are compared with an
exhaustive search.
"""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.core.errors import ConfigError
from fleet.core.ids import WorkerId
from fleet.spans.protocol.layers import LayerSpan, RoutePlan, Topology, plan_route, topology_of

NUM_LAYERS = 28


def span(notation: str) -> LayerSpan:
    return LayerSpan.parse(notation, "anchor")


def route(anchor: str, *workers: str, head_on_anchor: bool = False) -> RoutePlan:
    named = {WorkerId(f"w{number}"): span(notation) for number, notation in enumerate(workers)}
    return plan_route(span(anchor), named, NUM_LAYERS, head_on_anchor=head_on_anchor)


def hops_of(plan: RoutePlan) -> list[str]:
    return [str(hop.worker) for hop in plan.hops]


@pytest.mark.parametrize("notation", ["0:20", "21:output", "21:last", "0:output", "5:5", "0:0"])
def test_notation_of_a_span_is_parsed_and_formatted(notation: str) -> None:
    assert str(span(notation)) == notation


@pytest.mark.parametrize(
    ("notation", "message"),
    [
        ("", "write 0:13"),
        ("20", "write 0:13"),
        ("1:2:3", "write 0:13"),
        ("-1:4", "write 0:13"),
        ("01:4", "write 0:13"),
        ("a:output", "write 0:13"),
        ("0:20,output", "write 0:13"),
        ("0:20 ", "write 0:13"),
        ("20:10", "ends before it begins; write 10:20"),
    ],
)
def test_malformed_span_is_refused_with_the_form_to_write(notation: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        LayerSpan.parse(notation, "stages.lm.spans.anchor")
    assert refused.value.param == "stages.lm.spans.anchor"


@pytest.mark.parametrize(
    ("anchor", "topology"),
    [
        ("0:13", Topology.FORWARD),
        ("0:last", Topology.FORWARD),
        ("14:output", Topology.REVERSE),
        ("0:output", Topology.SINGLE),
    ],
)
def test_span_of_the_anchor_implies_the_topology(anchor: str, topology: Topology) -> None:
    assert topology_of(span(anchor), "anchor") is topology


@pytest.mark.parametrize(
    ("anchor", "hints"),
    [("20:27", ("20:output", "0:27")), ("5:10", ("5:output", "0:10")), ("20:last", ("20:output",))],
)
def test_anchor_without_embedding_and_head_is_refused_with_the_forms_that_have_one(
    anchor: str, hints: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as refused:
        topology_of(span(anchor), "anchor")
    assert all(f"({hint})" in refused.value.message for hint in hints)


@pytest.mark.parametrize("anchor", ["0:28", "28:output", "30:last"])
def test_span_beyond_the_last_layer_is_refused_with_both_layers(anchor: str) -> None:
    with pytest.raises(ConfigError, match="names layer (28|30), but the model's last layer is 27"):
        span(anchor).of_model(NUM_LAYERS, "anchor")


@pytest.mark.parametrize(
    ("anchor", "workers", "hops"),
    [
        ("0:13", ("14:output",), ["w0"]),
        ("14:output", ("0:13",), ["w0"]),
        ("0:9", ("20:output", "10:19"), ["w1", "w0"]),
        ("20:output", ("15:19", "0:4", "5:14"), ["w1", "w2", "w0"]),
        ("0:13", ("14:last", "14:output"), ["w1"]),
        ("0:output", ("0:13", "14:output"), []),
    ],
)
def test_route_continues_from_layer_to_layer(
    anchor: str, workers: tuple[str, ...], hops: list[str]
) -> None:
    plan = route(anchor, *workers)
    assert plan.is_complete and hops_of(plan) == hops


def test_gaps_at_begin_middle_and_end_are_all_named() -> None:
    plan = route("0:3", "6:9", "15:20")
    assert plan.describe_gap() == "layers 4 to 5, 10 to 14, 21 to 27 and the output head"
    assert route("20:output", "0:18").describe_gap() == "layer 19"
    assert route("20:output").describe_gap() == "layers 0 to 19"


def test_overlapping_and_repeated_workers_are_unused_and_named_with_the_reason() -> None:
    plan = route("0:9", "10:19", "20:output", "15:output", "10:19", "5:12")
    assert plan.is_complete and hops_of(plan) == ["w0", "w1"]
    assert dict(plan.unused) == {
        "w2": "15:output overlaps 10:19 of w0",
        "w3": "10:19 repeats 10:19 of w0",
        "w4": "5:12 overlaps the anchor's layers",
    }


def test_reverse_route_never_uses_a_worker_with_the_output_head() -> None:
    plan = route("14:output", "0:output", "0:13")
    assert (
        plan.is_complete
        and hops_of(plan) == ["w1"]
        and "output head" in plan.unused[WorkerId("w0")]
    )


def test_missing_head_is_a_gap_unless_the_anchor_has_it() -> None:
    assert route("0:13", "14:last").describe_gap() == "the output head"
    assert route("0:13", "14:last", head_on_anchor=True).is_complete


@st.composite
def fleets(draw: st.DrawFn) -> tuple[LayerSpan, dict[WorkerId, LayerSpan], int]:
    num_layers = draw(st.integers(2, 9))
    edge = draw(st.integers(1, num_layers - 1))
    anchor = LayerSpan(0, edge - 1) if draw(st.booleans()) else LayerSpan(edge, None, True)
    workers: dict[WorkerId, LayerSpan] = {}
    for number in range(draw(st.integers(0, 5))):
        first, last = sorted(
            draw(st.tuples(st.integers(0, num_layers - 1), st.integers(0, num_layers - 1)))
        )
        has_output = last == num_layers - 1 and draw(st.booleans())
        workers[WorkerId(f"w{number}")] = LayerSpan(first, None if has_output else last, has_output)
    return anchor, workers, num_layers


@given(fleets())
def test_route_covers_as_many_layers_as_any_choice_of_disjoint_workers(
    fleet: tuple[LayerSpan, dict[WorkerId, LayerSpan], int],
) -> None:
    anchor, workers, num_layers = fleet
    plan = plan_route(anchor, workers, num_layers)
    forward = anchor.first == 0
    wanted = set(range(anchor.final + 1, num_layers) if forward else range(anchor.first))
    layers = {
        name: set(range(each.first, each.of_model(num_layers, "").final + 1))
        for name, each in workers.items()
    }
    usable = [
        name
        for name, each in workers.items()
        if layers[name] <= wanted and (forward or not each.has_output)
    ]
    most = max(
        len(set[int]().union(*(layers[name] for name in chosen)))
        for count in range(len(usable) + 1)
        for chosen in combinations(usable, count)
        if sum(len(layers[name]) for name in chosen)
        == len(set[int]().union(*(layers[name] for name in chosen)))
    )
    covered = [layer for hop in plan.hops for layer in range(hop.span.first, hop.span.final + 1)]
    assert covered == sorted(set(covered)) and len(covered) == most
    missing = {layer for first, last in plan.missing for layer in range(first, last + 1)}
    assert missing == wanted - set(covered)
    assert {hop.worker for hop in plan.hops} | set(plan.unused) == set(workers)
    heads = [workers[name].has_output for name in usable if num_layers - 1 in layers[name]]
    assert plan.is_complete == (not missing and (not forward or plan.hops[-1].span.has_output))
    assert not plan.needs_output or forward and not (heads and all(heads) and not missing)
