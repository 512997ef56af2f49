"""Disturbances while answers are being produced: a worker is replaced, or Redis restarts or fails
over.
"""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from fleet.config import FleetConfig, load_config
from fleet.control.client import FleetClient
from fleet.control.connect import connect
from fleet.core.errors import RedisUnreachable
from fleet.core.ids import EdgeName, StageName
from fleet.core.request import RequestSpec
from fleet.graphs import DEFAULT_GRAPH, get_graph
from tests.harness import (
    EdgeArrays,
    ThreadFleet,
    answer,
    answer_disturbed,
    assert_same,
    fake_spec_of,
    in_step,
)
from tests.support import RedisProcess, await_until, wait_until

OMNI = get_graph(DEFAULT_GRAPH)
SHORT_LEASES = ("lease.worker_ttl_s=1.0", "lease.conductor_ttl_s=1.0", "transfer.kind=redis")


def config_in_step(*overrides: str) -> FleetConfig:
    """Return a configuration of fake engines with short leases in which no stage finishes before
    the client has nearly read the answer.
    """
    fixed = ("engine=fake", "device=cpu", "numerics=invariant", *SHORT_LEASES, *in_step(OMNI))
    return load_config(None, (*fixed, *overrides))


def on_chunk(edge: str, index: int, act: Callable[[], object]) -> Callable[[EdgeName, int], None]:
    """Return a callback for `answer_disturbed` that calls `act` after chunk `index` of `edge`."""

    def act_once(at_edge: EdgeName, at_index: int) -> None:
        if (at_edge, at_index) == (edge, index):
            act()

    return act_once


def replace_worker(fleet: ThreadFleet, spec: RequestSpec, stage: StageName) -> None:
    """Add a worker for the stage, then kill the worker that runs it."""
    dying = fleet.owner(spec.id, stage)
    fleet.add_worker(dying.role)
    fleet.kill(dying)


def restart_redis(server: RedisProcess, folder: Path, cut_bytes: int) -> None:
    """Kill Redis and start it again with its append-only file cut by `cut_bytes`. Like after a
    power failure, the last writes and half of one are lost.
    """
    server.kill()
    for file in folder.rglob("*.aof"):
        if (size := file.stat().st_size) > cut_bytes:
            with file.open("r+b") as log:
                log.truncate(size - cut_bytes)
    server.start()


class AppendOnlyFile:
    """Append-only file of a Redis server, which can be truncated to an earlier size."""

    def __init__(self, server: RedisProcess, folder: Path) -> None:
        self._server, self._folder = server, folder
        self._sizes: Mapping[Path, int] = {}

    def record_size(self) -> None:
        """Record the file's size once it contains every acknowledged write, which a slow fsync may
        delay for seconds.
        """
        with connect(self._server.url) as client:
            wait_until(
                lambda: client.info("persistence")["aof_buffer_length"] == 0,
                "the append-only file to be written",
            )  # pyright: ignore
        self._sizes = {file: file.stat().st_size for file in self._folder.rglob("*.aof")}

    def restart(self) -> None:
        self._server.kill()
        for file, size in self._sizes.items():
            with file.open("r+b") as log:
                log.truncate(size)
        self._server.start()


def restart_empty(server: RedisProcess, folder: Path) -> None:
    """Kill Redis and start it again without any data."""
    server.kill()
    for file in folder.rglob("*"):
        if file.is_file():
            file.unlink()
    server.start()


async def check_answers(
    client: FleetClient, config: FleetConfig, disturb: Callable[[], object], *, at: int, num: int
) -> EdgeArrays:
    """Request `num` answers, compare them with an undisturbed one, and return the latter. `disturb`
    is called after text chunk `at` of the first answer.
    """
    expected = await answer(client, fake_spec_of(config))
    actions = (disturb, *[lambda: None] * (num - 1))
    answers = await asyncio.gather(
        *(
            answer_disturbed(client, fake_spec_of(config), None, on_chunk("text", at, act))
            for act in actions
        )
    )
    for received in answers:
        assert_same(received, expected)
    return expected


async def check_admitted(client: FleetClient, config: FleetConfig, expected: EdgeArrays) -> None:
    """Compare the first answer admitted after an outage with an undisturbed one."""

    async def answer_if_admitted() -> EdgeArrays | None:
        try:
            return await answer(client, fake_spec_of(config))
        except RedisUnreachable:
            return None

    received = await await_until(answer_if_admitted, "a request to be admitted")
    assert received is not None
    assert_same(received, expected)
