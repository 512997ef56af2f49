"""The answer of POST /v1/decisions as types. Data only. Source: openai 3.57 types."""

import msgspec

from web.schema.response_object import ResponseUsage


class PredicateAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="predicate"):
    """`probability`: how probable it is that the statement is true."""

    name: str | None
    probability: float


class ChoiceProbability(msgspec.Struct, frozen=True, kw_only=True):
    value: str | bool
    probability: float


class ChoiceAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="choice"):
    """`choice`: value of the most probable choice. `confidence`: probability of that choice."""

    name: str | None
    choice: str | bool
    confidence: float
    probabilities: list[ChoiceProbability]


class ScoreProbability(msgspec.Struct, frozen=True, kw_only=True):
    """`value`: index of the level, from 0 for the lowest."""

    value: int
    label: str
    probability: float


class ScoreAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="score"):
    """`score`: expected value of the level's index. `confidence`: probability of the most probable
    level.
    """

    name: str | None
    score: float
    confidence: float
    probabilities: list[ScoreProbability]


DecisionAnswer = PredicateAnswer | ChoiceAnswer | ScoreAnswer


class DecisionObject(msgspec.Struct, frozen=True, kw_only=True):
    """The answers to the questions, in their order."""

    model: str
    answers: list[DecisionAnswer]
    usage: ResponseUsage
