"""POST /v1/completions: the text that follows a prompt without a chat template. Several prompts
become several requests, which are answered together. Knows no stage.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import reduce

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from fleet.core.errors import FleetError
from fleet.core.ids import TEXT_COMPLETION, RequestId, new_request_id, shown_id
from web.gateway.answer import AnswerStream, TextPiece
from web.gateway.gateway import Gateway
from web.gateway.prepared_chat import ActiveRequest
from web.gateway.sampling import request_seed
from web.gateway.stored_body import stored_body
from web.http.body import body_memory_of, read_body
from web.http.disconnect import until_disconnect
from web.http.errors import envelope_of
from web.http.json_response import json_response
from web.http.middleware import request_id_of
from web.http.offload import parse_body
from web.http.sse import event, send_stream
from web.schema.completion import Completion, CompletionBody, CompletionChoice, parse_completion
from web.schema.responses import CompletionDetails, PromptDetails, Usage


class CompletionEndpoint:
    """`POST /v1/completions`. A raw ASGI app, so that a client disconnect cancels all requests."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = await read_body(Request(scope, receive), self._gateway.config.limits.max_body_bytes)
        body = await parse_body(parse_completion, raw)
        await until_disconnect(receive, self._answer(body, scope, receive, send))

    async def _answer(
        self, body: CompletionBody, scope: Scope, receive: Receive, send: Send
    ) -> None:
        async with AsyncExitStack() as answers:
            active = await self._submit(body, request_id_of(scope), answers)
            headers = active[0].chat.headers(sorted(given.where for given in body.ignored))
            reply = CompletionReply(active, self._gateway.model)
            is_streamed = body.stream
            wants_usage = bool(body.stream_options and body.stream_options.include_usage)
            del body
            body_memory_of(scope).free()
            if is_streamed:
                await send_stream(send, headers, reply.events(wants_usage=wants_usage))
            else:
                response = json_response(await reply.whole(), headers=headers)
                await response(scope, receive, send)

    async def _submit(
        self, body: CompletionBody, request_id: RequestId, answers: AsyncExitStack
    ) -> list[ActiveRequest]:
        """Check and submit the request of each prompt; all requests have the same seed. Closing the
        stack `answers` aborts the requests.

        Raises: the errors of `Gateway.prepare_chat` and `Gateway.submit_prepared`.
        """
        self._gateway.check_model(body.model)
        stored = stored_body(body)
        body = body.model_copy(update={"seed": request_seed(body)})
        ids = [request_id, *(new_request_id() for _ in body.prompts()[1:])]
        chats = [
            await self._gateway.prepare_chat(
                body, (), one, stored=stored, where=where, plain=prompt
            )
            for one, (where, prompt) in zip(ids, body.prompts(), strict=True)
        ]
        active: list[ActiveRequest] = []
        for chat in chats:
            active.append(await self._gateway.submit_prepared(chat))
            await answers.enter_async_context(active[-1].answer)
        return active


@dataclass(frozen=True, slots=True)
class CompletionReply:
    """The answers to the prompts of one completion, in OpenAI's shapes."""

    active: Sequence[ActiveRequest]
    model: str

    async def whole(self) -> Completion:
        """Return the completion once all answers are complete. Raises: FleetError if one fails."""
        texts = [""] * len(self.active)
        async for index, text in merged([_texts(one.answer) for one in self.active]):
            texts[index] += text
        choices = [
            CompletionChoice(index=index, text=text, finish_reason=one.answer.finish_reason)
            for index, (one, text) in enumerate(zip(self.active, texts, strict=True))
        ]
        return self._completion(choices, self.usage())

    async def events(self, *, wants_usage: bool) -> AsyncIterator[bytes]:
        """Yield the server-sent events. A failure becomes an error event, without [DONE]."""
        no_usage = None if wants_usage else UNSET
        try:
            async for index, text in merged([_texts(one.answer) for one in self.active]):
                choice = CompletionChoice(index=index, text=text)
                yield event(self._completion([choice], no_usage))
        except FleetError as error:
            yield event(envelope_of(error))
            return
        for index, one in enumerate(self.active):
            end = CompletionChoice(index=index, text="", finish_reason=one.answer.finish_reason)
            yield event(self._completion([end], no_usage))
        if wants_usage:
            yield event(self._completion([], self.usage()))
        yield b"data: [DONE]\n\n"

    def usage(self) -> Usage:
        """Return the token counts of all prompts and answers."""
        return reduce(_sum, (one.answer.usage() for one in self.active))

    def _completion(
        self, choices: list[CompletionChoice], usage: Usage | None | UnsetType
    ) -> Completion:
        spec = self.active[0].chat.spec
        return Completion(
            id=shown_id(spec.id, TEXT_COMPLETION),
            created=spec.created_us // 1_000_000,
            model=self.model,
            choices=choices,
            usage=usage,
        )


async def _texts(answer: AnswerStream) -> AsyncIterator[str]:
    async for piece in answer.pieces():
        if isinstance(piece, TextPiece):
            yield piece.text


async def merged(streams: Sequence[AsyncIterator[str]]) -> AsyncIterator[tuple[int, str]]:
    """Yield (stream number, item) for the items of all streams, as they arrive. Raises: the error
    of the first stream that fails; the other streams are cancelled.
    """
    steps = {asyncio.ensure_future(anext(one, None)): index for index, one in enumerate(streams)}
    try:
        while steps:
            done, _ = await asyncio.wait(steps, return_when=asyncio.FIRST_COMPLETED)
            items = [(steps.pop(step), step.result()) for step in done]
            for index, item in ((index, item) for index, item in items if item is not None):
                steps[asyncio.ensure_future(anext(streams[index], None))] = index
                yield index, item
    finally:
        for step in steps:
            step.cancel()
        if steps:
            await asyncio.wait(steps)


def _sum(first: Usage, second: Usage) -> Usage:
    prompt, other_prompt = first.prompt_tokens_details, second.prompt_tokens_details
    answer, other_answer = first.completion_tokens_details, second.completion_tokens_details
    return Usage(
        prompt_tokens=first.prompt_tokens + second.prompt_tokens,
        completion_tokens=first.completion_tokens + second.completion_tokens,
        total_tokens=first.total_tokens + second.total_tokens,
        prompt_tokens_details=PromptDetails(
            audio_tokens=0,
            text_tokens=prompt.text_tokens + other_prompt.text_tokens,
            cached_tokens=prompt.cached_tokens + other_prompt.cached_tokens,
        ),
        completion_tokens_details=CompletionDetails(
            audio_tokens=0, text_tokens=answer.text_tokens + other_answer.text_tokens
        ),
    )
