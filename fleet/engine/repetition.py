"""Detection of token loops, which a recogniser samples when it has nothing more to hear."""

from collections.abc import Sequence

MAX_UNIT = 32
MIN_REPEATS, MIN_TOKENS = 4, 20
"""A loop is a unit of at most `MAX_UNIT` tokens, said at least `MIN_REPEATS` times in a row and
filling at least `MIN_TOKENS` tokens: people say "no no no no", but not twenty times.
"""


def looped_tokens(tokens: Sequence[int]) -> int:
    """Return the number of tokens at the end that repeat the unit of a loop, not counting the
    unit's first occurrence; 0 if `tokens` do not end in a loop.
    """
    for unit in range(1, min(MAX_UNIT, len(tokens) // MIN_REPEATS) + 1):
        num_same = 0
        while (
            num_same + unit < len(tokens) and tokens[-1 - num_same] == tokens[-1 - num_same - unit]
        ):
            num_same += 1
        num_filled = num_same + unit
        if num_filled >= max(MIN_REPEATS * unit, MIN_TOKENS):
            return num_same
    return 0
