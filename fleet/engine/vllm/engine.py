"""One vLLM engine in this process as the batch loop of a stage that answers in tokens: `step` is one step of vLLM's.

Differs from the torch loop where vLLM does: a paused request is computed on, and its outputs are held until it is resumed; rows
that come from vLLM's prefix cache are reported with the first output, in whole blocks; an answer that another engine began is
continued from its tokens, whose noise is drawn again, from another seed. Knows no stage and no Redis.
Legend: n positions, H hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from fleet.core.errors import BadInput, EngineError, EngineStopped, OutOfPages
from fleet.core.ids import RequestId, Walk
from fleet.engine.base import NUM_POSITIONS, TOKEN, Arrays, Engine, EngineInput, EngineOutput, EngineRequest, EngineStats

PREFILL, DECODE = Walk("prefill"), Walk("decode")


class LlmCompletion(Protocol):
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def finish_reason(self) -> str | None: ...


class LlmOutput(Protocol):
    """New tokens of one request. `num_cached_tokens`: of its prompt, from the prefix cache."""

    @property
    def request_id(self) -> str: ...
    @property
    def outputs(self) -> Sequence[LlmCompletion]: ...
    @property
    def finished(self) -> bool: ...
    @property
    def num_cached_tokens(self) -> int | None: ...


class Llm(Protocol):
    """The part of vLLM's `LLMEngine` that is used. Source: vllm 0.32, v1/engine/llm_engine.py."""

    def add_request(self, request_id: str, prompt: object, params: object) -> str:
        """Return vLLM's own id of the request. Raises: ValueError if the prompt cannot be served."""
        ...

    def step(self) -> Sequence[LlmOutput]: ...

    def abort_request(self, request_ids: list[str]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TappedRows:
    """Progress of a prompt whose rows are wanted: it is computed up to position `stop`.

    `llm_id`: vLLM's id of the request. `rows` float32 [n, H]: the tapped layer's inputs at `positions` int32 [n].
    """

    llm_id: str
    stop: int
    positions: np.ndarray
    rows: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """What vLLM must know of a request besides its prompt, which ends with `num_known` tokens of the answer.

    `max_tokens` of the rest. `row_positions`: positions whose tapped rows are wanted among the first `num_prompt`; None: none, nor
    the progress of the prompt.
    """

    request: EngineRequest
    num_known: int
    max_tokens: int
    end_ids: frozenset[int]
    num_prompt: int
    row_positions: Sequence[int] | None


def token_prompt(ids: Sequence[int], arrays: Arrays) -> object:
    """Return a prompt of text, in vLLM's form."""
    return {"prompt_token_ids": list(ids)}


def no_rows(request: EngineRequest, ids: np.ndarray) -> Sequence[int] | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedLlm:
    """A vLLM engine, and access to parts of it that differ between releases.

    `sampling_params` makes vLLM's settings of a request. `pages` returns its used and its total KV blocks. `check_health` raises
    if its executor has failed. `take_rows` returns the progress of prompts in the last step.
    """

    llm: Llm
    vocab_size: int
    max_positions: int
    sampling_params: Callable[[Draws], object]
    pages: Callable[[], tuple[int, int]]
    check_health: Callable[[], None]
    take_rows: Callable[[], Sequence[TappedRows]] = lambda: ()


@dataclass(slots=True, kw_only=True, eq=False)
class _VllmRequest:
    """A submitted request. `waiting`: outputs that were computed and not returned yet; `drawing`: vLLM still runs it.

    `prompt_ids` is set, and `replayed` holds tokens of the history, while the request has prompt rows to return before them.
    """

    request: EngineRequest
    paused: bool = False
    drawing: bool = False
    num_drawn: int = 0
    over: bool = False
    llm_id: str = ""
    prompt_ids: np.ndarray | None = None
    num_prefilled: int = 0
    waiting: list[EngineOutput] = field(default_factory=list[EngineOutput])
    replayed: list[EngineOutput] = field(default_factory=list[EngineOutput])


class VllmEngine(Engine):
    """`end_ids`: tokens that end an answer. Input arrays: `ids` int32 [prompt], and those of `prompt`, which makes vLLM's form of
    the prompt's ids, followed by known tokens, and raises BadInput. Output arrays: `token` int32 [1].

    `row_positions` returns a prompt's positions whose tapped rows are wanted, or None. Such a prompt has outputs of its own, before
    the first token: `ids` of positions in order, and the `rows` [n, H] of `row_positions` [n] among them, if any.
    """

    def __init__(
        self,
        started: StartedLlm,
        end_ids: frozenset[int],
        prompt: Callable[[Sequence[int], Arrays], object] = token_prompt,
        row_positions: Callable[[EngineRequest, np.ndarray], Sequence[int] | None] = no_rows,
    ) -> None:
        self._started, self._llm, self._end_ids = started, started.llm, end_ids
        self._prompt, self._row_positions = prompt, row_positions
        self._requests: dict[RequestId, _VllmRequest] = {}
        self._by_llm_id: dict[str, _VllmRequest] = {}
        self._rows_reused = 0

    def submit(self, request: EngineRequest) -> None:
        """Add a request. Raises: OutOfPages if it can never fit; BadInput."""
        if request.request_id in self._requests:
            raise BadInput(f"request {request.request_id} was submitted twice")
        most, capacity = int(request.params[NUM_POSITIONS]), self._started.max_positions
        if most > capacity:
            raise OutOfPages(
                f"max_tokens: This model's maximum context length is {capacity} tokens, what its KV cache holds. However, "
                f"you requested {most} tokens, prompt and answer. Please reduce the length of the messages or max_tokens.",
                param="max_tokens",
            )
        self._requests[request.request_id] = _VllmRequest(request=request)

    def feed(self, request_id: RequestId, piece: EngineInput) -> int:
        running = self._requests.get(request_id)
        if running is None:
            return 0
        assert piece.final and not running.drawing, "a prompt arrives in one piece"
        try:
            self._start(running, piece.arrays)
        except BadInput as error:
            running.waiting.append(EngineOutput(request_id=request_id, walk=piece.walk, error=error))
        return 0

    def _start(self, running: _VllmRequest, arrays: Arrays) -> None:
        """Let vLLM run the prompt and the rest of the answer. Raises: BadInput."""
        prompt_ids, request = np.asarray(arrays["ids"], np.int32), running.request
        vocab_size = self._started.vocab_size
        if not len(prompt_ids) or not 0 <= prompt_ids.min() <= prompt_ids.max() < vocab_size:
            raise BadInput(f"prompt_ids: empty, or an id outside 0..{vocab_size - 1}", param="messages")
        row_positions = self._row_positions(request, prompt_ids)
        if row_positions is not None:
            running.prompt_ids = prompt_ids
        known = [int(token) for token in request.history.get(TOKEN, ())]
        for token in known:
            if not running.over:
                self._record(running, token)
        if running.over and row_positions is None:
            return
        draws = Draws(
            request=request,
            num_known=0 if running.over else len(known),
            max_tokens=1 if running.over else request.sampling.max_tokens - len(known),
            end_ids=self._end_ids,
            num_prompt=len(prompt_ids),
            row_positions=row_positions,
        )
        ids = [*prompt_ids.tolist(), *known[: draws.num_known]]
        prompt = self._prompt(ids, arrays)
        try:
            running.llm_id = self._llm.add_request(request.request_id, prompt, self._started.sampling_params(draws))
        except ValueError as error:
            raise BadInput(f"messages: vLLM refuses the prompt: {error}", param="messages") from error
        self._by_llm_id[running.llm_id] = running
        running.drawing = True

    def pause(self, request_id: RequestId, *, paused: bool) -> None:
        running = self._requests.get(request_id)
        if running is not None:
            running.paused = paused

    def is_ready(self) -> bool:
        return any(not running.paused and (running.waiting or running.drawing) for running in self._requests.values())

    def step(self) -> Sequence[EngineOutput]:
        if any(running.drawing and not running.paused for running in self._requests.values()):
            llm_outputs = self._llm.step()
            for tapped in self._started.take_rows():
                self._on_rows(tapped)
            for output in llm_outputs:
                self._on_output(output)
        outputs: list[EngineOutput] = []
        for running in [running for running in self._requests.values() if running.waiting and not running.paused]:
            outputs += running.waiting
            running.waiting = []
            if outputs[-1].final or outputs[-1].error is not None:
                self.abort(running.request.request_id)
        return outputs

    def finish(self, request_id: RequestId) -> None:
        self.abort(request_id)

    def abort(self, request_id: RequestId) -> None:
        running = self._requests.pop(request_id, None)
        if running is None:
            return
        self._by_llm_id.pop(running.llm_id, None)
        if running.drawing:
            self._llm.abort_request([request_id])

    def check(self) -> None:
        try:
            self._started.check_health()
        except Exception as error:  # an error of any kind from the processes of the executor
            raise EngineStopped(f"vLLM does not compute any more: {str(error).partition(chr(10))[0]}") from error

    def stats(self) -> EngineStats:
        used, total = self._started.pages()
        return EngineStats(
            running=len(self._requests),
            ready=sum(not running.paused and bool(running.waiting or running.drawing) for running in self._requests.values()),
            pages_used=used,
            pages_total=total,
            rows_reused=self._rows_reused,
        )

    def _on_rows(self, tapped: TappedRows) -> None:
        """Return the ids and rows of newly computed positions of a prompt and, after its last one, tokens of the history."""
        running = self._by_llm_id.get(tapped.llm_id)
        if running is None or running.prompt_ids is None:
            return
        arrays: dict[str, np.ndarray] = {"ids": running.prompt_ids[running.num_prefilled : tapped.stop]}
        if len(tapped.positions):
            arrays |= {"row_positions": tapped.positions, "rows": tapped.rows}
        running.num_prefilled = tapped.stop
        running.waiting.append(EngineOutput(request_id=running.request.request_id, walk=PREFILL, arrays=arrays))
        if tapped.stop == len(running.prompt_ids):
            running.prompt_ids = None
            running.waiting += running.replayed
            running.replayed = []

    def _on_output(self, output: LlmOutput) -> None:
        running = self._requests.get(RequestId(output.request_id))
        if running is None:
            return
        num_reused = (output.num_cached_tokens or 0) if running.num_drawn == len(running.request.history.get(TOKEN, ())) else 0
        self._rows_reused += num_reused
        for token in output.outputs[0].token_ids:
            if not running.over:
                self._record(running, token, num_reused)
                num_reused = 0
        if output.finished:
            running.drawing = False
            if not running.over or running.prompt_ids is not None:
                error = EngineError(f"vLLM ended the answer early: {output.outputs[0].finish_reason}")
                running.waiting.append(EngineOutput(request_id=running.request.request_id, walk=DECODE, error=error))

    def _record(self, running: _VllmRequest, token: int, num_reused: int = 0) -> None:
        """Append the output of a drawn token: `final` at an end token or the length limit."""
        running.num_drawn += 1
        running.over = token in self._end_ids or running.num_drawn >= running.request.sampling.max_tokens
        outputs = running.waiting if running.prompt_ids is None else running.replayed
        outputs.append(
            EngineOutput(
                request_id=running.request.request_id,
                walk=DECODE,
                arrays={TOKEN: np.array([token], dtype=np.int32)},
                final=running.over,
                num_reused=num_reused,
            )
        )
