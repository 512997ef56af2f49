"""Turns of a session on two vLLM workers: each turn goes to the worker whose prefix cache has the
preceding one.
"""

import asyncio
from pathlib import Path

import redis.asyncio
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from fleet.control import keys
from tests.e2e.fleets import fleet_up
from tests.support import await_until
from tests.vllm.fleets import ON_VLLM, TEXT_FILE, openai_client

BLOCK = 32
SAID = "Tell me again, in other words, what was said before. " * 4


async def take_turn(
    client: AsyncOpenAI, messages: list[ChatCompletionMessageParam], session: str
) -> int:
    """Request the next answer and add it to `messages`; return the number of cached prompt
    tokens.
    """
    model = (await client.models.list()).data[0].id
    answer = await client.chat.completions.create(
        model=model, messages=messages, max_tokens=8, temperature=0.0, prompt_cache_key=session
    )
    messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


async def test_turns_of_a_session_reuse_the_blocks_of_their_worker(tmp_path: Path) -> None:
    """Turns of a session reuse their worker's KV blocks. Six concurrent conversations, three on
    each worker: placed at random, half of the turns would miss their blocks.
    """
    names = [f"session-{number}" for number in range(6)]
    talks: dict[str, list[ChatCompletionMessageParam]] = {name: [] for name in names}
    settings = (*ON_VLLM, "stages.lm.replicas=2", "stages.lm.max_batch=3")
    with fleet_up(tmp_path, *settings, options=TEXT_FILE) as fleet:
        async with (
            openai_client(fleet) as client,
            redis.asyncio.from_url(fleet.redis_url) as control,
        ):

            async def none_live() -> bool:
                return not await control.scard(keys.LIVE)

            for turn in range(4):
                for name, messages in talks.items():
                    messages.append({"role": "user", "content": f"{name}, {turn}. {SAID}"})
                cached = await asyncio.gather(
                    *(take_turn(client, messages, name) for name, messages in talks.items())
                )
                assert all(num_cached % BLOCK == 0 for num_cached in cached), cached
                assert min(cached) >= turn * BLOCK, (turn, cached)
                await await_until(none_live, "the slots of the answers to be free")
