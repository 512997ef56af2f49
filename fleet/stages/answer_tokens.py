"""Answer tokens onto the edges that carry them: one to the client, and, where a next stage speaks, one to it."""

from collections.abc import Sequence

import numpy as np

from fleet.core.ids import EdgeName, Walk
from fleet.engine.base import Arrays, EngineOutput
from fleet.engine.torch.answer import TOKEN
from fleet.stages.base import EdgeItem, LoggedOutput
from fleet.stages.stop_strings import StopDetector

DECODE = Walk("decode")


class AnswerTokens:
    """Every token goes to the client, the last one too. `spoken` never gets the last one (the end token, the one at the length
    limit, the one that completes a stop string): its end is an item without arrays.

    `given` are the request's own tokens, which may hold a stop string; so may the first `min_tokens`.
    """

    def __init__(
        self, *, client: EdgeName, spoken: EdgeName | None, watch: StopDetector, given: Sequence[int] = (), min_tokens: int = 0
    ) -> None:
        self._client, self._spoken, self._watch = client, spoken, watch
        self._given = np.array(given, np.int32)
        self._num_unwatched = max(len(given), min_tokens)
        self._num_seen = 0

    @property
    def stopped(self) -> bool:
        return self._watch.is_met

    def history(self, made: LoggedOutput) -> Arrays:
        """What the engine takes as drawn: the tokens that either edge's log holds, or the given ones; the longest knows most."""
        edges = [edge for edge in (self._client, self._spoken) if edge is not None]
        logs = [made[edge, DECODE]["ids"] for edge in edges if (edge, DECODE) in made]
        longest = max([self._given, *logs], key=len)
        return {TOKEN: longest} if len(longest) else {}

    def items(self, output: EngineOutput, ids: np.ndarray) -> Sequence[EdgeItem]:
        """`ids` int32 [1], the token that the output holds."""
        self._num_seen += 1
        is_watched = self._num_seen > self._num_unwatched
        last = output.final or (is_watched and self._watch.add(int(ids[0])))
        items = [EdgeItem(edge=self._client, walk=DECODE, arrays={"ids": ids}, final=last)]
        if self._spoken is not None:
            items.append(EdgeItem(edge=self._spoken, walk=DECODE, arrays={} if last else {"ids": ids}, final=last))
        return items
