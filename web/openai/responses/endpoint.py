"""POST /v1/responses: an answer in text, streamed or whole, to a message or to a conversation that
the server has stored. Knows no stage.
"""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from msgspec import UNSET
from msgspec.structs import replace
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from fleet.core.errors import FleetError
from fleet.core.ids import REQUEST, RESPONSE, RequestId, shown_id
from fleet.core.request import RequestSpec, Sampling
from web.gateway.answer import AnswerStream
from web.gateway.gateway import Gateway
from web.gateway.ignored_fields import IgnoredFieldLog, warning_of
from web.gateway.messages import MAX_INLINE_PARTS
from web.gateway.prepared_chat import ActiveRequest
from web.gateway.stored_body import stored_body
from web.gateway.tool_requests import WARNED_FIELD, ignored_tools
from web.http.body import body_memory_of, read_body
from web.http.disconnect import until_disconnect
from web.http.guard import owner_of
from web.http.json_response import json_response
from web.http.middleware import request_id_of
from web.http.offload import parse_body, read_input
from web.http.sse import send_stream
from web.openai.responses.conversation import ResponseTurn, begin_turn, save_response
from web.openai.responses.events import ResponseEvents
from web.openai.responses.output import OutputItems
from web.openai.responses.tool_views import shown_tools
from web.schema.response_body import TextResponseBody, parse_response
from web.schema.response_items import num_parts
from web.schema.response_object import (
    FormatView,
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseFailure,
    ResponseObject,
    ResponseUsage,
    TextView,
)


class ResponseEndpoint:
    """`POST /v1/responses`. A raw ASGI app, so that a client disconnect cancels the request at any
    point.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._ignored_log = IgnoredFieldLog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = await read_body(Request(scope, receive), self._gateway.config.limits.max_body_bytes)
        body = await parse_body(parse_response, raw)
        del raw
        await until_disconnect(receive, self._answer(body, scope, receive, send))

    async def _answer(
        self, body: TextResponseBody, scope: Scope, receive: Receive, send: Send
    ) -> None:
        gateway, request_id = self._gateway, request_id_of(scope)
        gateway.check_model(body.model)
        suffix = request_id.removeprefix(REQUEST)
        turn = await begin_turn(gateway, body, owner_of(scope), suffix)
        active = await self._submit(body, turn, request_id)
        async with active.answer as answer:
            ignored = ignored_tools(answer.spec)
            headers = active.chat.headers(
                sorted([*(given.where for given in body.ignored), *ignored])
            )
            warned = [name for name in ignored if name == WARNED_FIELD]
            self._ignored_log.note(request_id, warned)
            began = self._began(body, turn, answer.spec, [warning_of(name) for name in warned])
            reply = ResponseReply(gateway=gateway, turn=turn, began=began, suffix=suffix)
            is_streamed = body.stream
            del body
            if not turn.is_stored:
                body_memory_of(scope).free()
            if is_streamed:
                await send_stream(send, headers, reply.events(answer))
            else:
                response = json_response(await reply.whole(answer), headers=headers)
                await response(scope, receive, send)

    async def _submit(
        self, body: TextResponseBody, turn: ResponseTurn, request_id: RequestId
    ) -> ActiveRequest:
        is_large = num_parts([*turn.earlier, *turn.items]) > MAX_INLINE_PARTS
        messages = await read_input(is_large, turn.messages, body)
        stored = await read_input(is_large, stored_body, body)
        chat = await self._gateway.prepare_chat(
            body, messages, request_id, stored=stored, where="input"
        )
        if turn.first_id and body.prompt_cache_key is None:
            chat = chat.in_conversation(turn.first_id)
        return await self._gateway.submit_prepared(chat)

    def _began(
        self, body: TextResponseBody, turn: ResponseTurn, spec: RequestSpec, warnings: list[str]
    ) -> ResponseObject:
        """Return the response as it is before its answer, without output. `warnings`: warnings
        about ignored fields.
        """
        main = spec.sampling.get(self._gateway.graph.main_stage.name, Sampling())
        return ResponseObject(
            id=shown_id(spec.id, RESPONSE),
            created_at=spec.created_us // 1_000_000,
            instructions=body.instructions,
            max_output_tokens=body.length_limit[1],
            model=self._gateway.model,
            previous_response_id=body.previous_response_id,
            prompt_cache_key=body.prompt_cache_key,
            store=turn.is_stored,
            temperature=main.temperature,
            top_p=main.top_p,
            text=TextView(format=_format_view(body)),
            metadata=body.metadata or {},
            warnings=[*warnings, *turn.warnings] or UNSET,
            **shown_tools(body, self._gateway.call_format),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseReply:
    """Writer of the answer to one request as a response, which is stored when the answer has ended.
    `suffix`: end of the ids of the output items.
    """

    gateway: Gateway
    turn: ResponseTurn
    began: ResponseObject
    suffix: str

    async def whole(self, answer: AnswerStream) -> ResponseObject:
        """Return the response once it is complete and stored. Raises: FleetError if it fails."""
        output = OutputItems(self.suffix)
        async for piece in answer.pieces():
            output.add(piece)
        return await self._end(answer, output)

    async def events(self, answer: AnswerStream) -> AsyncIterator[bytes]:
        """Yield the events of the stream, and store the response at its end. A failure becomes a
        `response.failed` event; a failed response is not stored.
        """
        output = OutputItems(self.suffix)
        events = ResponseEvents(output)
        yield events.lifecycle(self.began, "created") + events.lifecycle(self.began)
        try:
            async for piece in answer.pieces():
                if lines := events.add(piece):
                    yield lines
            response = await self._end(answer, output)
        except FleetError as error:
            failure = ResponseFailure(message=f"{error.code}: {error.message}")
            yield events.lifecycle(replace(self.began, status="failed", error=failure, store=False))
            return
        yield events.finish(is_cut=_is_cut(answer)) + events.lifecycle(response)

    async def _end(self, answer: AnswerStream, output: OutputItems) -> ResponseObject:
        is_cut = _is_cut(answer)
        response = replace(
            self.began,
            status="incomplete" if is_cut else "completed",
            completed_at=None if is_cut else int(time.time()),
            incomplete_details=IncompleteDetails() if is_cut else None,
            output=output.items(is_cut=is_cut),
            usage=_usage(answer),
        )
        await save_response(self.gateway, self.turn, response)
        return response


def _is_cut(answer: AnswerStream) -> bool:
    return answer.finish_reason == "length"


def _usage(answer: AnswerStream) -> ResponseUsage:
    counts = answer.usage()
    prompt = counts.prompt_tokens_details
    return ResponseUsage(
        input_tokens=counts.prompt_tokens,
        input_tokens_details=InputTokensDetails(
            cached_tokens=prompt.cached_tokens,
            audio_tokens=prompt.audio_tokens,
            text_tokens=prompt.text_tokens,
        ),
        output_tokens=counts.completion_tokens,
        output_tokens_details=OutputTokensDetails(),
        total_tokens=counts.total_tokens,
    )


def _format_view(body: TextResponseBody) -> FormatView:
    """Return the form of the answer as clients read it back."""
    chosen = body.text.format if body.text is not None else None
    if chosen is None or chosen.type != "json_schema":
        return FormatView(type=chosen.type if chosen is not None else "text")
    return FormatView(
        type=chosen.type,
        name=chosen.name or "schema",
        description=chosen.description,
        strict=chosen.strict,
        schema=chosen.schema_,
    )
