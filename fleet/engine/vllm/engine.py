"""A vLLM engine in this process as the batch loop of a stage that answers in tokens: `step` runs
one step of vLLM.

Differs from the torch loop in two respects, as vLLM does: a paused request is computed on, and its
outputs are held until it is resumed; positions that come from vLLM's prefix cache are reported with
the first output, in whole blocks. Knows no stage and no Redis.

Between the halves of a split stage the blocks stay in vLLM: the prefill half computes a prompt and
samples no token of the answer; what it exports is vLLM's ticket, by which the decode half's vLLM
reads the blocks itself. Legend: n positions, H hidden size.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from fleet.core.errors import BadInput, EngineError, EngineStopped, FleetError, UnsupportedValue
from fleet.core.ids import DECODE, PREFILL, RequestId, Walk
from fleet.engine.base import (
    NUM_POSITIONS,
    TOKEN,
    Arrays,
    Engine,
    EngineInput,
    EngineOutput,
    EngineRequest,
    EngineStats,
    KVStats,
)
from fleet.engine.capabilities import KVBlocks, KVPagePool
from fleet.engine.turns import check_context, check_is_new
from fleet.engine.vllm.llm import (
    Draws,
    LlmOutput,
    StartedLlm,
    TappedRows,
    Ticket,
    logprob_arrays,
    no_rows,
    token_prompt,
)

log = logging.getLogger(__name__)

IDLE_STEP_S = 0.05
"""Interval of vLLM steps that only free blocks which the decode half has read."""
WAIT_STEP_S = 0.002
"""Interval of vLLM steps that only wait for blocks from the prefill half."""
READ_TIMEOUT_S = 10.0
"""Time after which a prompt is computed here if the prefill half's blocks have not arrived. vLLM
itself gives up an unreachable prefill half after 5 s.
"""


@dataclass(slots=True, kw_only=True, eq=False)
class _VllmRequest:
    """A submitted request. `waiting`: outputs that were computed and not returned yet; `drawing`:
    True while vLLM runs the request.

    `arrays`: the fed prompt. While `prefilling`, outputs of the prompt are still to come; outputs
    that repeat the history wait in `replayed`. `tapped`: hidden states of the tapped layer up to
    position `num_computed`; the first `num_prefilled` positions are returned. `reading_s`: start of
    the read of blocks from the prefill half. `num_cached`: function that counts the positions of a
    session's request in vLLM's prefix cache.
    """

    request: EngineRequest
    arrays: Arrays | None = None
    paused: bool = False
    drawing: bool = False
    prefilling: bool = False
    num_drawn: int = 0
    over: bool = False
    llm_id: str = ""
    ticket: Ticket | None = None
    reading_s: float | None = None
    num_cached: Callable[[], int] | None = None
    num_computed: int = 0
    num_prefilled: int = 0
    tapped: list[TappedRows] = field(default_factory=list[TappedRows])
    waiting: list[EngineOutput] = field(default_factory=list[EngineOutput])
    replayed: list[EngineOutput] = field(default_factory=list[EngineOutput])

    @property
    def begun(self) -> bool:
        """Return True once the request was added to vLLM, or its history turned out to be a
        complete answer.
        """
        return self.over or bool(self.llm_id)

    @property
    def ids(self) -> np.ndarray:
        assert self.arrays is not None, "a prompt that was not fed"
        return self.arrays["ids"]

    def add(self, walk: Walk, arrays: Arrays, *, final: bool = False, num_reused: int = 0) -> None:
        """Append an output to be returned; outputs of the answer are returned after all outputs of
        the prompt.
        """
        outputs = self.replayed if self.prefilling and walk != PREFILL else self.waiting
        outputs.append(
            EngineOutput(
                request_id=self.request.request_id,
                walk=walk,
                arrays=arrays,
                final=final,
                num_reused=num_reused,
            )
        )

    def fail(self, error: FleetError) -> None:
        self.over = True
        self.waiting.append(
            EngineOutput(request_id=self.request.request_id, walk=DECODE, error=error)
        )

    def end_prefill(self) -> None:
        self.prefilling = False
        self.waiting += self.replayed
        self.replayed = []


class VllmEngine(Engine):
    """Engine that runs a vLLM engine. Input arrays: `ids` int32 [prompt], and the arrays that
    `prompt` reads. Output arrays: `token` int32 [1].

    `end_ids`: tokens that end an answer. `prompt`: function that turns token ids (the prompt's,
    then known tokens of the answer) and the input arrays into a vLLM prompt; may raise BadInput.

    `row_positions`: function that returns the positions of a prompt whose hidden states of the
    tapped layer are wanted, or None. Such a prompt has outputs of its own, before the first token:
    `ids` of the next `piece_len` positions, and the hidden states `rows` [n, H] of `row_positions`
    [n] among them, if any. The pieces are the same whether positions are cached or not, because the
    outputs of a new owner continue the outputs of the previous one. `hands_off`: True for a prefill
    half: an output without arrays follows the prompt, after which the request is to be exported.
    """

    def __init__(
        self,
        started: StartedLlm,
        end_ids: frozenset[int],
        prompt: Callable[[Sequence[int], Arrays], object] = token_prompt,
        row_positions: Callable[[EngineRequest, np.ndarray], Sequence[int] | None] = no_rows,
        *,
        piece_len: int = 256,
        hands_off: bool = False,
        salt: int = 0,
    ) -> None:
        self._started = started
        self._llm = started.llm
        self._end_ids = end_ids
        self._prompt, self._row_positions = prompt, row_positions
        self._piece_len = piece_len
        self._hands_off = hands_off
        self._salt = salt
        self._requests: dict[RequestId, _VllmRequest] = {}
        self._by_llm_id: dict[str, _VllmRequest] = {}
        self._prefixes = VllmPrefixes()
        self.prefixes = self._prefixes
        self.kv = VllmTickets(self._requests, hands_off=hands_off)
        self._next_step_s = 0.0
        self._rows_reused = 0

    def submit(self, request: EngineRequest) -> None:
        """Add a request. Raises: OutOfPages if vLLM's KV cache could never hold it; BadInput if its
        id is in use; UnsupportedValue for `logprob_ids`, since vLLM 0.32 and 0.33 then return wrong
        log probabilities for all other requests of the same step.
        """
        check_is_new(request.request_id, self._requests)
        if request.sampling.logprob_ids:
            raise UnsupportedValue("logprob_ids: vLLM gives no log probabilities of chosen tokens")
        check_context(
            int(request.params[NUM_POSITIONS]),
            self._started.max_positions,
            ", what its KV cache holds",
        )
        self._requests[request.request_id] = _VllmRequest(request=request)

    def feed(self, request_id: RequestId, piece: EngineInput) -> int:
        running = self._requests.get(request_id)
        if running is None:
            return 0
        assert piece.final and running.arrays is None, "a prompt arrives in one piece"
        running.arrays = {**piece.arrays, "ids": np.asarray(piece.arrays["ids"], np.int32)}
        return 0

    def pause(self, request_id: RequestId, *, paused: bool) -> None:
        running = self._requests.get(request_id)
        if running is not None:
            running.paused = paused

    def is_ready(self) -> bool:
        return self.due_in_s() == 0.0

    def due_in_s(self) -> float:
        is_reading = False
        for running in self._active():
            if (
                running.waiting
                or not running.begun
                or (running.drawing and running.reading_s is None)
            ):
                return 0.0
            is_reading = is_reading or running.drawing
        if not is_reading and not self._holds_ended():
            return math.inf
        return max(0.0, self._next_step_s - time.monotonic())

    def _active(self) -> Iterator[_VllmRequest]:
        return (
            running
            for running in self._requests.values()
            if not running.paused and running.arrays is not None
        )

    def _holds_ended(self) -> bool:
        """Return True if vLLM holds blocks of ended requests for another vLLM."""
        return self._started.num_held() > sum(
            running.drawing for running in self._requests.values()
        )

    def step(self) -> Sequence[EngineOutput]:
        for running in self._active():
            if not running.begun:
                self._try_begin(running)
        is_drawing = any(running.drawing for running in self._active())
        if is_drawing or self._holds_ended():
            self._step_llm()
        self._next_step_s = time.monotonic() + (WAIT_STEP_S if is_drawing else IDLE_STEP_S)
        outputs: list[EngineOutput] = []
        for running in list(self._active()):
            if running.waiting:
                outputs += running.waiting
                running.waiting = []
                if outputs[-1].error is not None:
                    self.abort(running.request.request_id)
                elif outputs[-1].final:
                    self.finish(running.request.request_id)
        return outputs

    def _try_begin(self, running: _VllmRequest) -> None:
        try:
            self._begin(running)
        except BadInput as error:
            running.fail(error)

    def _begin(self, running: _VllmRequest) -> None:
        """Add a request to vLLM: its prompt and the known tokens of its answer. Raises:
        BadInput.
        """
        request, prompt_ids, vocab_size = running.request, running.ids, self._started.vocab_size
        if not len(prompt_ids) or not 0 <= prompt_ids.min() <= prompt_ids.max() < vocab_size:
            raise BadInput(
                f"prompt_ids: empty, or an id outside 0..{vocab_size - 1}", param="messages"
            )
        row_positions = self._row_positions(request, prompt_ids) if running.ticket is None else None
        running.prefilling = row_positions is not None or self._hands_off
        known = [int(token) for token in request.history.get(TOKEN, ())]
        for token in known:
            if not running.over:
                self._record(running, token)
        if running.over and row_positions is None:
            running.end_prefill()
            return
        only_prompt = running.over or self._hands_off
        draws = Draws(
            request=request,
            num_known=0 if running.over else len(known),
            max_tokens=1 if only_prompt else request.sampling.max_tokens - len(known),
            end_ids=frozenset() if only_prompt else self._end_ids,
            num_prompt=len(prompt_ids),
            row_positions=row_positions,
            hands_off=self._hands_off and not running.over,
            ticket=running.ticket,
            salt=self._salt,
        )
        self._add_to_llm(running, draws, [*prompt_ids.tolist(), *known[: draws.num_known]])

    def _add_to_llm(self, running: _VllmRequest, draws: Draws, ids: Sequence[int]) -> None:
        assert running.arrays is not None
        prompt = self._prompt(ids, running.arrays)
        try:
            running.llm_id = self._llm.add_request(
                draws.request.request_id, prompt, self._started.sampling_params(draws)
            )
        except ValueError as error:
            raise BadInput(
                f"messages: vLLM refuses the prompt: {error}", param="messages"
            ) from error
        self._by_llm_id[running.llm_id] = running
        running.drawing = True
        if draws.request.session:
            running.num_cached = self._started.prefix_of(running.llm_id)
        if draws.ticket is not None:
            running.reading_s = time.monotonic()

    def _step_llm(self) -> None:
        llm_outputs = self._llm.step()
        for tapped in self._started.take_rows():
            running = self._by_llm_id.get(tapped.llm_id)
            if running is not None:
                self._on_rows(running, tapped)
        for output in llm_outputs:
            running = self._requests.get(RequestId(output.request_id))
            if running is not None and running.drawing:
                self._on_output(running, output)
        overdue_s = time.monotonic() - READ_TIMEOUT_S
        for running in self._requests.values():
            if running.reading_s is not None and running.reading_s < overdue_s:
                self._compute_instead(running)

    def _compute_instead(self, running: _VllmRequest) -> None:
        """Let this vLLM compute a prompt whose blocks did not arrive from the prefill half in
        time.
        """
        request = running.request
        log.warning(
            "request %s: its blocks could not be read in %.0f s; it is computed here",
            request.request_id,
            READ_TIMEOUT_S,
        )
        self._forget_llm(running)
        running.ticket = running.reading_s = None
        known = [int(token) for token in request.history.get(TOKEN, ())]
        draws = Draws(
            request=request,
            num_known=len(known),
            max_tokens=request.sampling.max_tokens - len(known),
            end_ids=self._end_ids,
            num_prompt=len(running.ids),
            salt=self._salt,
        )
        self._add_to_llm(running, draws, [*running.ids.tolist(), *known])

    def finish(self, request_id: RequestId) -> None:
        running = self._requests.get(request_id)
        self.abort(request_id)
        if running is not None and running.num_cached is not None:
            self._prefixes.put(running.request.session, running.num_cached)

    def abort(self, request_id: RequestId) -> None:
        running = self._requests.pop(request_id, None)
        if running is not None:
            self._forget_llm(running)

    def _forget_llm(self, running: _VllmRequest) -> None:
        self._by_llm_id.pop(running.llm_id, None)
        if running.drawing:
            self._llm.abort_request([running.request.request_id])

    def check(self) -> None:
        try:
            self._started.check_health()
        except Exception as error:  # an error of any kind from the processes of the executor
            raise EngineStopped(
                f"vLLM does not compute any more: {str(error).partition(chr(10))[0]}"
            ) from error

    def stats(self) -> EngineStats:
        used, total = self._started.pages()
        return EngineStats(
            running=len(self._requests),
            ready=sum(bool(running.waiting or running.drawing) for running in self._active()),
            kv=KVStats(pages_used=used, pages_total=total, rows_reused=self._rows_reused),
        )

    def _on_rows(self, running: _VllmRequest, tapped: TappedRows) -> None:
        """Add outputs for the whole pieces of a prompt computed so far and, after the last piece,
        outputs of the history.
        """
        running.tapped.append(tapped)
        running.num_computed = tapped.stop
        length = len(running.ids)
        while running.num_prefilled < length:
            start, stop = (
                running.num_prefilled,
                min(running.num_prefilled + self._piece_len, length),
            )
            if stop > running.num_computed:
                return
            running.add(
                PREFILL,
                {"ids": running.ids[start:stop], **_rows_between(running.tapped, start, stop)},
            )
            running.num_prefilled = stop
        running.tapped.clear()
        if not self._hands_off or running.over:
            running.end_prefill()

    def _on_output(self, running: _VllmRequest, output: LlmOutput) -> None:
        running.reading_s = None
        if output.finished:
            running.drawing = False
        if self._hands_off and not running.over:
            self._on_prefilled(running, output)
            return
        at_first = running.num_drawn == len(running.request.history.get(TOKEN, ()))
        num_reused = (output.num_cached_tokens or 0) if at_first else 0
        self._rows_reused += num_reused
        made, num_top = output.outputs[0], running.request.sampling.top_logprobs
        for at, token in enumerate(made.token_ids):
            if not running.over:
                self._record(running, token, num_reused, logprob_arrays(made, at, num_top))
                num_reused = 0
        if output.finished and (not running.over or running.prefilling):
            self._fail(running, output)

    def _on_prefilled(self, running: _VllmRequest, output: LlmOutput) -> None:
        """Add the output after which a computed prompt is handed off. The token that vLLM sampled
        with it is dropped; the decode half samples it again.
        """
        if not output.finished:
            return
        if not output.outputs[0].token_ids:
            self._fail(running, output)
            return
        running.ticket = output.kv_transfer_params
        running.end_prefill()
        running.add(DECODE, {}, num_reused=output.num_cached_tokens or 0)
        self._rows_reused += output.num_cached_tokens or 0

    def _fail(self, running: _VllmRequest, output: LlmOutput) -> None:
        running.fail(EngineError(f"vLLM ended the answer early: {output.outputs[0].finish_reason}"))

    def _record(
        self, running: _VllmRequest, token: int, num_reused: int = 0, more: Arrays | None = None
    ) -> None:
        """Add the output of a sampled token, with `more` arrays: `final` at an end or stop token,
        or the length limit.
        """
        running.num_drawn += 1
        sampling = running.request.sampling
        ends = token in self._end_ids or token in sampling.stop_token_ids
        running.over = ends or running.num_drawn >= sampling.max_tokens
        arrays = {TOKEN: np.array([token], dtype=np.int32), **(more or {})}
        running.add(DECODE, arrays, final=running.over, num_reused=num_reused)


class VllmPrefixes:
    """Sessions in vLLM's prefix cache: for each a function that returns the number of cached
    positions of its last request, in whole blocks. vLLM counts the blocks of ended requests as
    free, and reuses them when it needs blocks.
    """

    def __init__(self) -> None:
        self._sessions: dict[str, Callable[[], int]] = {}

    def put(self, session: str, num_cached: Callable[[], int]) -> None:
        self.drop(session)
        if num_cached():
            self._sessions[session] = num_cached

    def num_rows(self, session: str) -> int:
        num_cached = self._sessions.get(session)
        return num_cached() if num_cached is not None else 0

    def drop(self, session: str | None = None) -> None:
        for name in list(self._sessions) if session is None else [session]:
            self._sessions.pop(name, None)


class VllmTickets:
    """Hand-offs that vLLM performs itself: an exported ticket lets another vLLM read the blocks."""

    pages: KVPagePool | None = None

    def __init__(self, requests: dict[RequestId, _VllmRequest], *, hands_off: bool) -> None:
        self._requests, self._hands_off = requests, hands_off

    def export_blocks(self, request_id: RequestId) -> KVBlocks | None:
        """Return a computed prompt's ticket, at the first call only; None if there is no ticket.
        vLLM holds the prompt's blocks until they are read or the ticket's lease ends.
        """
        running = self._requests.get(request_id)
        if running is None or running.ticket is None or not self._hands_off:
            return None
        ticket, running.ticket = json.dumps(running.ticket).encode(), None
        return KVBlocks(num_rows=len(running.ids), data=np.frombuffer(ticket, np.uint8))

    def import_blocks(self, request_id: RequestId, blocks: KVBlocks) -> bool:
        running = self._requests.get(request_id)
        if running is None or running.begun:
            return False
        running.ticket = json.loads(blocks.data.tobytes())
        return True


def _rows_between(tapped: Sequence[TappedRows], start: int, stop: int) -> Arrays:
    """Return the hidden states of positions from `start` up to `stop`; empty if there are none."""
    positions = np.concatenate([each.positions for each in tapped])
    within = (positions >= start) & (positions < stop)
    if not within.any():
        return {}
    rows = np.concatenate([each.rows for each in tapped if len(each.positions)])
    return {"row_positions": positions[within], "rows": rows[within]}
