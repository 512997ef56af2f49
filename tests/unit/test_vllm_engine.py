"""The engine around vLLM, on a double of it: prompts with tapped hidden states, and requests
between the roles of a split stage.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fleet.core.chunk import LOGPROBS, TOP_IDS
from fleet.core.ids import RequestId, Walk
from fleet.core.request import Sampling
from fleet.engine.base import NUM_POSITIONS, TOKEN, EngineInput, EngineOutput, EngineRequest
from fleet.engine.capabilities import KVBlocks
from fleet.engine.vllm import engine as module
from fleet.engine.vllm.engine import VllmEngine
from fleet.engine.vllm.llm import logprob_arrays
from tests.capabilities import kv_of, prefixes_of
from tests.contract.llm_double import BLOCK, DoubleCompletion, LlmDouble, rows_of, started

REQUEST = RequestId("r")
PREFILL, DECODE = Walk("prefill"), Walk("decode")
TAPPED_ID = 7
PROMPT = [*range(10, 40), *[TAPPED_ID] * 25, *range(50, 98)]
PIECE_LEN = 40


def tapped_positions(request: EngineRequest, ids: np.ndarray) -> Sequence[int]:
    return np.flatnonzero(ids == TAPPED_ID).tolist()


def tapping(
    llm: LlmDouble, end_ids: frozenset[int] = frozenset(), *, hands_off: bool = False
) -> VllmEngine:
    return VllmEngine(
        started(llm),
        end_ids,
        row_positions=tapped_positions,
        piece_len=PIECE_LEN,
        hands_off=hands_off,
    )


def plain(llm: LlmDouble, *, hands_off: bool = False) -> VllmEngine:
    return VllmEngine(started(llm), frozenset(), hands_off=hands_off)


def begin(
    engine: VllmEngine,
    known: Sequence[int] = (),
    request_id: RequestId = REQUEST,
    max_tokens: int = 6,
    session: str = "",
    stop_token_ids: tuple[int, ...] = (),
) -> None:
    engine.submit(
        EngineRequest(
            request_id=request_id,
            sampling=Sampling(max_tokens=max_tokens, stop_token_ids=stop_token_ids),
            params={NUM_POSITIONS: "128"},
            history={TOKEN: np.array(known, np.int32)} if known else {},
            session=session,
        )
    )
    engine.feed(
        request_id,
        EngineInput(walk=PREFILL, arrays={"ids": np.array(PROMPT, np.int32)}, final=True),
    )


def run(engine: VllmEngine, steps: int = 40) -> list[EngineOutput]:
    outputs: list[EngineOutput] = []
    for _ in range(steps):
        outputs += engine.step()
    return outputs


def tokens_of(outputs: Sequence[EngineOutput]) -> list[int]:
    return [int(output.arrays[TOKEN][0]) for output in outputs if TOKEN in output.arrays]


def prompt_of(outputs: Sequence[EngineOutput]) -> list[EngineOutput]:
    return [output for output in outputs if output.walk == PREFILL]


@pytest.fixture
def answer() -> list[int]:
    engine = plain(LlmDouble())
    begin(engine)
    return tokens_of(run(engine))


def test_stop_token_ends_the_answer_as_its_last_token(answer: list[int]) -> None:
    engine = plain(LlmDouble())
    begin(engine, stop_token_ids=(answer[2],))
    outputs = run(engine)
    assert tokens_of(outputs) == answer[:3] and outputs[-1].final


def test_logprobs_of_a_token_are_followed_by_those_of_the_most_likely_ids() -> None:
    listed: Any = {
        9: SimpleNamespace(logprob=-7.0, rank=88),
        3: SimpleNamespace(logprob=-1.5, rank=2),
        5: SimpleNamespace(logprob=-0.5, rank=1),
    }
    made = DoubleCompletion(token_ids=[9], logprobs=[listed])
    arrays = logprob_arrays(made, 0, 2)
    assert arrays[LOGPROBS].tolist() == [[-7.0, -0.5, -1.5]] and arrays[TOP_IDS].tolist() == [
        [5, 3]
    ]
    assert logprob_arrays(made, 0, 0)[TOP_IDS].shape == (1, 0)
    assert logprob_arrays(made, 0, None) == {}


def test_tapped_rows_are_returned_in_pieces_before_the_answer(answer: list[int]) -> None:
    engine = tapping(LlmDouble())
    begin(engine)
    outputs = run(engine)
    pieces = prompt_of(outputs)
    assert outputs[: len(pieces)] == pieces and tokens_of(outputs) == answer
    assert [len(piece.arrays["ids"]) for piece in pieces] == [40, 40, 23]
    assert np.concatenate([piece.arrays["ids"] for piece in pieces]).tolist() == PROMPT
    positions = np.concatenate([piece.arrays["row_positions"] for piece in pieces[:2]])
    assert positions.tolist() == list(range(30, 55)) and "rows" not in pieces[2].arrays
    rows = np.concatenate([piece.arrays["rows"] for piece in pieces[:2]])
    assert (rows == rows_of(PROMPT, positions)).all()


def test_pieces_are_cut_alike_when_the_prompt_is_cached() -> None:
    llm = LlmDouble()
    cuts: list[list[int]] = []
    for name in ("first", "again"):
        engine = tapping(llm)
        begin(engine, request_id=RequestId(name))
        pieces = prompt_of(run(engine))
        cuts.append([len(piece.arrays["ids"]) for piece in pieces])
        assert sum(len(piece.arrays.get("rows", ())) for piece in pieces) == 25
    assert cuts[0] == cuts[1]


@pytest.mark.parametrize("num_known", [1, 4, 6])
def test_continued_answer_returns_rows_before_its_history(
    answer: list[int], num_known: int
) -> None:
    engine = tapping(LlmDouble())
    begin(engine, answer[:num_known])
    outputs = run(engine)
    assert [output.walk for output in outputs] == [PREFILL] * 3 + [DECODE] * 6
    assert tokens_of(outputs) == answer and outputs[-1].final


def test_paused_request_computes_nothing_and_returns_nothing(answer: list[int]) -> None:
    llm = LlmDouble()
    engine = tapping(llm)
    begin(engine)
    engine.pause(REQUEST, paused=True)
    assert not engine.is_ready() and not run(engine, 3) and not llm.running
    engine.pause(REQUEST, paused=False)
    assert tokens_of(run(engine)) == answer


def test_session_counts_the_whole_blocks_that_vllm_still_has() -> None:
    llm = LlmDouble()
    engine = plain(llm)
    begin(engine, session="talk")
    run(engine)
    assert (
        prefixes_of(engine).num_rows("talk") == len(PROMPT) // BLOCK * BLOCK
        and prefixes_of(engine).num_rows("other") == 0
    )
    begin(engine, session="talk", request_id=RequestId("next"))
    assert sum(output.num_reused for output in run(engine)) == prefixes_of(engine).num_rows("talk")
    llm.cached.clear()
    assert prefixes_of(engine).num_rows("talk") == 0, "vLLM needed the blocks"


@pytest.mark.parametrize("session", [None, "talk"])
def test_dropped_session_counts_no_rows(session: str | None) -> None:
    engine = plain(LlmDouble())
    begin(engine, session="talk")
    run(engine)
    prefixes_of(engine).drop(session)
    assert prefixes_of(engine).num_rows("talk") == 0


def test_aborted_turn_leaves_the_rows_of_the_one_before() -> None:
    engine = plain(LlmDouble())
    begin(engine, session="talk")
    run(engine)
    num_rows = prefixes_of(engine).num_rows("talk")
    begin(engine, session="talk", request_id=RequestId("next"))
    engine.step()
    engine.abort(RequestId("next"))
    assert prefixes_of(engine).num_rows("talk") == num_rows > 0


def hand_over(prefill: LlmDouble, known: Sequence[int] = ()) -> tuple[list[EngineOutput], KVBlocks]:
    """Run a request in a prefill role; return its outputs and the ticket."""
    engine = tapping(prefill, hands_off=True)
    begin(engine, known)
    outputs = run(engine)
    blocks = kv_of(engine).export_blocks(REQUEST)
    assert blocks is not None and blocks.num_rows == len(PROMPT)
    assert kv_of(engine).export_blocks(REQUEST) is None, "a ticket is given once"
    engine.finish(REQUEST)
    assert not prefill.running and len(prefill.held) == 1
    return outputs, blocks


@pytest.mark.parametrize("num_known", [0, 3])
def test_split_answer_is_drawn_by_the_decode_half_from_its_first_token(
    answer: list[int], num_known: int
) -> None:
    prefill = LlmDouble()
    outputs, blocks = hand_over(prefill, answer[:num_known])
    assert tokens_of(outputs) == answer[:num_known]
    assert not outputs[-1].arrays and not outputs[-1].final, "the output that hands the request off"
    assert len(prompt_of(outputs)) == 3

    decode = LlmDouble(sources=[prefill])
    engine = tapping(decode)
    begin(engine, answer[:num_known])
    assert kv_of(engine).import_blocks(REQUEST, blocks)
    outputs = run(engine)
    assert tokens_of(outputs) == answer and not prompt_of(outputs)
    assert not prefill.held, "the decode half has read the blocks"


def test_complete_answer_in_the_request_ends_in_the_prefill_half(answer: list[int]) -> None:
    prefill = LlmDouble()
    engine = tapping(prefill, hands_off=True)
    begin(engine, answer)
    outputs = run(engine)
    assert tokens_of(outputs) == answer and outputs[-1].final and len(prompt_of(outputs)) == 3
    assert not prefill.held


def test_ticket_is_refused_once_the_request_runs(answer: list[int]) -> None:
    _, blocks = hand_over(LlmDouble())
    engine = plain(LlmDouble())
    begin(engine)
    engine.step()
    assert not kv_of(engine).import_blocks(REQUEST, blocks)
    assert not kv_of(engine).import_blocks(RequestId("unknown"), blocks)
    assert tokens_of(run(engine)) == answer[3:] or tokens_of(run(engine)) == []


def test_lost_rows_are_recomputed_by_a_decode_half_without_ticket(answer: list[int]) -> None:
    engine = tapping(LlmDouble())
    begin(engine, answer[:2])
    outputs = run(engine)
    assert (
        sum(len(output.arrays.get("rows", ())) for output in outputs) == 25
        and tokens_of(outputs) == answer
    )


def test_blocks_that_do_not_arrive_are_computed_instead(
    answer: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, blocks = hand_over(LlmDouble())
    decode = LlmDouble(unreadable=True)
    engine = plain(decode)
    begin(engine, answer[:1])
    assert kv_of(engine).import_blocks(REQUEST, blocks)
    assert tokens_of(run(engine)) == answer[:1] and 0.0 <= engine.due_in_s() <= module.WAIT_STEP_S
    monkeypatch.setattr(module, "READ_TIMEOUT_S", -1.0)
    assert tokens_of(run(engine)) == answer[1:]


def test_prefill_half_steps_while_blocks_are_held() -> None:
    prefill = LlmDouble()
    engine = plain(prefill, hands_off=True)
    begin(engine)
    run(engine)
    engine.finish(REQUEST)
    assert 0.0 <= engine.due_in_s() <= module.IDLE_STEP_S
    prefill.held.clear()
    assert engine.due_in_s() == float("inf")


def test_aborted_request_leaves_nothing() -> None:
    llm = LlmDouble()
    engine = tapping(llm)
    for number in range(20):
        request_id = RequestId(f"r{number}")
        begin(engine, request_id=request_id)
        run(engine, number % 4)
        engine.abort(request_id)
    assert not llm.running and engine.stats().running == 0 and engine.due_in_s() == float("inf")
