"""Reads of other workers' memory are counted where they are made: by edge for the fleet, by request for its story."""

import pytest

from fleet.control.telemetry.workers import transfers_of
from fleet.core.ids import EdgeName, WorkerId
from fleet.core.pulls import KV, PullCounts, PullTally, decode_pulls
from fleet.core.receipts import Receipts, decode_receipts
from fleet.core.telemetry import WorkerTransfer, WorkerView
from fleet.graphs import DEFAULT_GRAPH, GRAPHS
from tests import harness
from tests.harness import answer, answer_disturbed, assert_same, fake_spec, gateway, in_step, thread_fleet
from tests.support import REPO, await_until


async def test_pulls_are_counted_by_worker_and_in_the_trace(redis_url: str, pulled: EdgeName) -> None:
    with thread_fleet(redis_url, file=REPO / "configs" / "thinker_pd.yaml", transfer="nixl") as fleet:
        async with gateway(fleet) as client:
            spec = fake_spec(fleet)
            await answer(client, spec)

            async def ended() -> bool:
                story = await client.telemetry.trace(spec.id)
                return story is not None and story.ended_us > 0

            await await_until(ended, "the request to end")
            story = await client.telemetry.trace(spec.id)
    assert story is not None
    remote = fleet.config.graph_declaration().edge(pulled)
    told = next(edge for edge in story.edges if edge.name == remote.name)
    receipts = [r for task in story.tasks if task.stage == remote.target for r in task.receipts if r.edge == remote.name]
    assert told.remote_bytes == sum(r.pull_bytes for r in receipts) > 0
    assert all(0 < r.pull_max_us <= r.pull_us for r in receipts)
    counted: dict[str, PullCounts] = {}
    for loop in fleet.loops:
        for edge, counts in decode_pulls(loop.pull_tally.encoded({})).items():
            counted[edge] = counted[edge] + counts if edge in counted else counts
    assert counted[remote.name].num_bytes == told.remote_bytes and counted[remote.name].num_failed == 0
    assert counted[KV].num_pulls == 1 and counted[KV].num_bytes > 0, "the prefill's blocks"
    assert any(mark.what == "handed_off" for mark in story.marks) and any(span.how == "taken over" for span in story.kv)


@pytest.mark.parametrize("config", ["colocated", "thinker_pd", "both_pd"])
async def test_recomputed_tensors_without_arena_room_leave_the_answer_the_same(
    redis_url: str, pulled: EdgeName, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All workers die, and their tensors with them; the arenas of their successors have no room for a single tensor."""
    graph = GRAPHS[DEFAULT_GRAPH]
    with thread_fleet(redis_url, *in_step(graph), file=REPO / "configs" / f"{config}.yaml", transfer="nixl") as fleet:
        async with gateway(fleet) as client:
            expected = await answer(client, fake_spec(fleet))
            spec = fake_spec(fleet)

            def strike(edge: EdgeName, index: int) -> None:
                if (edge, index) != (graph.edges[0].name, 6):
                    return
                dying = list(fleet.loops)
                monkeypatch.setattr(harness, "ARENA_BYTES", 64)
                for role in fleet.config.roles():
                    fleet.add_worker(role.name)
                for loop in dying:
                    fleet.kill(loop)

            assert_same(await answer_disturbed(client, spec, None, strike), expected)


def test_pull_counts_add_up_and_survive_encoding() -> None:
    one, other = PullTally(), PullTally()
    one.ended("rows", 100, 1_000)
    one.failed("rows")
    other.ended("rows", 50, 9_000)
    other.ended(KV, 7, 100)
    told = [decode_pulls(tally.encoded({"rows": 1})) for tally in (one, other)]
    total = {"rows": told[0]["rows"] + told[1]["rows"], "none": PullCounts(), KV: told[1][KV]}
    end = WorkerTransfer(
        worker=WorkerId("w"), role="lm", backend="nixl", registered_bytes=1, used_bytes=0, slots_used=0, in_flight=2, num_pulls=2,
        num_failed=1,
    )  # fmt: skip
    there = WorkerView(id=WorkerId("w"), role="lm", host="h", pid=1, state="ready", started_us=1, transfer=end)
    view = transfers_of([there], total, {"rows": 12.34})
    rows, none, kv = view.edges
    assert (rows.edge, rows.num_pulls, rows.num_bytes, rows.num_failed, rows.in_flight) == ("rows", 2, 150, 1, 2)
    assert rows.bytes_per_s == 12.3 and 1.0 <= (rows.p50_ms or 0) < 1.2 and 9.0 <= (rows.p95_ms or 0) < 10.2
    assert (none.num_pulls, none.p50_ms) == (0, None) and kv.num_bytes == 7 and view.workers == (end,)
    assert one.encoded({}) != one.encoded({"rows": 1}), "what is in flight is as it is now"


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
    (told,) = decode_receipts(receipts.line(WorkerId("w")) or b"")
    assert (told.num_chunks, told.first_us, told.last_us, told.hop_mean_us, told.hop_max_us) == (3, 1_500, 2_100, 200, 500)
    assert (told.num_pulls, told.pull_bytes, told.pull_us, told.pull_max_us, told.num_failed_pulls) == (2, 30, 400, 300, 1)
