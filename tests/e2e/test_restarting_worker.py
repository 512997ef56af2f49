"""The only workers of two roles, including a role of a split stage, are killed: requests during the
restart are answered.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import psutil
import pytest
import redis
from openai import AsyncOpenAI

from fleet.control import keys
from fleet.core.ids import RoleName
from tests.e2e.fleets import FAKE, PATIENCE_S, ProcessFleet, fleet_up
from tests.e2e.test_voice import RealtimeTalk
from tests.support import REPO, await_until

pytestmark = pytest.mark.one_file_in(10, "processes")

ROLES = ("thinker.decode", "talker")
NUM_REQUESTS = 4
SPLIT = ("--config", str(REPO / "configs" / "thinker_pd.yaml"))


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[ProcessFleet]:
    with fleet_up(tmp_path, *FAKE, "stages.talker.sampling.max_tokens=5", options=SPLIT) as fleet:
        yield fleet


async def ask(client: AsyncOpenAI) -> str:
    answer = await client.chat.completions.create(
        model="pocket",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=5,
        timeout=PATIENCE_S,
        modalities=["text", "audio"],
        audio={"voice": "chelsie", "format": "pcm16"},
    )
    return answer.choices[0].finish_reason


async def take_turn(connection: Any) -> str:
    """Send a text over the realtime connection and request a response; return the reason with which
    the response ended.
    """
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}
    await connection.conversation.item.create(item=item)
    await connection.response.create(response={"max_output_tokens": 5})
    details = (await RealtimeTalk(connection).until("response.done"))["response"]["status_details"]
    return str(details["reason"] or details)


async def test_requests_and_voice_turns_during_a_restart_are_answered(
    fleet: ProcessFleet, control: redis.Redis
) -> None:
    good = fleet.resolved.read_text()
    async with (
        httpx.AsyncClient(base_url=fleet.url) as http,
        AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0) as client,
        client.realtime.connect(model="pocket") as connection,
    ):

        async def missing() -> bool:
            return (await http.get("/ready")).json()["missing"] == list(ROLES)

        async def submitted() -> bool:
            assert not any(turn.done() for turn in turns), [
                turn.result() for turn in turns if turn.done()
            ]
            return len((await http.get("/v1/fleet/requests")).json()["data"]) == len(turns)

        workers = (await http.get("/v1/fleet/workers")).json()["data"]
        fleet.resolved.write_text("graph: [")  # no worker starts
        for worker in workers:
            if worker["role"] in ROLES:
                psutil.Process(worker["pid"]).kill()
        await await_until(missing, "the deaths to be seen", PATIENCE_S)
        turns = [
            asyncio.create_task(turn)
            for turn in (take_turn(connection), *(ask(client) for _ in range(NUM_REQUESTS)))
        ]
        await await_until(submitted, "every request to be admitted", PATIENCE_S)
        fleet.resolved.write_text(good)
        voice, *chats = await asyncio.gather(*turns)
    assert (voice, chats) == ("max_output_tokens", ["length"] * NUM_REQUESTS)
    for role in ROLES:
        fields = cast("dict[bytes, bytes]", control.hgetall(keys.availability(RoleName(role))))
        assert set(fields) == {b"workers", b"took_us"}, (
            "the start is over, and its duration is recorded"
        )
    assert fleet.running.stop(timeout_s=30) == 0
