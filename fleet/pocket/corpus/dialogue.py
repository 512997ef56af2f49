"""The nouns of the corpus: turns, dialogues, the split they belong to, and when an answer is right."""

from dataclasses import dataclass
from typing import Literal

from fleet.pocket.corpus.text import spoken

Role = Literal["user", "assistant"]
Split = Literal["train", "held_out"]
Drawn = Literal["train", "invented", "held_out"]
"""`invented` is the training split, where half of the values that any word can be are words that do not exist: what can only be
copied is learnt by copying, not by heart.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    role: Role
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """Turns of the user and the assistant in alternation, and the family that its last question is from.

    Invariants: the user begins, the assistant ends; every text is spoken text.
    """

    turns: tuple[Turn, ...]
    family: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A question and its answer. `is_new_answer`: held out, and no answer of the training split."""

    question: str
    answer: str
    is_new_answer: bool


def is_right(dialogue: Dialogue, answer: str) -> bool:
    """Whether `answer`, in any case and punctuation, is word for word what the last turn of `dialogue` says.

    Every question has exactly one answer, given what was said before it.
    """
    return spoken(answer) == dialogue.turns[-1].text
