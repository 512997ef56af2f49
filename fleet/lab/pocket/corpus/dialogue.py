"""Data types of the corpus (turns, exchanges, dialogues and their splits), and the comparison of an
answer with the right one.
"""

from dataclasses import dataclass
from typing import Literal

from fleet.lab.pocket.corpus.text import spoken

DONT_KNOW = "i don't know that"

Role = Literal["user", "assistant"]
Split = Literal["train", "held_out"]
Drawn = Literal["train", "invented", "held_out"]
"""Split from which dialogues are generated. `invented` is the training split in which half of the
freely chosen words are replaced by non-words, so that the model has to copy values instead of
memorizing them.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTurn:
    role: Role
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """A dialogue: alternating turns of the user and the assistant. `family`: kind of the last
    question, such as `sums` or `memory`.

    Invariants: the first turn is the user's, the last the assistant's; every text is normalized by
    `spoken`.
    """

    turns: tuple[ChatTurn, ...]
    family: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A question and its answer. `is_new_answer`: True if the answer, like the question, occurs
    nowhere in the training split.
    """

    question: str
    answer: str
    is_new_answer: bool


def is_right(dialogue: Dialogue, answer: str) -> bool:
    """Return True if `answer`, regardless of case and punctuation, equals the last turn of
    `dialogue` word for word.

    Given its earlier turns, every question has exactly one right answer.
    """
    return spoken(answer) == dialogue.turns[-1].text
