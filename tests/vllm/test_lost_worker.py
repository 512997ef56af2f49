"""A vLLM worker killed in the middle of greedy answers, with and without penalties: another one continues them exactly."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import redis
from openai import AsyncOpenAI

from fleet.control.connect import connect
from fleet.core.ids import RequestId, WorkerId
from fleet.graphs.text import LM
from tests.e2e.fleets import PATIENCE_S, START_S, fleet_up, owner_of, process_of, worker_ids
from tests.support import wait_until
from tests.vllm.fleets import ON_VLLM, TEXT_FILE, openai_client

MAX_TOKENS, KILLED_AFTER = 300, 20
QUESTIONS = ("Hello, who are you?", "Count from one to ten.", "Say good night.", "Why do cats purr?")


async def stream_answer(
    client: AsyncOpenAI, model: str, number: int, disturb: Callable[[RequestId], None] = lambda _: None
) -> str:
    """Return a greedy answer, every other one with penalties; `disturb` is called with its request in the middle of it."""
    penalty = 0.0 if number % 2 else 0.5
    answer = await client.chat.completions.with_raw_response.create(
        model=model,
        messages=[{"role": "user", "content": QUESTIONS[number]}],
        max_tokens=MAX_TOKENS,
        temperature=0.0,
        frequency_penalty=penalty,
        presence_penalty=penalty,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    pieces: list[str] = []
    async for chunk in answer.parse():
        if chunk.choices and (piece := chunk.choices[0].delta.content):
            pieces.append(piece)
            if len(pieces) == KILLED_AFTER:
                await asyncio.to_thread(disturb, RequestId(answer.headers["x-request-id"]))
    return "".join(pieces)


def kill_owner(control: redis.Redis, request: RequestId) -> tuple[WorkerId, WorkerId]:
    """Kill the worker that owns the request; return it and the worker that continues."""
    killed, _ = owner_of(control, request, LM)
    process_of(killed).kill()

    def successor() -> WorkerId | None:
        owner, _ = owner_of(control, request, LM)
        return owner if owner not in ("", killed) else None

    found = wait_until(successor, "another worker to claim the task", PATIENCE_S)
    assert found is not None
    return killed, found


async def test_greedy_answers_with_penalties_survive_the_death_of_their_worker_unchanged(tmp_path: Path) -> None:
    """With two credits the worker is never further than that ahead of the client, so the answer is under way when it dies."""
    settings = (*ON_VLLM, "stages.lm.replicas=2", "edges.text.credits=2", "lease.worker_ttl_s=3600")
    with fleet_up(tmp_path, *settings, options=TEXT_FILE) as fleet, connect(fleet.redis_url) as control:
        wait_until(lambda: sum(worker.startswith(f"{LM}@") for worker in worker_ids(control)) == 2, "both workers", START_S)
        owners: list[tuple[WorkerId, WorkerId]] = []

        def kill(request: RequestId) -> None:
            owners.append(kill_owner(control, request))

        async with openai_client(fleet) as client:
            model = (await client.models.list()).data[0].id
            undisturbed = [await stream_answer(client, model, number) for number in range(len(QUESTIONS))]
            disturbed = await asyncio.gather(
                stream_answer(client, model, 0, kill),
                *(stream_answer(client, model, number) for number in range(1, len(QUESTIONS))),
            )
        assert disturbed == undisturbed
        assert len(set(undisturbed)) == len(QUESTIONS)
        ((killed, successor),) = owners
        assert killed != successor
