"""Redis may be killed during an answer and restarted with or without its last writes: every answer
is complete.
"""

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fleet.core.errors import RedisUnreachable
from fleet.core.ids import Epoch, RequestId, StageName
from fleet.core.request import RequestSpec
from fleet.worker.loop import grants
from fleet.worker.task.task import Task
from tests.disturbances import (
    OMNI,
    check_answers,
    config_in_step,
    on_chunk,
    restart_empty,
    restart_redis,
)
from tests.harness import (
    answer,
    answer_disturbed,
    fake_spec_of,
    open_processes,
    ready,
)
from tests.support import RedisProcess

pytestmark = pytest.mark.one_file_in(3, "control in a process")


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
    """Every answer is complete although Redis loses any part of its last writes at any moment, and
    no epoch is granted twice.
    """
    rng = random.Random(seed)
    at, cut_bytes = rng.randrange(5, 35), rng.randrange(1, 30_000)
    config = config_in_step()
    async with open_processes(server.url, config) as (_, client):
        restart = partial(restart_redis, server, tmp_path, cut_bytes)
        await check_answers(client, config, restart, at=at, num=4)
    assert len(claims) == len(set(claims)) >= 5 * len(OMNI.stages)


async def test_empty_redis_fails_running_requests_and_serves_new_ones(
    own_redis: RedisProcess, tmp_path: Path
) -> None:
    config = config_in_step("numerics=fast")
    async with open_processes(own_redis.url, config) as (_, client):
        restart = on_chunk("text", 8, partial(restart_empty, own_redis, tmp_path))
        with pytest.raises(RedisUnreachable, match="Redis lost the request in mid-answer"):
            await answer_disturbed(client, fake_spec_of(config), None, restart)
        await ready(client)
        after = fake_spec_of(config, num_tokens=5)
        assert set(await answer(client, after)) == set(after.outputs)
