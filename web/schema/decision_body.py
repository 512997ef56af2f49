"""The request of POST /v1/decisions as types, and its validation. Source: openai 3.57 types."""

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from fleet.core.errors import BadInput
from web.schema.body import Body
from web.schema.chat import MAX_NAME_CHARS, CacheKey, list_tag, parse_json
from web.schema.fields.decision import DECISION
from web.schema.fields.table import Given
from web.schema.response_body import (
    InputCall,
    InputCallOutput,
    InputTextPart,
    OutputTextPart,
    check_item_fields,
    item_tag,
)
from web.schema.response_items import InputText, ItemPart, MessageItem, OutputText
from web.schema.unserved import check_decision_part, check_item

MAX_QUESTIONS = 400
MAX_OPTIONS = 255


class InputJsonPart(Body):
    type: Literal["input_json"]
    data: dict[str, Any] | list[dict[str, Any]]

    @property
    def text(self) -> str:
        return json.dumps(self.data, ensure_ascii=False)


EvidencePart = Annotated[
    InputTextPart | OutputTextPart | InputJsonPart,
    Field(discriminator="type"),
    BeforeValidator(check_decision_part),
]
QuestionPart = Annotated[
    InputTextPart | InputJsonPart,
    Field(discriminator="type"),
    BeforeValidator(check_decision_part),
]


class EvidenceMessage(Body):
    """A message of the input; `type` may be left out."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[
        Annotated[str, Tag(":string")]
        | Annotated[list[EvidencePart], Field(min_length=1, fail_fast=True), Tag(":list")],
        Discriminator(list_tag),
    ]

    def item(self, suffix: str) -> MessageItem:
        """Return the message as an item of a conversation. `suffix`: end of its id."""
        given = self.content
        texts = [given] if isinstance(given, str) else [part.text for part in given]
        return MessageItem(id=f"msg_{suffix}", role=self.role, content=list(self._parts(texts)))

    def _parts(self, texts: Sequence[str]) -> Iterator[ItemPart]:
        for text in texts:
            yield OutputText(text=text) if self.role == "assistant" else InputText(text=text)


EvidenceItem = EvidenceMessage | InputCall | InputCallOutput


class QuestionBody(Body):
    """Fields that all questions have. `name`: optional name, which is repeated in the answer."""

    name: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None
    instructions: Annotated[
        Annotated[str, Field(min_length=1), Tag(":string")]
        | Annotated[list[QuestionPart], Field(min_length=1, fail_fast=True), Tag(":list")],
        Discriminator(list_tag),
    ]

    @property
    def text(self) -> str:
        """The instructions as one text."""
        given = self.instructions
        return given if isinstance(given, str) else "\n".join(part.text for part in given)


class PredicateQuestion(QuestionBody):
    """A statement about the input, which is true or false."""

    type: Literal["predicate"]


class ChoiceOption(Body):
    value: Annotated[str, Field(min_length=1)] | bool
    description: str | None = None


class ChoiceQuestion(QuestionBody):
    type: Literal["choice"]
    choices: Annotated[
        list[ChoiceOption], Field(min_length=2, max_length=MAX_OPTIONS, fail_fast=True)
    ]


class ScoreLevel(Body):
    label: Annotated[str, Field(min_length=1)]
    description: str | None = None


class ScoreQuestion(QuestionBody):
    """A rating of the input by levels, from the lowest to the highest."""

    type: Literal["score"]
    levels: Annotated[list[ScoreLevel], Field(min_length=2, max_length=MAX_OPTIONS, fail_fast=True)]


AnyQuestion = PredicateQuestion | ChoiceQuestion | ScoreQuestion


class DecisionBody(Body):
    """Body of POST /v1/decisions: questions about one input."""

    model: str
    input: Annotated[
        Annotated[str, Field(min_length=1), Tag(":string")]
        | Annotated[
            list[
                Annotated[
                    Annotated[EvidenceMessage, Tag(":message")]
                    | Annotated[InputCall, Tag(":function_call")]
                    | Annotated[InputCallOutput, Tag(":function_call_output")],
                    Discriminator(item_tag),
                    BeforeValidator(check_item),
                ]
            ],
            Field(min_length=1, fail_fast=True),
            Tag(":list"),
        ],
        Discriminator(list_tag),
    ]
    questions: Annotated[
        list[Annotated[AnyQuestion, Field(discriminator="type")]],
        Field(min_length=1, max_length=MAX_QUESTIONS, fail_fast=True),
    ]
    prompt_cache_key: CacheKey | None = None

    @cached_property
    def ignored(self) -> tuple[Given, ...]:
        """The fields that have a value but no effect."""
        return tuple(DECISION.ignored(self))

    @property
    def items(self) -> Sequence[EvidenceItem]:
        if isinstance(self.input, str):
            return [EvidenceMessage(role="user", content=self.input)]
        return self.input


def parse_decision(raw: bytes) -> DecisionBody:
    """Parse and validate the body of a decision.

    Raises: BadInput, InputTooLarge, UnsupportedValue naming the field.
    """
    body = parse_json(DecisionBody, raw)
    DECISION.check(body)
    for index, item in enumerate(body.items):
        check_item_fields(item, f"input[{index}]")
    for index, question in enumerate(body.questions):
        _check_question(question, f"questions[{index}]")
    _ = body.ignored  # found here, in the thread of a large body
    return body


def _check_question(question: AnyQuestion, where: str) -> None:
    """Check that no choice appears twice, and that a question has no fields of other types of
    questions. Raises: BadInput naming the field.
    """
    for name in ("choices", "levels"):
        if (question.model_extra or {}).get(name) is not None:
            at = f"{where}.{name}"
            raise BadInput(f"{at}: a {question.type} has no such field; remove it", param=at)
    seen: set[tuple[type, object]] = set()
    for index, choice in enumerate(question.choices if question.type == "choice" else ()):
        if (type(choice.value), choice.value) in seen:
            at = f"{where}.choices[{index}].value"
            raise BadInput(f"{at}: there is such a choice already; remove one", param=at)
        seen.add((type(choice.value), choice.value))
