"""One vLLM engine in this process as the batch loop of a text stage: `step` is one step of vLLM's.

Differs from the torch loop where vLLM does: a paused request is computed on, and its outputs are held until it is resumed; rows
that come from vLLM's prefix cache are reported with the first output, in whole blocks; an answer that another engine began is
continued from its tokens, whose noise is drawn again, from another seed. Knows no stage and no Redis.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from fleet.core.errors import BadInput, EngineError, EngineStopped, OutOfPages
from fleet.core.ids import RequestId, Walk
from fleet.engine.base import NUM_POSITIONS, TOKEN, Engine, EngineInput, EngineOutput, EngineRequest, EngineStats

DECODE = Walk("decode")


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

    def add_request(self, request_id: str, prompt: dict[str, list[int]], params: object) -> object: ...

    def step(self) -> Sequence[LlmOutput]: ...

    def abort_request(self, request_ids: list[str]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedLlm:
    """A vLLM engine, and access to parts of it that differ between releases.

    `sampling_params` makes its settings of a request, the number of known tokens of its answer, and the end tokens. `pages`
    returns its used and its total KV blocks. `check_health` raises if its executor has failed.
    """

    llm: Llm
    vocab_size: int
    max_positions: int
    sampling_params: Callable[[EngineRequest, int, frozenset[int]], object]
    pages: Callable[[], tuple[int, int]]
    check_health: Callable[[], None]


@dataclass(slots=True, kw_only=True, eq=False)
class _VllmRequest:
    """A submitted request. `waiting`: outputs that were computed and not returned yet; `drawing`: vLLM still runs it."""

    request: EngineRequest
    paused: bool = False
    drawing: bool = False
    num_drawn: int = 0
    waiting: list[EngineOutput] = field(default_factory=list[EngineOutput])


class VllmEngine(Engine):
    """`end_ids`: tokens that end an answer. Input arrays: `ids` int32 [prompt]. Output arrays: `token` int32 [1]."""

    def __init__(self, started: StartedLlm, end_ids: frozenset[int]) -> None:
        self._started, self._llm, self._end_ids = started, started.llm, end_ids
        self._requests: dict[RequestId, _VllmRequest] = {}
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
        ids = [int(token) for token in piece.arrays["ids"]]
        vocab_size = self._started.vocab_size
        if not ids or not 0 <= min(ids) <= max(ids) < vocab_size:
            error = BadInput(f"prompt_ids: empty, or an id outside 0..{vocab_size - 1}", param="messages")
            running.waiting.append(EngineOutput(request_id=request_id, walk=piece.walk, error=error))
            return 0
        known = [int(token) for token in running.request.history.get(TOKEN, ())]
        for token in known:
            if not self._is_over(running):
                self._record(running, token)
        if not self._is_over(running):
            params = self._started.sampling_params(running.request, running.num_drawn, self._end_ids)
            self._llm.add_request(request_id, {"prompt_token_ids": [*ids, *known]}, params)
            running.drawing = True
        return 0

    def pause(self, request_id: RequestId, *, paused: bool) -> None:
        running = self._requests.get(request_id)
        if running is not None:
            running.paused = paused

    def is_ready(self) -> bool:
        return any(not running.paused and (running.waiting or running.drawing) for running in self._requests.values())

    def step(self) -> Sequence[EngineOutput]:
        if any(running.drawing and not running.paused for running in self._requests.values()):
            for output in self._llm.step():
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
        if running is not None and running.drawing:
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

    def _on_output(self, output: LlmOutput) -> None:
        running = self._requests.get(RequestId(output.request_id))
        if running is None:
            return
        num_reused = (output.num_cached_tokens or 0) if running.num_drawn == len(running.request.history.get(TOKEN, ())) else 0
        self._rows_reused += num_reused
        for token in output.outputs[0].token_ids:
            if not self._is_over(running):
                self._record(running, token, num_reused)
                num_reused = 0
        if output.finished:
            running.drawing = False
            if not self._is_over(running):
                error = EngineError(f"vLLM ended the answer early: {output.outputs[0].finish_reason}")
                running.waiting.append(EngineOutput(request_id=running.request.request_id, walk=DECODE, error=error))

    def _record(self, running: _VllmRequest, token: int, num_reused: int = 0) -> None:
        """Append the output of a drawn token: `final` at an end token or the length limit."""
        running.num_drawn += 1
        running.waiting.append(
            EngineOutput(
                request_id=running.request.request_id,
                walk=DECODE,
                arrays={TOKEN: np.array([token], dtype=np.int32)},
                final=token in self._end_ids or running.num_drawn >= running.request.sampling.max_tokens,
                num_reused=num_reused,
            )
        )

    def _is_over(self, running: _VllmRequest) -> bool:
        return bool(running.waiting) and running.waiting[-1].final
