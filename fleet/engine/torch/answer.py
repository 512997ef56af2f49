"""The answer to a request as token ids: the sampling parameters of its tokens, and its end. Shared
by every program that answers in text.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fleet.core.errors import EngineError, FleetError
from fleet.core.ids import DECODE
from fleet.engine.base import TOKEN, Arrays, EngineOutput, EngineRequest
from fleet.engine.torch.adjustments import Adjustments
from fleet.engine.torch.logprobs import RawLogits
from fleet.engine.torch.noise import noise_key
from fleet.engine.torch.program import DraftedTask, GraphTask
from fleet.engine.torch.rows import Rows
from fleet.engine.torch.sampling import RowSampling, TokenCounts, banned_ids, draw

NO_ARRAYS: Arrays = MappingProxyType({})
NO_LOGPROBS: Mapping[int, Arrays] = MappingProxyType({})


class TokenAnswer:
    """Tokens of one answer. As in `transformers`, the repetition penalty counts prompt and answer,
    the other penalties the answer only.

    `ids`: the sampled tokens, which follow `prompt_ids`; `replayed`: outputs of the request's
    history, to be returned once the prompt is computed.
    """

    def __init__(
        self, request: EngineRequest, prompt_ids: Sequence[int], end_ids: frozenset[int], salt: int
    ) -> None:
        self._request = request
        self._end_ids = end_ids
        self._last_ids = end_ids.union(request.sampling.stop_token_ids)
        self._adjustments = Adjustments.of(request.sampling)
        self._salt = salt
        self._rule = request.open_rule() if request.open_rule is not None else None
        self.prompt_ids = prompt_ids
        self._counts = TokenCounts(prompt_ids)
        self.ids: list[int] = []
        self.ended = False
        self.replayed: list[EngineOutput] = []
        for token in history_of(request).tolist():
            self.replayed.append(self.record_draw(token))
            if self.ended or self.replayed[-1].error is not None:
                break

    def take_replayed(self) -> Sequence[EngineOutput]:
        replayed, self.replayed = self.replayed, []
        return replayed

    @property
    def num_left(self) -> int:
        """The largest number of tokens that may still be sampled."""
        return 0 if self.ended else self._request.sampling.max_tokens - len(self.ids)

    def next_draw(self, drafts: Sequence[int] = ()) -> RowSampling:
        """Return the sampling parameters of the token that follows the answer so far and `drafts`,
        which are tokens assumed to be sampled first.
        """
        sampling, number = self._request.sampling, len(self.ids) + len(drafts)
        key = noise_key(sampling.seed, self._salt, 0, number)
        allowed = self._rule.allowed(drafts) if self._rule is not None else None
        adjusts = self._adjustments
        row = RowSampling(
            sampling=sampling,
            noise_key=key,
            counts=self._counts,
            banned=banned_ids(sampling, number, self._end_ids, allowed),
            allowed=allowed,
            adjustment=adjusts.row(self.ids, drafts) if adjusts is not None else None,
        )
        if drafts and row.penalised:
            return msgspec.structs.replace(row, counts=self._counts.followed_by(drafts))
        return row

    def record_draw(self, token: int, logprobs: Arrays = NO_ARRAYS) -> EngineOutput:
        """Append a sampled token to the answer and return its output: `final` at an end token, a
        stop token or the length limit. A token that is negative (the logits were not finite) or may
        not follow the answer is not appended; the output then has an error. `logprobs`: arrays with
        the token's log probabilities, if the request asks for them.
        """
        request = self._request
        error = self._error_of(token)
        if error is not None:
            return EngineOutput(request_id=request.request_id, walk=DECODE, error=error)
        self._counts.add(token)
        self.ids.append(token)
        self.ended = final = token in self._last_ids or len(self.ids) >= request.sampling.max_tokens
        arrays = {TOKEN: np.array([token], dtype=np.int32), **logprobs}
        return EngineOutput(request_id=request.request_id, walk=DECODE, arrays=arrays, final=final)

    def _error_of(self, token: int) -> FleetError | None:
        """Add a sampled token to the answer's rule, if there is a rule; return the error if the
        token may not follow the answer, else None.
        """
        if token < 0:
            return EngineError(
                "the model's output is not a number; the prompt's audio may hold invalid samples"
            )
        if self._adjustments is not None and (error := self._adjustments.check(self.ids, token)):
            return error
        if self._rule is None:
            return None
        self._rule.add(token)
        return self._rule.error


def history_of(request: EngineRequest) -> NDArray[np.int32]:
    """Return the tokens that an earlier owner sampled for a request: int32 [n]."""
    return np.asarray(request.history.get(TOKEN, ()), np.int32)


class AnsweringTask(GraphTask, DraftedTask):
    """Base class of a program's task that answers in tokens. `answer` is None until the prompt is
    fed.
    """

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

    def record_draw(self, token: int, row_1H: Tensor, logprobs: Arrays = NO_ARRAYS) -> EngineOutput:
        """Append a sampled token to the answer and, unless the answer has ended, its embedding
        `row_1H` to the task's input; return the output, with the arrays of the token's log
        probabilities.
        """
        assert self.answer is not None, "a draw before the prompt"
        output = self.answer.record_draw(token, logprobs)
        if not output.final and output.error is None:
            self.grow(row_1H)
        return output

    def grow(self, row_1H: Tensor) -> None:
        """Append the embedding of a sampled token to the task's input."""
        self._rows.append(row_1H)


