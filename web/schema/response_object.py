"""The response of POST /v1/responses and the events of its stream, as types. Data only. Source:
openai 3.57 types.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from web.schema.response_items import CallItem, MessageItem, OutputText, ResponseItem


class IncompleteDetails(msgspec.Struct, frozen=True, kw_only=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a response failed. `code` is one of OpenAI's codes; the message begins with Fleet's own
    code.
    """

    code: Literal["server_error"] = "server_error"
    message: str


class InputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int = 0
    audio_tokens: int
    text_tokens: int


class OutputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class NoReasoning(msgspec.Struct, frozen=True, kw_only=True):
    effort: None = None
    summary: None = None


class FormatView(msgspec.Struct, frozen=True, kw_only=True):
    """Form of an answer as its request set it."""

    type: str = "text"
    name: str | UnsetType = UNSET
    description: str | None | UnsetType = UNSET
    strict: bool | None | UnsetType = UNSET
    schema: Any | UnsetType = UNSET


class TextView(msgspec.Struct, frozen=True, kw_only=True):
    format: FormatView
    verbosity: str = "medium"


class ToolView(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the answer could call. `parameters`: JSON schema of its arguments."""

    type: Literal["function"] = "function"
    name: str
    description: str | None
    parameters: Mapping[str, Any] | None
    strict: bool


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    """A response. Fields of features that are not served have the values that mean "not used".

    `store` is False if the response is not stored. `warnings` is about ignored fields of the
    request, and a conversation that is too long to be stored.
    """

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    completed_at: int | None = None
    background: bool = False
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    model: str
    output: list[MessageItem | CallItem] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: NoReasoning = NoReasoning()
    safety_identifier: None = None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: TextView
    tool_choice: str | Mapping[str, Any] = "auto"
    tools: list[ToolView] = []
    top_logprobs: int = 0
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: None = None
    metadata: dict[str, str]
    warnings: list[str] | UnsetType = UNSET


class ResponseDeleted(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ItemList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of a response's input items."""

    object: Literal["list"] = "list"
    data: list[ResponseItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class LifecycleEvent(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    sequence_number: int
    response: ResponseObject


class ItemEvent(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    sequence_number: int
    output_index: int
    item: MessageItem | CallItem


class ContentEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Event about the text of the answer, with one of `part`, `delta` and `text`; events with
    `delta` or `text` have `logprobs` too.
    """

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[str] | UnsetType = UNSET


class ArgumentsEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Event about the arguments of a call: a `delta`, or the whole `arguments`."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    delta: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
