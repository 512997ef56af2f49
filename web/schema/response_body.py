"""The request of POST /v1/responses as types, and its validation. Source: openai 3.57 types."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from fleet.core.errors import SHOWN_CHARS, BadInput, UnsupportedValue
from web.http.json_bounds import max_keys
from web.schema.answer_rules import AnswerRule, format_rules
from web.schema.body import Body
from web.schema.chat import (
    MAX_NAME_CHARS,
    AnswerOptions,
    InputAudio,
    MaxTokens,
    list_tag,
    parse_json,
)
from web.schema.completion import refuse_event_ids
from web.schema.fields.response import LOGPROBS, RESPONSE
from web.schema.fields.table import Given, is_neutral
from web.schema.response_items import (
    AudioData,
    CallItem,
    CallOutputItem,
    InputSound,
    InputText,
    ItemStatus,
    MessageItem,
    OutputText,
)
from web.schema.tools import ToolFields
from web.schema.unserved import check_format, check_item, check_item_part, check_output_part

MAX_METADATA = 16
INCLUDABLE = (
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
)
"""Values of `include` that name parts of items which no response here has."""

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    max_keys(MAX_METADATA),
]


class InputTextPart(Body):
    type: Literal["input_text"]
    text: str


class OutputTextPart(Body):
    type: Literal["output_text"]
    text: str


class InputAudioItemPart(Body):
    type: Literal["input_audio"]
    input_audio: InputAudio


PartBody = Annotated[
    InputTextPart | OutputTextPart | InputAudioItemPart,
    Field(discriminator="type"),
    BeforeValidator(check_item_part),
]


class InputMessage(Body):
    """A message of the input; `type` may be left out."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[
        Annotated[str, Tag(":string")]
        | Annotated[list[PartBody], Field(min_length=1, fail_fast=True), Tag(":list")],
        Discriminator(list_tag),
    ]

    def item(self, suffix: str) -> MessageItem:
        """Return the message as it is stored and listed. `suffix`: end of its id."""
        parts = [self.content] if isinstance(self.content, str) else self.content
        content = [self._part(part) for part in parts]
        return MessageItem(id=f"msg_{suffix}", role=self.role, content=content)

    def _part(self, part: str | PartBody) -> InputText | OutputText | InputSound:
        if isinstance(part, InputAudioItemPart):
            sound = part.input_audio
            return InputSound(input_audio=AudioData(data=sound.data, format=sound.format))
        text = part if isinstance(part, str) else part.text
        return OutputText(text=text) if self.role == "assistant" else InputText(text=text)


CallId = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]


class InputCall(Body):
    """A function call of an earlier answer. `arguments`: JSON text, as the model wrote it."""

    type: Literal["function_call"]
    call_id: CallId
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
    arguments: str
    status: ItemStatus | None = None

    def item(self, suffix: str) -> CallItem:
        """Return the call as it is stored and listed. `suffix`: end of its id."""
        status = "completed" if self.status in (None, "completed") else "incomplete"
        return CallItem(
            id=f"fc_{suffix}",
            call_id=self.call_id,
            name=self.name,
            arguments=self.arguments,
            status=status,
        )


class InputCallOutput(Body):
    """The output of a function call. `name` is not used, since the call with the id `call_id` names
    the function.
    """

    type: Literal["function_call_output"]
    call_id: CallId
    output: Annotated[
        Annotated[str, Tag(":string")]
        | Annotated[
            list[Annotated[InputTextPart, BeforeValidator(check_output_part)]],
            Field(min_length=1, fail_fast=True),
            Tag(":list"),
        ],
        Discriminator(list_tag),
    ]
    name: str | None = None

    def item(self, suffix: str) -> CallOutputItem:
        """Return the output as it is stored and listed. `suffix`: end of its id."""
        given = self.output
        output = given if isinstance(given, str) else [InputText(text=part.text) for part in given]
        return CallOutputItem(id=f"fco_{suffix}", call_id=self.call_id, output=output)


InputItem = InputMessage | InputCall | InputCallOutput
_ITEM_FIELDS = ("role", "content", "name", "call_id", "arguments", "output")
"""Fields that only some types of items have; an item of another type is refused if it sets one."""


def item_tag(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f":{kind}" if kind in ("function_call", "function_call_output") else ":message"


AnyInputItem = Annotated[
    Annotated[InputMessage, Tag(":message")]
    | Annotated[InputCall, Tag(":function_call")]
    | Annotated[InputCallOutput, Tag(":function_call_output")],
    Discriminator(item_tag),
    BeforeValidator(check_item),
]


class TextFormat(Body):
    """Form of the answer: free text, any JSON object, or JSON of a schema. Every answer conforms to
    its schema, whether `strict` is set or not.
    """

    type: Annotated[Literal["text", "json_object", "json_schema"], BeforeValidator(check_format)]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | str | None = Field(default=None, alias="schema")


class TextOptions(Body):
    format: TextFormat | None = None


class TextResponseBody(AnswerOptions, ToolFields):
    """Body of POST /v1/responses. If `store` is false, nothing of the response is kept."""

    input: Annotated[
        Annotated[str, Field(min_length=1), Tag(":string")]
        | Annotated[list[AnyInputItem], Field(min_length=1, fail_fast=True), Tag(":list")],
        Discriminator(list_tag),
    ]
    instructions: str | None = None
    max_output_tokens: MaxTokens | None = None
    metadata: Metadata | None = None
    previous_response_id: str | None = None
    text: TextOptions | None = None
    include: Annotated[list[str], Field(max_length=64, fail_fast=True)] | None = None

    @property
    def length_limit(self) -> tuple[str, int | None]:
        if self.max_output_tokens is not None:
            return "max_output_tokens", self.max_output_tokens
        return "max_tokens", self.max_tokens

    @cached_property
    def ignored(self) -> tuple[Given, ...]:
        """The fields that have a value but no effect."""
        return tuple(RESPONSE.ignored(self))

    @property
    def items(self) -> Sequence[InputItem]:
        if isinstance(self.input, str):
            return [InputMessage(role="user", content=self.input)]
        return self.input

    def _rules(self) -> Iterator[AnswerRule]:
        yield from super()._rules()
        if self.text is not None and (chosen := self.text.format) is not None:
            where = "text.format"
            yield from format_rules(chosen.type, chosen.schema_, where, f"{where}.schema")


def parse_response(raw: bytes) -> TextResponseBody:
    """Parse and validate the body of a response.

    Raises: BadInput, InputTooLarge, UnsupportedValue naming the field.
    """
    body = parse_json(TextResponseBody, raw)
    RESPONSE.check(body)
    refuse_event_ids(body)
    body.check_length_limit()
    for index, item in enumerate(body.items):
        check_item_fields(item, f"input[{index}]")
    for index, name in enumerate(body.include or ()):
        if name not in INCLUDABLE:
            where, shown = f"include[{index}]", name[:SHOWN_CHARS]
            reason = LOGPROBS if "logprobs" in name else f"no response has {shown!r}; remove it"
            raise UnsupportedValue(f"{where}: {reason}", param=where)
    _ = body.ignored, body.rule  # found here, in the thread of a large body
    return body


def check_item_fields(item: Body, where: str) -> None:
    """Check that an item has no field of other items. Raises: BadInput naming the field."""
    extra = item.model_extra or {}
    for name in _ITEM_FIELDS:
        if name in extra and not is_neutral(extra[name]):
            reason = "items of this type have no such field; remove it"
            raise BadInput(f"{where}.{name}: {reason}", param=f"{where}.{name}")
