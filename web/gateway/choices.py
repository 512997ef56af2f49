"""Several answers to one chat (`n`): each is a request of its own, which differs from the first in
its seed. Knows no endpoint.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import msgspec

from fleet.control.client import Applicant
from fleet.core.ids import StageName, new_request_id
from web.gateway.answer import AnswerStream
from web.gateway.gateway import Gateway
from web.gateway.prepared_chat import PreparedChat
from web.schema.chat import MAX_SEED
from web.schema.responses import Usage

T = TypeVar("T")
Work = Callable[[int, AnswerStream], Awaitable[T]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices(Generic[T]):
    """The submitted answers in their order, and the work on each."""

    answers: Sequence[AnswerStream]
    tasks: Sequence[asyncio.Task[T]]


def choices_of(chat: PreparedChat, num: int, main: StageName) -> list[PreparedChat]:
    """Return the requests of `num` choices. Choice k has the request's seed plus k in the stage
    `main`; only the first continues the conversation of `prompt_cache_key`.
    """
    return [chat, *(_choice_of(chat, number, main) for number in range(1, num))]


def _choice_of(chat: PreparedChat, number: int, main: StageName) -> PreparedChat:
    own = chat.spec.sampling[main]
    own = msgspec.structs.replace(own, seed=(own.seed + number) % (MAX_SEED + 1))
    spec = msgspec.structs.replace(
        chat.spec,
        id=new_request_id(),
        session="",
        sampling={**chat.spec.sampling, main: own},
    )
    applicant = Applicant(chat.applicant.client)
    applicant.arrived_s = chat.applicant.arrived_s
    return replace(chat, spec=spec, seed=own.seed, applicant=applicant)


@asynccontextmanager
async def submitted(
    gateway: Gateway, chats: Sequence[PreparedChat], work: Work[T]
) -> AsyncIterator[Choices[T]]:
    """Submit the choices, and run `work` on each answer as soon as its request is submitted, so
    that no answer waits until the others are admitted. Leaving the context cancels all work and
    aborts the requests that have not ended.

    Raises: as `Gateway.submit_prepared`, if a choice is not admitted.
    """
    loop = asyncio.get_running_loop()
    answers: list[asyncio.Future[AnswerStream]] = [loop.create_future() for _ in chats]
    tasks = [
        asyncio.create_task(_run(gateway, chat, number, work, answers[number]))
        for number, chat in enumerate(chats)
    ]
    try:
        yield Choices(answers=await asyncio.gather(*answers), tasks=tasks)
    finally:
        for each in (*tasks, *answers):
            each.cancel()
        # with their errors, or asyncio would report them as never retrieved
        await asyncio.gather(*tasks, *answers, return_exceptions=True)


async def _run(
    gateway: Gateway,
    chat: PreparedChat,
    number: int,
    work: Work[T],
    answer: asyncio.Future[AnswerStream],
) -> T:
    try:
        active = await gateway.submit_prepared(chat)
    except BaseException as error:
        if not answer.done():
            answer.set_exception(error)
        raise
    async with active.answer as stream:
        if not answer.done():
            answer.set_result(stream)
        return await work(number, stream)


async def merged(
    choices: Choices[None], events: "asyncio.Queue[bytes | None]"
) -> AsyncIterator[bytes]:
    """Yield the events that the work on the choices puts into a queue, until all work has ended.
    Raises: FleetError of the first choice that fails.
    """
    for task in choices.tasks:
        task.add_done_callback(lambda _: events.put_nowait(None))
    num_left = len(choices.tasks)
    while num_left:
        event = await events.get()
        if event is not None:
            yield event
            continue
        num_left -= 1
        for task in choices.tasks:
            if task.done():
                task.result()


def summed_usage(answers: Sequence[AnswerStream]) -> Usage:
    """Return the token counts of all answers; their common prompt counts once."""
    first, *others = [answer.usage() for answer in answers]
    for usage in others:
        ours, theirs = first.completion_tokens_details, usage.completion_tokens_details
        first = msgspec.structs.replace(
            first,
            completion_tokens=first.completion_tokens + usage.completion_tokens,
            total_tokens=first.total_tokens + usage.completion_tokens,
            completion_tokens_details=msgspec.structs.replace(
                ours,
                audio_tokens=ours.audio_tokens + theirs.audio_tokens,
                text_tokens=ours.text_tokens + theirs.text_tokens,
            ),
        )
    return first
