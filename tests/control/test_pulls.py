"""Remote reads of other workers' memory are counted by the reader: per edge for the fleet, per
request for its trace.
"""

import pytest

from fleet.control.telemetry.flows import flows_of
from fleet.control.telemetry.workers import transfers_of
from fleet.core.ids import EdgeName, WorkerId
from fleet.graphs import DEFAULT_GRAPH, GRAPHS
from fleet.telemetry.counts import (
    KV,
    BatchTally,
    PullCounts,
    PullTally,
    Receipts,
    SentCounts,
    decode_batch_sizes,
    decode_receipts,
)
from fleet.telemetry.trace import BatchSizes
from fleet.telemetry.views import EdgeFlow
from fleet.telemetry.vitals import Vitals
from tests import harness
from tests.harness import (
    answer,
    answer_disturbed,
    assert_same,
    fake_spec,
    in_step,
    open_fleet,
)
from tests.support import REPO

CONFIGS = REPO / "configs"


@pytest.mark.parametrize("config", ["colocated", "thinker_pd", "both_pd"])
async def test_recomputed_tensors_without_arena_room_leave_the_answer_the_same(
    redis_url: str, pulled: EdgeName, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer stays the same although all workers die, their tensors are lost, and the
    successors' arenas are too small for any tensor.
    """
    graph = GRAPHS[DEFAULT_GRAPH]
    async with open_fleet(
        redis_url, *in_step(graph), file=REPO / "configs" / f"{config}.yaml", transfer="nixl"
    ) as (
        fleet,
        client,
    ):
        expected = await answer(client, fake_spec(fleet))
        spec = fake_spec(fleet)

        def replace_workers(edge: EdgeName, index: int) -> None:
            if (edge, index) != (graph.edges[0].name, 6):
                return
            dying = list(fleet.loops)
            monkeypatch.setattr(harness, "ARENA_BYTES", 64)
            for role in fleet.config.roles():
                fleet.add_worker(role.name)
            for loop in dying:
                fleet.kill(loop)

        assert_same(await answer_disturbed(client, spec, None, replace_workers), expected)


def test_pull_counts_add_up_and_survive_encoding() -> None:
    one, other = PullTally(), PullTally()
    one.ended("rows", 100, 1_000)
    one.failed("rows")
    other.ended("rows", 50, 9_000)
    other.ended(KV, 7, 100)
    published = [Vitals(pulls=tally.counts({"rows": 1})).encode() for tally in (one, other)]
    decoded = [decode_pulls(vitals["pulls"]) for vitals in published]
    total = {
        "rows": decoded[0]["rows"] + decoded[1]["rows"],
        "none": PullCounts(),
        KV: decoded[1][KV],
    }
    rows, none, kv = transfers_of(total, {"rows": 12.34})
    assert (rows.edge, rows.num_pulls, rows.num_bytes, rows.num_failed, rows.in_flight) == (
        "rows",
        2,
        150,
        1,
        2,
    )
    assert (
        rows.bytes_per_s == 12.3
        and 1.0 <= (rows.p50_ms or 0) < 1.2
        and 9.0 <= (rows.p95_ms or 0) < 10.2
    )
    assert (none.num_pulls, none.p50_ms) == (0, None) and kv.num_bytes == 7
    assert one.counts({})["rows"].in_flight == 0, "the number in flight is a current value"


@pytest.mark.parametrize("raw", ["", "no", '{"rows": 3}', "[]"])
def test_damaged_vitals_count_as_not_published(raw: str) -> None:
    damaged = dict.fromkeys(("running", "hops", "pulls", "held_head"), raw.encode())
    assert Vitals.decode({**damaged, "gpu": b"H200"}) == Vitals(gpu="H200")


def decode_pulls(raw: int | str) -> dict[str, PullCounts]:
    return Vitals.decode({"pulls": str(raw).encode()}).pulls or {}


def test_receipt_contains_chunk_ages_and_pulls() -> None:
    receipts, edge = Receipts(), EdgeName("rows")
    assert receipts.line(WorkerId("w")) is None
    receipts.arrived(edge, 1_500, 1_000)
    receipts.arrived(edge, 2_000, 1_900)
    receipts.arrived(edge, 2_100, 9_999)
    receipts.pulled(edge, 10, 300)
    receipts.pulled(edge, 20, 100)
    receipts.failed(edge)
    (receipt,) = decode_receipts(receipts.line(WorkerId("w")) or b"")
    assert (
        receipt.num_chunks,
        receipt.first_us,
        receipt.last_us,
        receipt.hop_mean_us,
        receipt.hop_max_us,
    ) == (
        3,
        1_500,
        2_100,
        200,
        500,
    )
    assert (
        receipt.num_pulls,
        receipt.pull_bytes,
        receipt.pull_us,
        receipt.pull_max_us,
        receipt.num_failed_pulls,
    ) == (
        2,
        30,
        400,
        300,
        1,
    )


def test_batch_sizes_have_the_mean_and_the_most() -> None:
    batches = BatchTally()
    assert batches.line(WorkerId("w")) is None
    for num_requests in (1, 5, 5, 2):
        batches.add(num_requests)
    sizes = decode_batch_sizes(batches.line(WorkerId("w")) or b"")
    assert sizes == BatchSizes(worker="w", num_steps=4, mean=3.25, most=5)


def test_traffic_of_an_edge_is_its_growth_with_the_tasks_that_wait() -> None:
    graph = GRAPHS[DEFAULT_GRAPH]
    first, second = graph.answer_edges[:2]
    steps = [(1, {f"chunks:{first.name}": 10, f"bytes:{first.name}": 1_000})]
    steps.append((3, {f"chunks:{first.name}": 30, f"bytes:{first.name}": 6_000}))
    one, other = SentCounts(num_chunks=7, num_waiting=1), SentCounts(num_chunks=5, num_waiting=2)
    published = [Vitals.decode(_fields(counts)).sent or {} for counts in (one, other)]
    sent = {"edge": published[0]["edge"] + published[1]["edge"]}
    assert sent["edge"] == SentCounts(num_chunks=12, num_waiting=3)
    flows = {
        flow.edge: flow
        for flow in flows_of(graph, {first.name: sent["edge"]}, {second.name: 4}, steps)
    }
    assert flows[first.name] == EdgeFlow(
        edge=first.name,
        source=first.source,
        target=first.target,
        chunks_per_s=2.0,
        bytes_per_s=500.0,
        num_waiting=3,
    )
    assert flows[second.name].num_parked == 4
    assert flows.keys() == {edge.name for edge in graph.answer_edges}


def _fields(counts: SentCounts) -> dict[str, bytes]:
    encoded = Vitals(sent={"edge": counts}).encode()
    return {name: str(value).encode() for name, value in encoded.items()}
