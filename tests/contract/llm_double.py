"""A double of vLLM's engine: the same calls, tokens that are a function of all tokens before them, blocks that are counted."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from fleet.engine.base import EngineRequest
from fleet.engine.vllm.engine import StartedLlm

VOCAB_SIZE, MAX_POSITIONS, BLOCK = 500, 256, 32


@dataclass(slots=True, kw_only=True)
class DoubleCompletion:
    token_ids: Sequence[int]
    finish_reason: str | None = None


@dataclass(slots=True, kw_only=True)
class DoubleOutput:
    request_id: str
    outputs: Sequence[DoubleCompletion]
    finished: bool
    num_cached_tokens: int | None


@dataclass(slots=True, kw_only=True)
class Params:
    max_tokens: int
    end_ids: frozenset[int]


@dataclass(slots=True, kw_only=True)
class _Sequence:
    ids: list[int]
    params: Params
    num_cached: int
    num_drawn: int = 0


@dataclass(slots=True)
class LlmDouble:
    """Draws one token for each of its requests in a step. `cached`: blocks of prompts that were computed before."""

    running: dict[str, _Sequence] = field(default_factory=dict[str, _Sequence])
    cached: set[tuple[int, ...]] = field(default_factory=set[tuple[int, ...]])
    failed: bool = False
    lost: set[str] = field(default_factory=set[str])
    """Requests that end with an internal error."""

    def add_request(self, request_id: str, prompt: dict[str, list[int]], params: object) -> str:
        assert isinstance(params, Params)
        ids = prompt["prompt_token_ids"]
        ends = range(BLOCK, len(ids), BLOCK)
        num_cached = max((end for end in ends if tuple(ids[:end]) in self.cached), default=0)
        self.cached |= {tuple(ids[:end]) for end in ends}
        self.running[request_id] = _Sequence(ids=list(ids), params=params, num_cached=num_cached)
        return request_id

    def step(self) -> Sequence[DoubleOutput]:
        return [self._draw(request_id, sequence) for request_id, sequence in list(self.running.items())]

    def _draw(self, request_id: str, sequence: _Sequence) -> DoubleOutput:
        if request_id in self.lost:
            del self.running[request_id]
            failure = DoubleCompletion(token_ids=[], finish_reason="error")
            return DoubleOutput(request_id=request_id, outputs=[failure], finished=True, num_cached_tokens=None)
        token = sum(place * token for place, token in enumerate(sequence.ids, 1)) % VOCAB_SIZE
        sequence.ids.append(token)
        sequence.num_drawn += 1
        finished = token in sequence.params.end_ids or sequence.num_drawn == sequence.params.max_tokens
        if finished:
            del self.running[request_id]
        completion = DoubleCompletion(token_ids=[token])
        return DoubleOutput(request_id=request_id, outputs=[completion], finished=finished, num_cached_tokens=sequence.num_cached)

    def abort_request(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.running.pop(request_id, None)

    def check_health(self) -> None:
        if self.failed:
            raise RuntimeError("EngineCore encountered an issue")


def started(llm: LlmDouble) -> StartedLlm:
    return StartedLlm(
        llm=llm, vocab_size=VOCAB_SIZE, max_positions=MAX_POSITIONS, sampling_params=params_of, check_health=llm.check_health,
        pages=lambda: (sum(-(-len(sequence.ids) // BLOCK) for sequence in llm.running.values()), 64),
    )  # fmt: skip


def params_of(request: EngineRequest, num_known: int, end_ids: frozenset[int]) -> Params:
    return Params(max_tokens=request.sampling.max_tokens - num_known, end_ids=end_ids)
