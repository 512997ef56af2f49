"""Labels that stand for the options of a question: short texts that the model writes as one token,
so that one pass gives the probabilities of all options. Knows no route.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import exp, log
from string import ascii_uppercase
from typing import NamedTuple

from fleet.core.errors import BadInput
from fleet.processing import Frontend

_WHERE = "questions"


class OptionLabel(NamedTuple):
    """Label of an option. `ids`: the tokens that stand for the label, with and without a space
    before it.
    """

    text: str
    ids: tuple[int, ...]


class OptionLabels:
    """The labels that a model's tokenizer allows."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        letters = (
            "".join(pair) for size in (1, 2) for pair in product(ascii_uppercase, repeat=size)
        )
        self._left = self._labels(letters)
        self._letters: list[OptionLabel] = []
        words = list(self._labels(("Yes", "No")))
        self.yes_and_no = words if len(words) == 2 else self.letters(2)
        """Labels for a true and for a false statement: Yes and No, or A and B if the tokenizer has
        no single tokens for Yes and No.
        """

    def letters(self, num: int) -> list[OptionLabel]:
        """Return `num` labels: A, B, ..., then pairs of letters; fewer if the tokenizer has no
        single tokens for the others.
        """
        while len(self._letters) < num and (label := next(self._left, None)) is not None:
            self._letters.append(label)
        return self._letters[:num]

    def _labels(self, texts: Iterable[str]) -> Iterator[OptionLabel]:
        used: set[int] = set()
        for text in texts:
            ids = {each[0] for each in self._ways(text) if len(each) == 1} - used
            if ids:
                used |= ids
                yield OptionLabel(text, tuple(sorted(ids)))

    def _ways(self, text: str) -> Sequence[Sequence[int]]:
        try:
            return self._frontend.word_ids([text], _WHERE)
        except BadInput:
            return ()  # a vocabulary without this letter


def probabilities(labels: Sequence[OptionLabel], logprobs: dict[int, float]) -> list[float]:
    """Return the probability of each label, given that the answer is a label. `logprobs`: log
    probability of every token of the labels.
    """
    scores = [_log_sum([logprobs[token] for token in label.ids]) for label in labels]
    whole = _log_sum(scores)
    return [exp(score - whole) for score in scores]


def _log_sum(values: Sequence[float]) -> float:
    most = max(values)
    return most + log(sum(exp(value - most) for value in values))
