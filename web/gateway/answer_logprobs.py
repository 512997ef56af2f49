"""Log probabilities of an answer's tokens, each sent with the first of its text. Knows no HTTP."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fleet.core.chunk import LOGPROBS, TOP_IDS, Chunk


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of one token of an answer. `top`: ids and log probabilities of the most
    likely tokens at the same place. `begin`: number of characters of the answer before the text of
    the token; a token without text has the place of the next token with text.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    begin: int


Told = tuple[float, tuple[tuple[int, float], ...]]
"""Log probability of a token, and (id, log probability) of the most likely tokens at its place."""


class AnswerLogprobs:
    """Queue of log probabilities, each of which is taken out when the first character of its token
    is sent. A token without text waits for the next token with text. Tokens whose text a stop
    string cuts off are never taken.
    """

    def __init__(self) -> None:
        self._waiting: deque[TokenLogprob] = deque()
        self._num_chars = self._num_sent = 0

    def told(self, chunk: Chunk, num_tokens: int) -> list[Told | None]:
        """Return the log probabilities of a chunk's `num_tokens` tokens, in order; None for tokens
        that were not sampled, which come first.
        """
        if LOGPROBS not in chunk.tensors:
            return [None] * num_tokens
        values, ids = _rows(chunk, LOGPROBS, "<f4"), _rows(chunk, TOP_IDS, "<i4")
        sampled = [
            (row[0], tuple(zip(map(int, top), row[1:], strict=True)))
            for row, top in zip(values, ids, strict=True)
        ]
        return [*[None] * (num_tokens - len(sampled)), *sampled]

    def put(self, token: int, told: Told | None, num_chars: int) -> None:
        """Add the answer's next token, which added `num_chars` characters to the text. A token
        whose `told` is None only advances the position.
        """
        if told is not None:
            self._waiting.append(TokenLogprob(token, *told, begin=self._num_chars))
        self._num_chars += num_chars

    def take(self, num_chars: int) -> tuple[TokenLogprob, ...]:
        """Remove and return the tokens that begin in the next `num_chars` characters to be sent."""
        self._num_sent += num_chars
        taken: list[TokenLogprob] = []
        while self._waiting and self._waiting[0].begin < self._num_sent:
            taken.append(self._waiting.popleft())
        return tuple(taken)


def _rows(chunk: Chunk, name: str, dtype: str) -> Sequence[list[float]]:
    tensor = chunk.tensors[name]
    return np.frombuffer(tensor.data or b"", dtype).reshape(tensor.shape).tolist()