def draw_answers(
    tasks: Sequence[AnsweringTask],
    logits_SV: Tensor,
    embed: Callable[[Tensor], Tensor],
    *,
    one_by_one: bool,
) -> Sequence[Sequence[EngineOutput]]:
    """Sample the next token of each task, record it in the task, and return the outputs. Shapes:
    `logits_SV` may have padding rows after the tasks' rows; `embed` maps token ids [S] to
    embeddings [S, H].
    """
    drawn = _draw(logits_SV[: len(tasks)], [task.next_draw() for task in tasks], one_by_one)
    return record_answers(tasks, drawn.tokens, drawn.embedded(embed), drawn.logprobs)


class _Drawn(NamedTuple):
    """Sampled tokens [R], on the device and as numbers, and log probabilities by row."""

    tokens_R: Tensor
    tokens: list[int]
    logprobs: Mapping[int, Arrays]

    def embedded(self, embed: Callable[[Tensor], Tensor]) -> Tensor:
        return embed(self.tokens_R.clamp(min=0))


def _draw(logits_RV: Tensor, rows: Sequence[RowSampling], one_by_one: bool) -> _Drawn:
    raw = RawLogits.of(logits_RV, rows, one_by_one=one_by_one)
    tokens_R = draw(logits_RV, rows, one_by_one=one_by_one)
    tokens = tokens_R.tolist()
    return _Drawn(tokens_R, tokens, raw.of_tokens(tokens) if raw is not None else {})


def record_answers(
    tasks: Sequence[AnsweringTask],
    tokens: Sequence[int],
    rows_SH: Tensor,
    logprobs: Mapping[int, Arrays] = NO_LOGPROBS,
) -> Sequence[Sequence[EngineOutput]]:
    """Record one sampled token per task, with its embedding in `rows_SH` and, by row, its log
    probabilities; return the outputs.
    """
    drawn = zip(tasks, tokens, rows_SH.split(1), strict=True)
    return [
        (task.record_draw(token, row_1H, logprobs.get(row, NO_ARRAYS)),)
        for row, (task, token, row_1H) in enumerate(drawn)
    ]


def draw_drafted(
    tasks: Sequence[AnsweringTask],
    drafts: Sequence[Sequence[int]],
    logits_RV: Tensor,
    embed: Callable[[Tensor], Tensor],
    *,
    one_by_one: bool,
) -> Sequence[Sequence[EngineOutput]]:
    """Sample, for each task, the token after its last known one and after each of its draft tokens;
    record the sampled tokens up to the first that differs from the draft token at its place, this
    one included.

    A token is sampled with the parameters, counts and noise of its index, so the answer is the same
    as without drafts. Shapes: `logits_RV` has, for each task, one row more than the task has
    drafts.
    """
    rows = [
        task.next_draw(guessed[:number])
        for task, guessed in zip(tasks, drafts, strict=True)
        for number in range(len(guessed) + 1)
    ]
    drawn = _draw(logits_RV, rows, one_by_one)
    embedded_RH = drawn.embedded(embed)
    outputs: list[Sequence[EngineOutput]] = []
    first = 0
    for task, guessed in zip(tasks, drafts, strict=True):
        own = range(first, first + len(guessed) + 1)
        first = own.stop
        logprobs = [drawn.logprobs.get(row, NO_ARRAYS) for row in own]
        tokens, rows_RH = drawn.tokens[own.start : first], embedded_RH[own.start : first]
        outputs.append(_record_drafted(task, guessed, tokens, rows_RH, logprobs))
    return outputs


def _record_drafted(
    task: AnsweringTask,
    drafts: Sequence[int],
    tokens: Sequence[int],
    rows_RH: Tensor,
    logprobs: Sequence[Arrays],
) -> Sequence[EngineOutput]:
    outputs: list[EngineOutput] = []
    drawn = zip(tokens, (*drafts, None), rows_RH.split(1), logprobs, strict=True)
    for token, draft, row_1H, arrays in drawn:
        outputs.append(task.record_draw(token, row_1H, arrays))
        if outputs[-1].final or outputs[-1].error is not None or token != draft:
            break
    return outputs
