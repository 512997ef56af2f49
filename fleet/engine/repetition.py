"""Detection of a token loop, in which a recogniser falls that has nothing more to hear."""

from collections.abc import Sequence

MAX_UNIT = 32
MIN_REPEATS, MIN_TOKENS = 4, 20
"""A loop is a unit of at most `MAX_UNIT` tokens, said at least `MIN_REPEATS` times in a row and
filling at least `MIN_TOKENS` tokens: people say "no no no no", but not twenty times.
"""


def looped_tokens(tokens: Sequence[int]) -> int:
    """Return how many of the last tokens repeat what stands before them, in a loop; 0 without a
    loop. The first saying of the unit is not counted.
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
