"""The request and the response of POST /v1/completions as types. Source: openai 3.57 types."""

from functools import cached_property
from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Discriminator, Field, Tag

from fleet.core.errors import UnsupportedValue
from fleet.processing import PlainPrompt, TextPart
from web.schema.chat import AnswerOptions, parse_json
from web.schema.fields.completion import COMPLETION
from web.schema.fields.table import Given
from web.schema.responses import Usage

MAX_PROMPTS = 4
DEFAULT_MAX_TOKENS = 16
"""Length of an answer if the request sets none, as in OpenAI's API."""

TokenIds = list[int]


def _prompt_tag(value: object) -> str:
    if not isinstance(value, list):
        return ":string"
    first: object = value[0] if value else ""
    if isinstance(first, int):
        return ":tokens"
    return ":token_lists" if isinstance(first, list) else ":list"


Prompts = Annotated[
    Annotated[str, Tag(":string")]
    | Annotated[
        list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag(":list")
    ]
    | Annotated[TokenIds, Field(fail_fast=True), Tag(":tokens")]
    | Annotated[
        list[Annotated[TokenIds, Field(fail_fast=True)]],
        Field(max_length=MAX_PROMPTS, fail_fast=True),
        Tag(":token_lists"),
    ],
    Discriminator(_prompt_tag),
]


class CompletionBody(AnswerOptions):
    """Body of POST /v1/completions. `prompt` is a text, token ids, or up to `MAX_PROMPTS` of
    either.
    """

    prompt: Prompts

    @property
    def length_limit(self) -> tuple[str, int | None]:
        return "max_tokens", DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @cached_property
    def ignored(self) -> tuple[Given, ...]:
        """The fields that have a value but no effect."""
        return tuple(COMPLETION.ignored(self))

    def prompts(self) -> list[tuple[str, PlainPrompt]]:
        """Return the prompts, each after the name of its field, such as `prompt[0]`."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [("prompt", TextPart(text=prompt, where="prompt"))]
        if isinstance(prompt[0], int):
            return [("prompt", tuple(id for id in prompt if isinstance(id, int)))]
        listed: list[tuple[str, PlainPrompt]] = []
        for index, each in enumerate(prompt):
            where = f"prompt[{index}]"
            if isinstance(each, str):
                listed.append((where, TextPart(text=each, where=where)))
            elif isinstance(each, list):
                listed.append((where, tuple(each)))
        return listed


def parse_completion(raw: bytes) -> CompletionBody:
    """Parse and validate the body of a completion.

    Raises: BadInput, InputTooLarge, UnsupportedValue naming the field.
    """
    body = parse_json(CompletionBody, raw)
    COMPLETION.check(body)
    refuse_event_ids(body)
    _ = body.ignored, body.rule  # found here, in the thread of a large body
    return body


def refuse_event_ids(body: AnswerOptions) -> None:
    """Check that the events of a stream need no ids, which only the events of a chat have. Raises:
    UnsupportedValue.
    """
    if body.stream_options is not None and body.stream_options.include_event_ids:
        where = "stream_options.include_event_ids"
        reason = "only the stream of a chat can be resumed; remove it, or use /v1/chat/completions"
        raise UnsupportedValue(f"{where}: {reason}", param=where)


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one prompt, or the next text of it. `index`: number of the prompt."""

    index: int
    text: str
    logprobs: None = None
    finish_reason: str | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A completion, or an event of a streamed one."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None | UnsetType = UNSET
