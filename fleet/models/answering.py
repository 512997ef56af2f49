"""Common part of model programs whose answers are token ids: embedding, output head, sampling.

Legend: N positions, H hidden size, S requests that sample a token, R positions of requests with
draft tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from fleet.core.errors import BadInput
from fleet.engine.base import EngineOutput
from fleet.engine.torch.answer import AnsweringTask, draw_answers, draw_drafted


class AnsweringProgram:
    """Base class of language model programs: everything of a `DraftedProgram` except the layers.

    Shapes: `embed_tokens` maps ids [N] to embeddings [N, H], `head` maps hidden states [S, H] to
    logits [S, V]. `num_ids`: size of the vocabulary. `one_by_one`: sample each request by itself,
    for invariant numerics.
    """

    def __init__(
        self,
        end_ids: frozenset[int],
        embed_tokens: Callable[[Tensor], Tensor],
        head: Callable[[Tensor], Tensor],
        *,
        num_ids: int,
        device: torch.device,
        one_by_one: bool,
    ) -> None:
        self.end_ids = end_ids
        self._embed_tokens = embed_tokens
        self._head = head
        self._num_ids = num_ids
        self._device = device
        self._one_by_one = one_by_one

    def check_ids(self, ids: np.ndarray) -> None:
        """Check the token ids of a prompt. Raises: BadInput if there are none, or an id is outside
        the vocabulary.
        """
        if len(ids) == 0 or int(ids.min()) < 0 or int(ids.max()) >= self._num_ids:
            raise BadInput(
                f"prompt_ids: empty, or an id outside 0..{self._num_ids - 1}", param="messages"
            )

    def embed(self, ids: np.ndarray) -> Tensor:
        """Return the embeddings of token ids that were checked before: [N] -> [N, H]."""
        return self._embed_tokens(torch.from_numpy(ids).long().to(self._device))

    def draft_rows(self, ids: Sequence[int]) -> Tensor:
        return self._embed_tokens(torch.tensor(ids, device=self._device))

    def logits(self, last_RH: Tensor) -> Tensor:
        return self._head(last_RH)

    def draw(
        self, tasks: Sequence[AnsweringTask], last_SH: Tensor
    ) -> Sequence[Sequence[EngineOutput]]:
        return self.draw_from(tasks, self._head(last_SH))

    def draw_from(
        self, tasks: Sequence[AnsweringTask], logits_SV: Tensor
    ) -> Sequence[Sequence[EngineOutput]]:
        """Sample a token for each task from logits [S, V], which another process may have computed;
        otherwise as `draw`.
        """
        return draw_answers(tasks, logits_SV, self._embed_tokens, one_by_one=self._one_by_one)

    def draw_drafted(
        self, tasks: Sequence[AnsweringTask], drafts: Sequence[Sequence[int]], logits_RV: Tensor
    ) -> Sequence[Sequence[EngineOutput]]:
        return draw_drafted(
            tasks, drafts, logits_RV, self._embed_tokens, one_by_one=self._one_by_one
        )
