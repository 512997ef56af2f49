"""The answer to a request as token ids: the sampling parameters of its tokens, and its end. Shared
by every program that answers in text.
"""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fleet.core.errors import EngineError
from fleet.core.ids import Walk
from fleet.engine.base import TOKEN, EngineOutput, EngineRequest
from fleet.engine.torch.noise import noise_key
from fleet.engine.torch.program import DraftedTask, GraphTask
from fleet.engine.torch.rows import Rows
from fleet.engine.torch.sampling import RowSampling, TokenCounts, draw

DECODE = Walk("decode")


class TokenAnswer:
    """Tokens of one answer. As in `transformers`, the repetition penalty counts the prompt, the
    other penalties the answer only.

    `ids`: the tokens drawn, after `prompt_ids`; `replayed`: outputs of the request's history, to be
    returned once the prompt's rows are computed.
    """

    def __init__(
        self, request: EngineRequest, prompt_ids: Sequence[int], end_ids: frozenset[int], salt: int
    ) -> None:
        self._request = request
        self._end_ids = end_ids
        self._salt = salt
        self.prompt_ids = prompt_ids
        self._counts = TokenCounts(prompt_ids)
        self.ids: list[int] = []
        self.ended = False
        self.replayed: list[EngineOutput] = []
        for token in history_of(request).tolist():
            self.replayed.append(self.record_draw(token))
            if self.ended:
                break

    def take_replayed(self) -> Sequence[EngineOutput]:
        replayed, self.replayed = self.replayed, []
        return replayed

    @property
    def num_left(self) -> int:
        """The most tokens that may still be drawn."""
        return 0 if self.ended else self._request.sampling.max_tokens - len(self.ids)

    def next_draw(self, drafts: Sequence[int] = ()) -> RowSampling:
        """Return the parameters of the draw that follows `drafts`, tokens that are assumed to be
        drawn before it.
        """
        sampling, number = self._request.sampling, len(self.ids) + len(drafts)
        key = noise_key(sampling.seed, self._salt, 0, number)
        banned = frozenset[int]() if sampling.may_end(number) else self._end_ids
        row = RowSampling(sampling=sampling, noise_key=key, counts=self._counts, banned=banned)
        if drafts and row.penalised:
            return msgspec.structs.replace(row, counts=self._counts.followed_by(drafts))
        return row

    def record_draw(self, token: int) -> EngineOutput:
        """Record a draw and return its output: `final` at the end token or the length limit, an
        error for non-finite logits.
        """
        request = self._request
        if token < 0:
            error = EngineError(
                "the model's output is not a number; the prompt's audio may hold invalid samples"
            )
            return EngineOutput(request_id=request.request_id, walk=DECODE, error=error)
        self._counts.add(token)
        self.ids.append(token)
        self.ended = final = token in self._end_ids or len(self.ids) >= request.sampling.max_tokens
        arrays = {TOKEN: np.array([token], dtype=np.int32)}
        return EngineOutput(request_id=request.request_id, walk=DECODE, arrays=arrays, final=final)


def history_of(request: EngineRequest) -> NDArray[np.int32]:
    """Return the tokens that an earlier owner drew, [n]."""
    return np.asarray(request.history.get(TOKEN, ()), np.int32)


class AnsweringTask(GraphTask, DraftedTask):
    """Base of a task that answers in tokens. `answer` is set with the prompt."""

    def __init__(self) -> None:
        self.answer: TokenAnswer | None = None
        self._rows = Rows()

    @property
    def wants_draw(self) -> bool:
        return self.answer is not None and not self.answer.ended

    @property
    def drawn_ids(self) -> NDArray[np.int64]:
        return np.array(self.answer.ids if self.answer is not None else [], np.int64)

    @property
    def num_drawn(self) -> int:
        return len(self.answer.ids) if self.answer is not None else 0

    @property
    def prompt_ids(self) -> Sequence[int]:
        return self.answer.prompt_ids if self.answer is not None else ()

    @property
    def answer_ids(self) -> Sequence[int]:
        return self.answer.ids if self.answer is not None else ()

    @property
    def most_drafts(self) -> int:
        return self.answer.num_left - 1 if self.answer is not None else 0

    def next_draw(self, drafts: Sequence[int] = ()) -> RowSampling:
        assert self.answer is not None, "a draw before the prompt"
        return self.answer.next_draw(drafts)

    def record_draw(self, token: int, row_1H: Tensor) -> EngineOutput:
        """Record a draw and the row of the drawn token, and return the output."""
        assert self.answer is not None, "a draw before the prompt"
        output = self.answer.record_draw(token)
        if not output.final and output.error is None:
            self.grow(row_1H)
        return output

    def grow(self, row_1H: Tensor) -> None:
        """Append the row of a drawn token."""
        self._rows.append(row_1H)


def draw_answers(
    tasks: Sequence[AnsweringTask],
    logits_SV: Tensor,
    embed: Callable[[Tensor], Tensor],
    *,
    one_by_one: bool,
) -> Sequence[Sequence[EngineOutput]]:
    """Draw a token for each task. Shapes: rows of `logits_SV` beyond the tasks only pad; `embed`
    maps ids [S] to rows [S, H].
    """
    tokens_S = draw(
        logits_SV[: len(tasks)], [task.next_draw() for task in tasks], one_by_one=one_by_one
    )
    return record_answers(tasks, tokens_S.tolist(), embed(tokens_S.clamp(min=0)))


def record_answers(
    tasks: Sequence[AnsweringTask], tokens: Sequence[int], rows_SH: Tensor
) -> Sequence[Sequence[EngineOutput]]:
    """Record a drawn token, and its row, of each task."""
    return [
        (task.record_draw(token, row_1H),)
        for task, token, row_1H in zip(tasks, tokens, rows_SH.split(1), strict=True)
    ]


def draw_drafted(
    tasks: Sequence[AnsweringTask],
    drafts: Sequence[Sequence[int]],
    logits_RV: Tensor,
    embed: Callable[[Tensor], Tensor],
    *,
    one_by_one: bool,
) -> Sequence[Sequence[EngineOutput]]:
    """Draw for each task the token after its last known one, and after each of its drafts; record
    them up to the first that is not the draft at its place.

    Each draw has the parameters, counts and noise of its index, so the answer is the one without
    drafts. Shapes: R rows of logits, for each task one more than it has drafts.
    """
    rows = [
        task.next_draw(guessed[:number])
        for task, guessed in zip(tasks, drafts, strict=True)
        for number in range(len(guessed) + 1)
    ]
    tokens_R = draw(logits_RV, rows, one_by_one=one_by_one)
    embedded_RH, tokens = embed(tokens_R.clamp(min=0)), tokens_R.tolist()
    outputs: list[Sequence[EngineOutput]] = []
    first = 0
    for task, guessed in zip(tasks, drafts, strict=True):
        stop = first + len(guessed) + 1
        outputs.append(_record_drafted(task, guessed, tokens[first:stop], embedded_RH[first:stop]))
        first = stop
    return outputs


def _record_drafted(
    task: AnsweringTask, drafts: Sequence[int], tokens: Sequence[int], rows_RH: Tensor
) -> Sequence[EngineOutput]:
    outputs: list[EngineOutput] = []
    for token, draft, row_1H in zip(tokens, (*drafts, None), rows_RH.split(1), strict=True):
        outputs.append(task.record_draw(token, row_1H))
        if outputs[-1].final or token != draft:
            break
    return outputs
