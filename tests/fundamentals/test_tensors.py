"""Tensors of a chunk stay in the producer's memory, where consumers read them; lost tensors are
recomputed.
"""

from fleet.control import keys
from fleet.core.chunk import encode_location
from fleet.core.events import TaskGranted
from fleet.core.ids import CLIENT, EdgeName
from fleet.telemetry.counts import KV, PullCounts
from tests.control_plane import OTHER, OTHER_GATEWAY, REQUEST, STAGE, TEXT, WORKER, Control, place
from tests.harness import answer, fake_spec, open_fleet, wait_ended
from tests.support import REPO


async def test_consumers_read_tensors_and_blocks_from_the_memory_of_their_producers(
    redis_url: str, pulled: EdgeName
) -> None:
    """Consumers read tensors and KV blocks from the producer's memory. The reader counts its reads:
    per edge for the fleet, per request in its trace.
    """
    file = REPO / "configs" / "thinker_pd.yaml"
    async with open_fleet(redis_url, file=file, transfer="nixl") as (fleet, client):
        spec = fake_spec(fleet)
        await answer(client, spec)
        trace = await wait_ended(client, spec.id)
    receipts = [
        receipt for task in trace.tasks for receipt in task.receipts if receipt.edge == pulled
    ]
    (edge,) = [edge for edge in trace.edges if edge.name == pulled]
    assert edge.remote_bytes == sum(receipt.pull_bytes for receipt in receipts) > 0
    assert all(0 < receipt.pull_max_us <= receipt.pull_us for receipt in receipts)
    counted: dict[str, PullCounts] = {}
    for loop in fleet.loops:
        for name, counts in loop.parts.pull_tally.counts({}).items():
            counted[name] = counted.get(name, PullCounts()) + counts
    assert (counted[pulled].num_bytes, counted[pulled].num_failed) == (edge.remote_bytes, 0)
    assert counted[KV].num_pulls == 1 and counted[KV].num_bytes > 0, "the blocks of the prefill"
    assert any(mark.what == "handed_off" for mark in trace.events)
    assert any(span.how == "taken over" for span in trace.kv)


def test_lost_tensors_of_a_finished_task_are_recomputed_by_another_worker(
    control: Control,
) -> None:
    """Lost tensors of a finished task are recomputed by another worker, which finishes the task
    again; the former worker can write nothing more.
    """
    old = control.own()
    assert [control.append(old, finish=True), control.relocate(old, WORKER)] == ["ok", "ok"]
    assert control.redeliver(old) == "finished"
    control.register(OTHER)
    assert control.lose_tensors() == "ok"
    new = control.epoch()
    assert control.claim(new, OTHER) == "ok"
    assert control.redeliver(old) == "stale"
    assert [
        control.relocate(old, WORKER),
        control.append(old, finish=True),
        control.append(old, 1),
    ] == ["stale"] * 3
    assert control.task()["state"] == "running"
    assert [control.relocate(new, OTHER, 1), control.relocate(new, OTHER)] == ["gap", "ok"]
    assert control.client.hget(keys.loc(REQUEST, TEXT), "0") == encode_location(place(OTHER))
    assert control.append(new, finish=True) == "duplicate"
    assert control.task()["state"] == "finished"
    assert control.client.xlen(keys.edge(REQUEST, TEXT)) == 1


def test_lost_tensors_are_reported_only_by_the_owner_of_the_consumer(control: Control) -> None:
    """Only the owner of the consuming task may report lost tensors. A running producer recomputes
    them without a new grant; a finished one is granted again, once.
    """
    old, producing = control.epoch(CLIENT), control.own()
    control.register(OTHER_GATEWAY, "")
    assert control.attach(OTHER_GATEWAY) == "ok"
    assert (control.lose_tensors(), control.epoch()) == ("ok", producing)
    assert control.append(producing, finish=True) == "ok"
    assert (control.lose_tensors(old), control.epoch()) == ("stale", producing)
    assert control.lose_tensors() == "ok" and control.epoch() > producing
    recomputing = control.epoch()
    assert control.events_of(TaskGranted)[-1] == TaskGranted(
        request=REQUEST, stage=STAGE, epoch=recomputing
    )
    assert (control.lose_tensors(), control.epoch()) == ("ok", recomputing), "a repeated report"
