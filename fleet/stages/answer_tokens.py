"""Conversion of answer tokens to items of two edges: the client's, and the one to a next stage that
speaks the answer.
"""

from collections.abc import Sequence

import numpy as np

from fleet.core.chunk import LOGPROBS, TOP_IDS
from fleet.core.ids import DECODE, EdgeName
from fleet.engine.base import TOKEN, Arrays, EngineOutput
from fleet.stages.base import EdgeItem, LoggedOutput
from fleet.stages.spoken_tokens import SpokenTokens
from fleet.stages.stop_strings import StopDetector


class AnswerTokens:
    """Converter of one answer's tokens to items, with detection of stop strings.

    Edge `client` gets every token, with its log probabilities where the engine gives them. Edge
    `spoken`, unless None, gets all but the last token (the end token, a stop token, the token at
    the length limit, or the token that completes a stop string), then a final item without arrays.
    `speech`: filter for an answer that may call functions; the edge `spoken` then ends where the
    first call begins. `given`: answer tokens that the request supplies. `min_tokens`: least number
    of answer tokens. Stop strings are not detected in the supplied tokens, nor in the first
    `min_tokens` tokens.
    """

    def __init__(
        self,
        *,
        client: EdgeName,
        spoken: EdgeName | None,
        stop_detector: StopDetector,
        given: Sequence[int] = (),
        min_tokens: int = 0,
        speech: SpokenTokens | None = None,
    ) -> None:
        self._speech = speech
        self._client = client
        self._spoken = spoken
        self._stop_detector = stop_detector
        self._given = np.array(given, np.int32)
        self._num_unchecked = max(len(given), min_tokens)
        self._num_seen = 0

    @property
    def stopped(self) -> bool:
        return self._stop_detector.is_met

    def history(self, logged: LoggedOutput) -> Arrays:
        """Return the answer tokens known already, which the engine must not sample again: the
        longest of the client edge's log, the spoken edge's log and the supplied answer.
        """
        edges = [edge for edge in (self._client, self._spoken) if edge is not None]
        logs = [logged[edge, DECODE]["ids"] for edge in edges if (edge, DECODE) in logged]
        longest = max([self._given, *logs], key=len)
        return {TOKEN: longest} if len(longest) else {}

    def items(self, output: EngineOutput, ids: np.ndarray) -> Sequence[EdgeItem]:
        """Return the items of the answer's next token: one for the client edge, and any number for
        the spoken edge, which may hold tokens back. Call once for each token, in order. Shapes:
        `ids` int32 [1].
        """
        self._num_seen += 1
        is_checked = self._num_seen > self._num_unchecked
        last = output.final or (is_checked and self._stop_detector.add(int(ids[0])))
        arrays = {"ids": ids}
        if LOGPROBS in output.arrays:
            arrays |= {name: output.arrays[name] for name in (LOGPROBS, TOP_IDS)}
        items = [EdgeItem(edge=self._client, walk=DECODE, arrays=arrays, final=last)]
        if self._spoken is not None and self._speech is not None:
            return items + self._spoken_items(self._spoken, self._speech, int(ids[0]), last=last)
        if self._spoken is not None:
            items.append(
                EdgeItem(
                    edge=self._spoken, walk=DECODE, arrays={} if last else {"ids": ids}, final=last
                )
            )
        return items

    @staticmethod
    def _spoken_items(
        edge: EdgeName, speech: SpokenTokens, token: int, *, last: bool
    ) -> list[EdgeItem]:
        """Return the items of the spoken edge after one more token of an answer with tools."""
        if speech.has_ended:
            return []
        said = list(speech.finish() if last else speech.add(token))
        items = [
            EdgeItem(edge=edge, walk=DECODE, arrays={"ids": np.array([each], np.int32)})
            for each in said
        ]
        if last or speech.has_ended:
            items.append(EdgeItem(edge=edge, walk=DECODE, final=True))
        return items
