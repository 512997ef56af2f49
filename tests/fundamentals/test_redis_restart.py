"""Redis may be killed during an answer and restarted, with or without its last writes: every answer
is complete.
"""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleet.config import load_config
from fleet.control import keys
from fleet.control.connect import connect
from fleet.core.errors import RedisUnreachable
from fleet.core.ids import CLIENT, EdgeName, Epoch, RequestId, StageName
from fleet.core.request import RequestSpec
from fleet.graphs import get_graph
from fleet.worker.loop import grants
from fleet.worker.task.task import Task
from tests.harness import (
    answer,
    answer_disturbed,
    assert_same,
    fake_spec,
    fake_spec_of,
    in_step,
    open_fleet,
    open_processes,
    ready,
)
from tests.support import RedisProcess, await_until

OMNI = get_graph("qwen3_omni")
LEASES = ("lease.worker_ttl_s=1.0", "lease.conductor_ttl_s=1.0", "transfer.kind=redis")


def cut_tail(folder: Path, num_bytes: int) -> None:
    """Truncate the log as a power failure may: the last writes, and half of one, are lost."""
    for file in folder.rglob("*.aof"):
        if file.stat().st_size > num_bytes:
            with file.open("r+b") as log:
                log.truncate(file.stat().st_size - num_bytes)


def restart(
    server: RedisProcess, folder: Path, at: int, cut_bytes: int
) -> Callable[[EdgeName, int], None]:
    """Return an action that kills the server at the given text chunk and restarts it with a
    truncated log.
    """

    def restart_at_index(edge: EdgeName, index: int) -> None:
        if (edge, index) == ("text", at):
            server.kill()
            cut_tail(folder, cut_bytes)
            server.start()

    return restart_at_index


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> list[tuple[RequestId, StageName, Epoch]]:
    """Record every claim of a task: request, stage and epoch."""
    claims: list[tuple[RequestId, StageName, Epoch]] = []
    open_task = grants.open_task

    def open_and_record(
        spec: RequestSpec, stage: StageName, epoch: Epoch, *others: Any, **more: Any
    ) -> Task:
        claims.append((spec.id, stage, epoch))
        return open_task(spec, stage, epoch, *others, **more)

    monkeypatch.setattr(grants, "open_task", open_and_record)
    return claims


@pytest.mark.parametrize("seed", range(4))
async def test_answers_survive_a_killed_redis_that_lost_its_last_writes(
    server: RedisProcess,
    tmp_path: Path,
    claims: list[tuple[RequestId, StageName, Epoch]],
    seed: int,
) -> None:
    """Any part of the last writes may be lost, at any moment of the answers: no epoch is granted
    twice.
    """
    rng = random.Random(seed)
    at, cut_bytes = rng.randrange(5, 35), rng.randrange(1, 30_000)
    config = load_config(
        None, ("engine=fake", "device=cpu", "numerics=invariant", *LEASES, *in_step(OMNI))
    )
    async with open_processes(server.url, config) as (_, client):
        expected = await answer(client, fake_spec_of(config))

        def nothing(_edge: EdgeName, _index: int) -> None: ...

        actions = (restart(server, tmp_path, at, cut_bytes), nothing, nothing, nothing)
        answers = await asyncio.gather(
            *(answer_disturbed(client, fake_spec_of(config), None, action) for action in actions)
        )
        for received in answers:
            assert_same(received, expected)
    assert len(claims) == len(set(claims)) >= 5 * len(OMNI.stages)


@pytest.mark.parametrize("cut_bytes", [0, 700, 9_000])
async def test_answer_survives_a_killed_redis(
    server: RedisProcess, tmp_path: Path, cut_bytes: int
) -> None:
    config = load_config(
        None, ("engine=fake", "device=cpu", "numerics=invariant", *LEASES, *in_step(OMNI))
    )
    async with open_processes(server.url, config) as (_, client):
        expected = await answer(client, fake_spec_of(config))
        action = restart(server, tmp_path, 20, cut_bytes)
        assert_same(await answer_disturbed(client, fake_spec_of(config), None, action), expected)
        assert_same(await answer(client, fake_spec_of(config)), expected)


async def test_credit_that_redis_lost_is_returned_again(redis_url: str) -> None:
    """The chunks remain but their acknowledgements are lost: the chunks are not recomputed, and the
    producer waits for credit.
    """
    async with open_fleet(redis_url, "numerics=invariant", *in_step(OMNI)) as (fleet, client):
        spec = fake_spec(fleet)

        def kill(edge: EdgeName, index: int) -> None:
            if (edge, index) == ("text", 20):
                fleet.kill(fleet.owner(spec.id, StageName("thinker")))

        async def text_is_consumed() -> bool:
            view = await client.telemetry.trace(spec.id)
            return view is not None and any(
                e.name == "text" and e.produced == e.consumed > 20 for e in view.edges
            )

        expected = await answer(client, fake_spec(fleet))
        received = asyncio.create_task(answer_disturbed(client, spec, None, kill))
        await await_until(text_is_consumed, "the client to consume the text")
        with connect(redis_url) as other:
            other.hset(keys.task(spec.id, CLIENT), "consumed:text", 10)
        fleet.add_worker("thinker")
        assert_same(await received, expected)


async def test_empty_redis_fails_running_requests_and_serves_new_ones(tmp_path: Path) -> None:
    first, config = (
        RedisProcess(tmp_path),
        load_config(None, ("engine=fake", "device=cpu", *LEASES, *in_step(OMNI))),
    )
    first.start()
    async with open_processes(first.url, config) as (_, client):
        begun = fake_spec_of(config)

        def restart_empty(edge: EdgeName, index: int) -> None:
            if (edge, index) == ("text", 8):
                first.kill()
                for file in tmp_path.rglob("*"):
                    if file.is_file():
                        file.unlink()
                first.start()

        with pytest.raises(RedisUnreachable, match="Redis lost the request in mid-answer"):
            await answer_disturbed(client, begun, None, restart_empty)
        await ready(client)
        after = fake_spec_of(config, num_tokens=5)
        assert set(await answer(client, after)) == set(after.outputs)
    first.stop()
