"""The prompt positions that the Talker reads: user turns, and the last assistant header.

Source: transformers 5.23, `Qwen3OmniMoeForConditionalGeneration.generate()`.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

HEADER_LEN = 3
"""Positions of a turn's header: turn start, role, line break."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleIds:
    """Token ids of the beginning of a turn (`start`) and of the names of two roles."""

    start: int
    user: int
    assistant: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkerPrompt:
    """Positions of a Thinker prompt that the Talker reads.

    `in_user_turn`: True for each position that belongs to a user turn. `header_at`: position at
    which the last assistant header begins (turn start, role, line break); None if the prompt has no
    complete header.
    """

    in_user_turn: NDArray[np.bool_]
    header_at: int | None


def talker_prompt(prompt_ids: NDArray[np.int32], roles: RoleIds) -> TalkerPrompt:
    """Find the positions of a prompt that the Talker reads.

    The role of a position is the id after the last turn start at or before the position. Positions
    before any turn start have the prompt's second id as their role.
    """
    length = len(prompt_ids)
    at = np.arange(length)
    last_start = (
        np.maximum.accumulate(np.where(prompt_ids == roles.start, at, -1)) if length else at
    )
    role_ids = (
        prompt_ids[np.minimum(np.maximum(last_start, 0) + 1, length - 1)] if length else prompt_ids
    )
    headers = np.flatnonzero((prompt_ids[:-1] == roles.start) & (prompt_ids[1:] == roles.assistant))
    header_at = int(headers[-1]) if len(headers) and headers[-1] + HEADER_LEN <= length else None
    return TalkerPrompt(in_user_turn=role_ids == roles.user, header_at=header_at)
