"""Reads of other workers' memory are counted by the reader: per edge for the fleet, per request for
its trace.
"""

import pytest

from fleet.control.telemetry.workers import transfers_of
from fleet.core.ids import EdgeName, WorkerId
from fleet.graphs import DEFAULT_GRAPH, GRAPHS
from fleet.telemetry.pulls import KV, PullCounts, PullTally, decode_pulls
from fleet.telemetry.receipts import Receipts, decode_receipts
from fleet.telemetry.views import WorkerTransfer, WorkerView
from tests import harness
from tests.harness import (
    answer,
    answer_disturbed,
    assert_same,
    fake_spec,
    in_step,
    open_fleet,
    wait_ended,
)
from tests.support import REPO

CONFIGS = REPO / "configs"


async def test_pulls_are_counted_by_worker_and_in_the_trace(
    redis_url: str, pulled: EdgeName
) -> None:
    async with open_fleet(redis_url, file=CONFIGS / "thinker_pd.yaml", transfer="nixl") as (
        fleet,
        client,
    ):
        spec = fake_spec(fleet)
        await answer(client, spec)
        trace = await wait_ended(client, spec.id)
    remote = fleet.config.graph_declaration().edge(pulled)
    remote_edge = next(edge for edge in trace.edges if edge.name == remote.name)
    receipts = [
        r
        for task in trace.tasks
        if task.stage == remote.target
        for r in task.receipts
        if r.edge == remote.name
    ]
    assert remote_edge.remote_bytes == sum(r.pull_bytes for r in receipts) > 0
    assert all(0 < r.pull_max_us <= r.pull_us for r in receipts)
    counted: dict[str, PullCounts] = {}
    for loop in fleet.loops:
        for edge, counts in decode_pulls(loop.parts.pull_tally.encoded({})).items():
            counted[edge] = counted[edge] + counts if edge in counted else counts
    assert (
        counted[remote.name].num_bytes == remote_edge.remote_bytes
        and counted[remote.name].num_failed == 0
    )
    assert counted[KV].num_pulls == 1 and counted[KV].num_bytes > 0, "the prefill's blocks"
    assert any(mark.what == "handed_off" for mark in trace.events) and any(
        span.how == "taken over" for span in trace.kv
    )


@pytest.mark.parametrize("config", ["colocated", "thinker_pd", "both_pd"])
async def test_recomputed_tensors_without_arena_room_leave_the_answer_the_same(
    redis_url: str, pulled: EdgeName, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All workers die, and their tensors are lost; the arenas of their successors are too small for
    any tensor.
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
    decoded = [decode_pulls(tally.encoded({"rows": 1})) for tally in (one, other)]
    total = {
        "rows": decoded[0]["rows"] + decoded[1]["rows"],
        "none": PullCounts(),
        KV: decoded[1][KV],
    }
    transfer = WorkerTransfer(
        worker=WorkerId("w"),
        role="lm",
        backend="nixl",
        registered_bytes=1,
        used_bytes=0,
        slots_used=0,
        in_flight=2,
        num_pulls=2,
        num_failed=1,
    )
    worker_view = WorkerView(
        id=WorkerId("w"), role="lm", host="h", pid=1, state="ready", started_us=1, transfer=transfer
    )
    view = transfers_of([worker_view], total, {"rows": 12.34})
    rows, none, kv = view.edges
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
    assert (
        (none.num_pulls, none.p50_ms) == (0, None)
        and kv.num_bytes == 7
        and view.workers == (transfer,)
    )
    assert one.encoded({}) != one.encoded({"rows": 1}), "the number in flight is a current value"


@pytest.mark.parametrize("raw", ["", "no", '{"rows": 3}', "[]"])
def test_pull_counts_of_another_version_are_ignored(raw: str) -> None:
    assert decode_pulls(raw) == {}
    assert decode_receipts(raw.encode()) == ()


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
