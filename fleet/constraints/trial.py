"""Trial of a rule for answers: it is compiled, and the beginning of an answer is kept to it, as a
worker would. Costs what it costs there, so run it in a process that can be ended.

Source: llguidance 1.9 (`LLMatcher`, `TokenizerWrapper`). Knows no tokenizer: the trial's tokens are
bytes, beside the control tokens that a grammar may name.
"""

from collections.abc import Sequence
from functools import lru_cache

import llguidance.numpy
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance._tokenizer import TokenizerWrapper

NUM_BYTES = 256
NUM_STEPS = 8
"""Number of tokens of the trial answer. A rule without an end fails at the first or second."""
CONTROL = "<|trial_end|>"


class RuleTokens:
    """Vocabulary of a trial. `num_ids`: size of the model's vocabulary, whose ids a grammar may
    refer to. `named`: control tokens that a grammar may name, each with its id.
    """

    bos_token_id = None

    def __init__(self, num_ids: int, named: Sequence[tuple[str, int]]) -> None:
        size = max([num_ids, *(number + 1 for _, number in named)]) + NUM_BYTES + 1
        self.tokens = [b""] * size
        for name, number in (*named, (CONTROL, size - 1)):
            self.tokens[number] = name.encode()
        self.special_token_ids = [*(number for _, number in named), size - 1]
        self.eos_token_id = size - 1
        self._first_byte = size - 1 - NUM_BYTES
        for value in range(NUM_BYTES):
            self.tokens[self._first_byte + value] = bytes([value])

    def __call__(self, text: bytes) -> list[int]:
        return [self._first_byte + value for value in text]


@lru_cache(1)
def vocabulary(num_ids: int, named: Sequence[tuple[str, int]]) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(RuleTokens(num_ids, named)), slices=[])


def find_failure(grammar: str, tokens: LLTokenizer) -> str:
    """Return why no answer can satisfy a grammar; "" if the beginning of an answer can."""
    matcher = LLMatcher(tokens, grammar, log_level=0)
    bits = llguidance.numpy.allocate_token_bitmask(1, tokens.vocab_size)
    for _ in range(NUM_STEPS):
        if matcher.is_error() or matcher.is_stopped():
            break
        llguidance.numpy.fill_next_token_bitmask(matcher, bits, 0)
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8)[0], bitorder="little"))
        going_on = allowed[allowed != tokens.eos_token]
        if matcher.is_error() or not len(going_on):
            break
        matcher.consume_token(int(going_on[0]))
    message = matcher.get_error() if matcher.is_error() else ""
    return "no answer can keep it" if message.startswith("NoExtension") else message
