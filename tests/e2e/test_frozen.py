"""A worker frozen past its lease and then let go: others have its work, what it still writes is refused, and it joins anew."""

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
from tests.harness import answer, assert_same, fake_spec_of, heard, in_step
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
class Fleet:
    running: Running
    config: FleetConfig
    url: str
    control: redis.Redis

    def owner(self, request: RequestId) -> tuple[WorkerId, Epoch]:
        """Who runs the stage's task; "" between two."""
        fields = cast("list[bytes | None]", self.control.hmget(keys.task(request, STAGE), ["owner", "epoch"]))
        owner, epoch = (text(field) for field in fields)
        return WorkerId(owner), Epoch(int(epoch))

    def workers(self) -> set[str]:
        return {text(worker) for worker in cast("list[bytes]", self.control.zrange(keys.WORKERS, 0, -1))}

    def log_of(self, request: RequestId, edge: EdgeName) -> list[Chunk]:
        entries = cast("list[tuple[bytes, dict[bytes, bytes]]]", self.control.xrange(keys.edge(request, edge)))
        return [decode_chunk(fields[b"h"]) for _, fields in entries]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with start_cli("up", *(word for setting in SETTINGS for word in ("--set", setting)), cwd=tmp_path) as running:
        running.wait_for(r"fleet: ready at http://\S+\n", timeout_s=START_S)
        config = load_config(tmp_path / ".fleet" / "resolved.yaml")
        url = embedded_url(config.redis_data_dir)
        fleet = Fleet(running=running, config=config, url=url, control=connect(url))
        wait_until(lambda: sum(worker.startswith(f"{STAGE}@") for worker in fleet.workers()) == 2, "both replicas", START_S)
        yield fleet
        fleet.control.close()


def late_write(fleet: Fleet, request: RequestId, epoch: Epoch) -> str:
    """What Redis answers to an append by whoever held the task at `epoch`."""
    index = len(fleet.log_of(request, OUT.name))
    chunk = Chunk(request=request, edge=OUT.name, index=index, epoch=epoch)
    late = scripts.Append(
        stage=STAGE, consumer=StageName(OUT.target), chunk=chunk, location={}, event=None, finish=False, num_items=1
    )
    return text(cast("list[bytes]", run(fleet.control, scripts.append([late])))[0])


def freeze(fleet: Fleet, request: RequestId) -> tuple[WorkerId, Epoch]:
    """SIGSTOP the task's owner until another has claimed the task, then SIGCONT; returns who it was, and its epoch."""
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


async def test_a_frozen_worker_that_goes_on_changes_nothing_and_joins_anew(fleet: Fleet) -> None:
    client = await FleetClient.connect(fleet.url, fleet.config)
    await client.start()
    try:
        expected = await answer(client, fake_spec_of(fleet.config, num_tokens=NUM_TOKENS))
        spec = fake_spec_of(fleet.config, num_tokens=NUM_TOKENS)
        frozen: list[tuple[WorkerId, Epoch]] = []

        def disturb(edge: EdgeName, index: int) -> None:
            if (edge, index) == (GRAPH.edges[0].name, 8):
                frozen.append(freeze(fleet, spec.id))

        assert_same(await heard(client, spec, None, disturb), expected)
    finally:
        await client.stop()
    ((stale, epoch),) = frozen
    epochs = [chunk.epoch for chunk in fleet.log_of(spec.id, OUT.name)]
    assert epochs == sorted(epochs) and epoch in epochs and epochs[-1] > epoch, "none of the old owner's after the new one's"
    fleet.running.wait_for("it was fenced; the worker joins again", timeout_s=PATIENCE_S)

    def anew() -> list[str]:
        same_process = [worker for worker in fleet.workers() if place_of(WorkerId(worker)) == place_of(stale)]
        return [worker for worker in same_process if worker != stale]

    assert len(wait_until(anew, "the worker to join anew", PATIENCE_S)) == 1
