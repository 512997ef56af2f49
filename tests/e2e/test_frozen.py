"""A worker that is frozen past its lease and resumed: others own its tasks, its writes are refused, and it rejoins."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import psutil
import pytest
import redis

from fleet.config import FleetConfig, load_config
from fleet.control import keys, scripts
from fleet.control.client import FleetClient
from fleet.control.connect import connect, run, text
from fleet.control.embedded import embedded_url
from fleet.core.chunk import Chunk, decode_chunk
from fleet.core.ids import EdgeName, Epoch, RequestId, StageName, WorkerId, place_of
from fleet.graphs import DEFAULT_GRAPH, GRAPHS
from tests.harness import answer, answer_disturbed, assert_same, fake_spec_of, in_step
from tests.support import Running, start_cli, wait_until

GRAPH = GRAPHS[DEFAULT_GRAPH]
STAGE = GRAPH.stages[1].name
OUT = GRAPH.edges_from(STAGE)[0]
START_S, PATIENCE_S = 90.0, 60.0
SETTINGS = (
    "engine=fake", "device=cpu", "transfer.kind=redis", "web.port=0", "lease.worker_ttl_s=1",
    f"stages.{STAGE}.replicas=2", *in_step(GRAPH),
)  # fmt: skip
NUM_TOKENS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenFleet:
    running: Running
    config: FleetConfig
    url: str
    control: redis.Redis

    def owner(self, request: RequestId) -> tuple[WorkerId, Epoch]:
        """Return the owner and epoch of the stage's task; the owner is "" between two owners."""
        fields = cast("list[bytes | None]", self.control.hmget(keys.task(request, STAGE), ["owner", "epoch"]))
        owner, epoch = (text(field) for field in fields)
        return WorkerId(owner), Epoch(int(epoch))

    def workers(self) -> set[str]:
        return {text(worker) for worker in cast("list[bytes]", self.control.zrange(keys.WORKERS, 0, -1))}

    def log_of(self, request: RequestId, edge: EdgeName) -> list[Chunk]:
        entries = cast("list[tuple[bytes, dict[bytes, bytes]]]", self.control.xrange(keys.edge(request, edge)))
        return [decode_chunk(fields[b"h"]) for _, fields in entries]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[FrozenFleet]:
    with start_cli("up", *(word for setting in SETTINGS for word in ("--set", setting)), cwd=tmp_path) as running:
        running.wait_for(r"fleet: ready at http://\S+\n", timeout_s=START_S)
        config = load_config(tmp_path / ".fleet" / "resolved.yaml")
        url = embedded_url(config.redis_data_dir)
        fleet = FrozenFleet(running=running, config=config, url=url, control=connect(url))
        wait_until(lambda: sum(worker.startswith(f"{STAGE}@") for worker in fleet.workers()) == 2, "both replicas", START_S)
        yield fleet
        fleet.control.close()


def late_write(fleet: FrozenFleet, request: RequestId, epoch: Epoch) -> str:
    """Append as the owner at `epoch`, and return the reply of the script."""
    index = len(fleet.log_of(request, OUT.name))
    chunk = Chunk(request=request, edge=OUT.name, index=index, epoch=epoch)
    late = scripts.Append(
        stage=STAGE, consumer=StageName(OUT.target), chunk=chunk, location={}, event=None, finish=False, num_items=1
    )
    return text(cast("list[bytes]", run(fleet.control, scripts.append([late])))[0])


def freeze(fleet: FrozenFleet, request: RequestId) -> tuple[WorkerId, Epoch]:
    """SIGSTOP the task's owner until another has claimed the task, then SIGCONT; return the first owner and its epoch."""
    stale, epoch = fleet.owner(request)
    process = psutil.Process(place_of(stale)[1])
    process.suspend()
    try:
        wait_until(lambda: stale not in fleet.workers(), "its lease to lapse", PATIENCE_S)
        wait_until(lambda: fleet.owner(request)[0] not in ("", stale), "another to claim the task", PATIENCE_S)
        assert late_write(fleet, request, epoch) == "stale"
    finally:
        process.resume()
    return stale, epoch


async def test_resumed_frozen_worker_changes_nothing_and_rejoins(fleet: FrozenFleet) -> None:
    client = await FleetClient.connect(fleet.url, fleet.config)
    await client.start()
    try:
        expected = await answer(client, fake_spec_of(fleet.config, num_tokens=NUM_TOKENS))
        spec = fake_spec_of(fleet.config, num_tokens=NUM_TOKENS)
        frozen: list[tuple[WorkerId, Epoch]] = []

        def disturb(edge: EdgeName, index: int) -> None:
            if (edge, index) == (GRAPH.edges[0].name, 8):
                frozen.append(freeze(fleet, spec.id))

        assert_same(await answer_disturbed(client, spec, None, disturb), expected)
    finally:
        await client.stop()
    ((stale, epoch),) = frozen
    epochs = [chunk.epoch for chunk in fleet.log_of(spec.id, OUT.name)]
    assert epochs == sorted(epochs) and epoch in epochs and epochs[-1] > epoch, "the old owner wrote no chunk after the new one"
    fleet.running.wait_for("it was fenced; the worker joins again", timeout_s=PATIENCE_S)

    def rejoined() -> list[str]:
        same_process = [worker for worker in fleet.workers() if place_of(WorkerId(worker)) == place_of(stale)]
        return [worker for worker in same_process if worker != stale]

    assert len(wait_until(rejoined, "the worker to rejoin", PATIENCE_S)) == 1
