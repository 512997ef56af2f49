"""A vLLM worker is killed in the middle of answers, greedy and sampled: another worker continues
them exactly.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from fleet.control.connect import connect
from fleet.core.ids import RequestId, WorkerId
from fleet.graphs.text import LM
from tests.e2e.fleets import (
    fleet_up,
    owner_of,
    process_of,
    wait_for_another_owner,
    wait_for_workers,
)
from tests.vllm.fleets import ON_VLLM, SPLIT, TEXT_FILE, openai_client

MAX_TOKENS, KILLED_AFTER = 300, 20
CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "Hello, who are you?",
        {"temperature": 0.0, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    ),
    ("Count from one to ten.", {"temperature": 0.0}),
    ("Say good night.", {"temperature": 0.9, "seed": 7}),
    ("Why do cats purr?", {"temperature": 0.9, "seed": 8, "top_p": 0.9, "presence_penalty": 0.5}),
)


async def stream_answer(
    client: AsyncOpenAI,
    model: str,
    number: int,
    disturb: Callable[[RequestId], None] = lambda _: None,
) -> str:
    """Return the answer to a request; `disturb` is called with the request's id in the middle of
    it.
    """
    question, sampling = CALLS[number]
    answer = await client.chat.completions.with_raw_response.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=MAX_TOKENS,
        stream=True,
        extra_body={"ignore_eos": True, **sampling},
    )
    pieces: list[str] = []
    async for chunk in answer.parse():
        if chunk.choices and (piece := chunk.choices[0].delta.content):
            pieces.append(piece)
            if len(pieces) == KILLED_AFTER:
                await asyncio.to_thread(disturb, RequestId(answer.headers["x-request-id"]))
    return "".join(pieces)


@pytest.mark.parametrize(
    ("role", "replicas"),
    [
        ("lm", ("stages.lm.replicas=2",)),
        ("lm.decode", (*SPLIT, "stages.lm.split.decode.replicas=2")),
    ],
    ids=["whole", "split"],
)
async def test_answers_of_a_killed_worker_continue_unchanged(
    tmp_path: Path, role: str, replicas: tuple[str, ...]
) -> None:
    """Answers of a killed worker continue unchanged. With two credits a worker is at most that far
    ahead of the client, so that the answer is unfinished when the worker dies.
    """
    settings = (*ON_VLLM, *replicas, "edges.text.credits=2", "lease.worker_ttl_s=3600")
    with (
        fleet_up(tmp_path, *settings, options=TEXT_FILE) as fleet,
        connect(fleet.redis_url) as control,
    ):
        wait_for_workers(control, role, 2)
        owners: list[tuple[WorkerId, WorkerId]] = []

        def kill(request: RequestId) -> None:
            killed, _ = owner_of(control, request, LM)
            process_of(killed).kill()
            owners.append((killed, wait_for_another_owner(control, request, LM, killed)))

        async with openai_client(fleet) as client:
            model = (await client.models.list()).data[0].id
            undisturbed = [
                await stream_answer(client, model, number) for number in range(len(CALLS))
            ]
            disturbed = await asyncio.gather(
                stream_answer(client, model, 0, kill),
                *(stream_answer(client, model, number) for number in range(1, len(CALLS))),
            )
        assert disturbed == undisturbed
        assert len(set(undisturbed)) == len(CALLS)
        ((killed, successor),) = owners
        assert killed != successor
