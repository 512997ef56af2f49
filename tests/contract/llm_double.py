"""A double of vLLM's engine with the same calls. Its tokens are a function of all preceding tokens,
and its KV blocks are only counted.

Prompts are computed in chunks. The engine of a prefill role holds the blocks of its ended requests
until the engine of a decode role reads them by a ticket.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fleet.engine.vllm.llm import Draws, LlmLogprob, StartedLlm, TappedRows, Ticket

VOCAB_SIZE, MAX_POSITIONS, BLOCK, CHUNK, HIDDEN = 500, 256, 32, 48, 2


@dataclass(slots=True, kw_only=True)
class DoubleCompletion:
    token_ids: Sequence[int]
    finish_reason: str | None = None
    logprobs: Sequence[Mapping[int, LlmLogprob]] | None = None


@dataclass(slots=True, kw_only=True)
class DoubleOutput:
    request_id: str
    outputs: Sequence[DoubleCompletion]
    finished: bool
    num_cached_tokens: int | None
    kv_transfer_params: Ticket | None = None


@dataclass(slots=True, kw_only=True)
class _Sequence:
    ids: list[int]
    draws: Draws
    num_cached: int
    num_computed: int
    num_tapped: int = 0
    num_drawn: int = 0


@dataclass(slots=True)
class LlmDouble:
    """A double of vLLM's engine, which samples one token per request and step.

    `cached`: prompt prefixes whose blocks are computed. `held`: prompts of ended requests, by the
    number in their ticket. `lost`: requests that end with an internal error. `unreadable`: whether
    reads of another engine's blocks fail.
    """

    running: dict[str, _Sequence] = field(default_factory=dict[str, _Sequence])
    cached: set[tuple[int, ...]] = field(default_factory=set[tuple[int, ...]])
    failed: bool = False
    lost: set[str] = field(default_factory=set[str])
    held: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    num_tickets: int = 0
    unreadable: bool = False
    tapped: list[TappedRows] = field(default_factory=list[TappedRows])
    sources: list["LlmDouble"] = field(default_factory=list["LlmDouble"])
    """Engines whose held blocks this engine can read by a ticket."""

    def add_request(self, request_id: str, prompt: object, params: object) -> str:
        assert isinstance(params, Draws) and isinstance(prompt, dict)
        ids: list[int] = prompt["prompt_token_ids"]
        ends = range(BLOCK, len(ids), BLOCK)
        num_cached = max((end for end in ends if tuple(ids[:end]) in self.cached), default=0)
        self.cached |= {tuple(ids[:end]) for end in ends}
        read = self._read(params.ticket, ids)
        sequence = _Sequence(
            ids=list(ids), draws=params, num_cached=num_cached, num_computed=max(num_cached, read)
        )
        self.running[request_id] = sequence
        return request_id

    def _read(self, ticket: Ticket | None, ids: list[int]) -> int:
        """Read another engine's held blocks by a ticket, which is then used up; return the number
        of positions read.
        """
        if ticket is None:
            return 0
        for source in self.sources:
            number = ticket["number"]
            assert isinstance(number, int)
            if source.held.get(number) == ids:
                del source.held[number]
                return len(ids) - 1
        return 0

    def step(self) -> Sequence[DoubleOutput]:
        outputs = [
            self._advance(request_id, sequence)
            for request_id, sequence in list(self.running.items())
        ]
        return [output for output in outputs if output is not None]

    def _advance(self, request_id: str, sequence: _Sequence) -> DoubleOutput | None:
        if request_id in self.lost:
            del self.running[request_id]
            failure = DoubleCompletion(token_ids=[], finish_reason="error")
            return DoubleOutput(
                request_id=request_id, outputs=[failure], finished=True, num_cached_tokens=None
            )
        if self.unreadable and sequence.draws.ticket is not None:
            return None
        start, length = sequence.num_computed, len(sequence.ids)
        sequence.num_computed = min(start + CHUNK, length)
        self._tap(request_id, sequence)
        return self._draw(request_id, sequence) if sequence.num_computed == length else None

    def _tap(self, request_id: str, sequence: _Sequence) -> None:
        draws, start = sequence.draws, sequence.num_tapped
        sequence.num_tapped = stop = min(sequence.num_computed, draws.num_prompt)
        if draws.row_positions is not None and stop > start:
            positions = np.array(
                [place for place in draws.row_positions if start <= place < stop], np.int32
            )
            rows = rows_of(sequence.ids, positions)
            self.tapped.append(
                TappedRows(llm_id=request_id, stop=stop, positions=positions, rows=rows)
            )

    def take_rows(self) -> Sequence[TappedRows]:
        tapped, self.tapped = self.tapped, []
        return tapped

    def _draw(self, request_id: str, sequence: _Sequence) -> DoubleOutput:
        prompt = list(sequence.ids)
        token = sum(place * token for place, token in enumerate(sequence.ids, 1)) % VOCAB_SIZE
        sequence.ids.append(token)
        sequence.num_computed += 1
        sequence.num_drawn += 1
        finished = (
            token in sequence.draws.end_ids or sequence.num_drawn == sequence.draws.max_tokens
        )
        ticket: Ticket | None = None
        if finished:
            del self.running[request_id]
            if sequence.draws.hands_off:
                self.num_tickets += 1
                self.held[self.num_tickets] = prompt
                ticket = {"number": self.num_tickets}
        return DoubleOutput(
            request_id=request_id,
            outputs=[DoubleCompletion(token_ids=[token])],
            finished=finished,
            num_cached_tokens=sequence.num_cached,
            kv_transfer_params=ticket,
        )

    def prefix_of(self, request_id: str) -> Callable[[], int]:
        ids = self.running[request_id].ids
        return lambda: max(
            (end for end in range(BLOCK, len(ids), BLOCK) if tuple(ids[:end]) in self.cached),
            default=0,
        )

    def abort_request(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.running.pop(request_id, None)

    def check_health(self) -> None:
        if self.failed:
            raise RuntimeError("EngineCore encountered an issue")


def rows_of(ids: Sequence[int], positions: np.ndarray) -> np.ndarray:
    """Return the hidden states that the double taps, [n, 2]: for each position its id, and the sum
    of the ids up to it.
    """
    sums = np.cumsum(ids)
    return np.array(
        [(ids[place], sums[place]) for place in positions.tolist()], np.float32
    ).reshape(-1, HIDDEN)


def started(llm: LlmDouble) -> StartedLlm:
    return StartedLlm(
        llm=llm,
        vocab_size=VOCAB_SIZE,
        max_positions=MAX_POSITIONS,
        sampling_params=lambda draws: draws,
        check_health=llm.check_health,
        take_rows=llm.take_rows,
        prefix_of=llm.prefix_of,
        num_held=lambda: len(llm.running) + len(llm.held),
        pages=lambda: (
            sum(-(-len(sequence.ids) // BLOCK) for sequence in llm.running.values()),
            64,
        ),
    )
