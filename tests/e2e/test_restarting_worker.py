"""Kill of the only workers of two roles, one of them half of a split stage: requests during the restart are answered."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import psutil
import pytest
import redis
from openai import AsyncOpenAI

from fleet.control import keys
from fleet.control.embedded import embedded_url
from fleet.core.ids import RoleName
from tests.support import REPO, Running, await_until, start_cli

ROLES = ("thinker.decode", "talker")
NUM_REQUESTS = 4
SETTINGS = (
    "engine=fake", "device=cpu", "transfer.kind=redis", "web.port=0",
    "stages.talker.sampling.max_tokens=5",
)  # fmt: skip
OPTIONS = ["--config", str(REPO / "configs" / "thinker_pd.yaml"), *(word for one in SETTINGS for word in ("--set", one))]
START_S, PATIENCE_S = 90.0, 60.0


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Running]:
    with start_cli("up", *OPTIONS, cwd=tmp_path) as running:
        running.wait_for(r"fleet: ready at http://\S+\n", timeout_s=START_S)
        yield running


async def ask(client: AsyncOpenAI) -> str:
    answer = await client.chat.completions.create(
        model="pocket", messages=[{"role": "user", "content": "hello"}], max_tokens=5, timeout=PATIENCE_S,
        modalities=["text", "audio"], audio={"voice": "chelsie", "format": "pcm16"},
    )  # fmt: skip
    return answer.choices[0].finish_reason


@asynccontextmanager
async def conversation(client: AsyncOpenAI) -> AsyncIterator[Any]:
    async with client.realtime.connect(model="pocket") as connection:
        yield connection


async def take_turn(connection: Any) -> str:
    """Take a voice turn, and return the reason for its end."""
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}
    await connection.conversation.item.create(item=item)
    await connection.response.create(response={"max_output_tokens": 5})
    while True:
        event = (await asyncio.wait_for(connection.recv(), PATIENCE_S)).to_dict()
        assert event["type"] != "error", event
        if event["type"] == "response.done":
            details = event["response"]["status_details"]
            return str(details["reason"] or details)


async def test_requests_and_voice_turns_during_a_restart_are_answered(fleet: Running, tmp_path: Path) -> None:
    url = fleet.wait_for(r"fleet: ready at (http://\S+)\n")[1]
    resolved = tmp_path / ".fleet" / "resolved.yaml"
    good = resolved.read_text()
    async with (
        httpx.AsyncClient(base_url=url) as http,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        conversation(client) as connection,
    ):

        async def missing() -> bool:
            return (await http.get("/ready")).json()["missing"] == list(ROLES)

        async def submitted() -> bool:
            assert not any(turn.done() for turn in turns), [turn.result() for turn in turns if turn.done()]
            return len((await http.get("/v1/fleet/requests")).json()["data"]) == len(turns)

        workers = (await http.get("/v1/fleet/workers")).json()["data"]
        resolved.write_text("graph: [")  # no worker starts
        for worker in workers:
            if worker["role"] in ROLES:
                psutil.Process(worker["pid"]).kill()
        await await_until(missing, "the deaths to be seen", PATIENCE_S)
        turns = [asyncio.create_task(turn) for turn in (take_turn(connection), *(ask(client) for _ in range(NUM_REQUESTS)))]
        await await_until(submitted, "every request to be admitted", PATIENCE_S)
        resolved.write_text(good)
        voice, *chats = await asyncio.gather(*turns)
    assert (voice, chats) == ("max_output_tokens", ["length"] * NUM_REQUESTS)
    with redis.Redis.from_url(embedded_url(tmp_path / ".fleet" / "redis"), decode_responses=True) as control:
        for role in ROLES:
            fields = cast("dict[str, str]", control.hgetall(keys.availability(RoleName(role))))
            assert set(fields) == {"workers", "took_us"}, "the start is over, and its duration is recorded"
    assert fleet.stop(timeout_s=30) == 0
