"""Turns, exchanges and dialogues of the corpus, the splits they belong to, and the comparison of an answer with the right one."""

from dataclasses import dataclass
from typing import Literal

from fleet.pocket.corpus.text import spoken

DONT_KNOW = "i don't know that"

Role = Literal["user", "assistant"]
Split = Literal["train", "held_out"]
Drawn = Literal["train", "invented", "held_out"]
"""In `invented`, the training split with words that do not exist as half of the values that may be any word, values can only be
copied, not learnt by heart.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTurn:
    role: Role
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """Alternating turns of the user and the assistant, and the family of the last question.

    Invariants: the user begins, the assistant ends; every text is spoken text.
    """

    turns: tuple[ChatTurn, ...]
    family: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A question and its answer. `is_new_answer`: the answer is held out too."""

    question: str
    answer: str
    is_new_answer: bool


def is_right(dialogue: Dialogue, answer: str) -> bool:
    """Return True if `answer`, in any case and punctuation, equals the last turn of `dialogue` word for word.

    After its earlier turns every question has exactly one answer.
    """
    return spoken(answer) == dialogue.turns[-1].text
