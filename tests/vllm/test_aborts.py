"""Clients that leave a split vLLM fleet at any moment: both roles end with no request and no KV
page in use.
"""

import asyncio
import random
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from openai import AsyncOpenAI, AsyncStream
from openai.types.chat import ChatCompletionChunk

from fleet.core.hand_off import VLLM_LEASE_S
from fleet.lab.client.client import ApiClient, ResourcesInUse
from fleet.lab.measure.prompts import PROMPTS
from tests.e2e.fleets import fleet_up
from tests.support import wait_until
from tests.vllm.fleets import ON_VLLM, SPLIT, TEXT_FILE, openai_client

NUM_REQUESTS, NUM_IN_SHORT = 1000, 100
CONCURRENCY = 8
MAX_TOKENS = 200
MAX_STAY_S = 1.5
"""Longest time in seconds that a client stays: from before its prompt is computed until after the
hand-off.
"""
EMPTY = ResourcesInUse(tasks=0, pages=0, slots=0)
WORDS = " ".join(PROMPTS).split()


async def leave_after(client: AsyncOpenAI, model: str, rng: random.Random) -> str:
    """Ask for an answer of MAX_TOKENS, and close the connection after a random time; return in
    which phase that was.
    """
    question = " ".join(rng.choices(WORDS, k=rng.randint(1, 150)))
    pieces: list[str] = []
    try:
        async with asyncio.timeout(rng.uniform(0.0, MAX_STAY_S)):
            stream = await client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": question}],
                max_tokens=MAX_TOKENS,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            async with stream:
                await read_text(stream, pieces)
    except TimeoutError:
        return "left in the answer" if pieces else "left before the first token"
    return "stayed"


async def read_text(stream: AsyncStream[ChatCompletionChunk], pieces: list[str]) -> None:
    async for chunk in stream:
        pieces += [choice.delta.content for choice in chunk.choices if choice.delta.content]


async def leave_many(client: AsyncOpenAI, number: int) -> Counter[str]:
    model = (await client.models.list()).data[0].id
    gate = asyncio.Semaphore(CONCURRENCY)

    async def leave_one(seed: int) -> str:
        async with gate:
            return await leave_after(client, model, random.Random(seed))

    return Counter(await asyncio.gather(*(leave_one(seed) for seed in range(number))))


async def watch(api: ApiClient, found: list[ResourcesInUse], ended: asyncio.Event) -> None:
    """Add the workers' reports to `found` from now on until `ended` is set."""
    while not ended.is_set():
        found.append(await asyncio.to_thread(api.resources_in_use))
        with suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), 0.5)


def resources(api: ApiClient, found: list[ResourcesInUse]) -> bool:
    """Add the workers' reports to `found`; return True if nothing is in use."""
    found.append(api.resources_in_use())
    return found[-1] == EMPTY


@pytest.mark.timeout(1200)
async def test_clients_that_leave_free_both_halves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, thorough: bool
) -> None:
    """Clients that leave free both roles. KV pages that the decode role has not read are held for
    the duration of vLLM's lease. Duration: 1,000 requests take some minutes.
    """
    number = NUM_REQUESTS if thorough else NUM_IN_SHORT
    with fleet_up(tmp_path, *ON_VLLM, *SPLIT, "edges.text.credits=2", options=TEXT_FILE) as fleet:
        busy, ended = list[ResourcesInUse](), asyncio.Event()
        watching = asyncio.create_task(watch(fleet.api, busy, ended))
        async with openai_client(fleet) as client:
            counts = await leave_many(client, number)
        ended.set()
        await watching
        started = asyncio.get_running_loop().time()
        found: list[ResourcesInUse] = []
        wait_until(
            lambda: resources(fleet.api, found),
            "both halves to hold nothing",
            timeout_s=VLLM_LEASE_S + 5,
        )
        took_s = asyncio.get_running_loop().time() - started
        with capsys.disabled():
            print(
                f"\n{dict(counts)}: at most {max(one.pages for one in busy)} pages, {found[-1]} "
                f"after {took_s:.1f} s"
            )
        assert (
            min(counts["left in the answer"], counts["left before the first token"]) >= number // 20
        )
        assert max(one.pages for one in busy) > 0 and max(one.tasks for one in busy) > 1
