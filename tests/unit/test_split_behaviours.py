"""Behaviours of split prefill and decode, on doubles: roles and tickets.
`tests/split_behaviours.md` has a table of these tests.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from fleet.config import load_config
from fleet.config.placement import for_role
from fleet.core.ids import DECODE, PREFILL, RequestId, StageName
from fleet.core.request import Sampling
from fleet.engine.base import NUM_POSITIONS, TOKEN, EngineInput, EngineOutput, EngineRequest
from fleet.engine.capabilities import KVBlocks
from fleet.engine.vllm.engine import VllmEngine
from fleet.engine.vllm.llm import Draws, Ticket
from fleet.graphs.qwen3_omni import THINKER
from tests.capabilities import kv_of
from tests.contract.llm_double import DoubleOutput, LlmDouble, started
from tests.support import REPO

REQUEST = RequestId("r")
MEDIA_ID, NUM_TOKENS, PIECE_LEN = 7, 6, 40
PROMPT = (*range(10, 40), *[MEDIA_ID] * 25, *range(50, 98))


@dataclass(slots=True)
class RecordingLlm(LlmDouble):
    """Double of vLLM that records the calls of its engine."""

    draws: list[Draws] = field(default_factory=list[Draws])
    prompts: list[list[int]] = field(default_factory=list[list[int]])

    def add_request(self, request_id: str, prompt: object, params: object) -> str:
        assert isinstance(params, Draws) and isinstance(prompt, dict)
        self.draws.append(params)
        self.prompts.append(prompt["prompt_token_ids"])
        return LlmDouble.add_request(self, request_id, prompt, params)


def media_positions(request: EngineRequest, ids: np.ndarray) -> Sequence[int] | None:
    return np.flatnonzero(ids == MEDIA_ID).tolist()


def half(llm: LlmDouble, end_ids: Sequence[int] = (), *, prefill: bool) -> VllmEngine:
    return VllmEngine(
        started(llm),
        frozenset(end_ids),
        row_positions=media_positions,
        piece_len=PIECE_LEN,
        hands_off=prefill,
    )


def engine_request(request_id: RequestId = REQUEST) -> EngineRequest:
    sampling = Sampling(max_tokens=NUM_TOKENS, stop=("the end",), seed=3)
    return EngineRequest(request_id=request_id, sampling=sampling, params={NUM_POSITIONS: "128"})


def begin(engine: VllmEngine, request: EngineRequest, prompt: Sequence[int] = PROMPT) -> None:
    engine.submit(request)
    piece = EngineInput(walk=PREFILL, arrays={"ids": np.array(prompt, np.int32)}, final=True)
    engine.feed(request.request_id, piece)


def run(engine: VllmEngine, num_steps: int = 40) -> list[EngineOutput]:
    return [output for _ in range(num_steps) for output in engine.step()]


def tokens_of(outputs: Sequence[EngineOutput], request_id: RequestId = REQUEST) -> list[int]:
    mine = [output for output in outputs if output.request_id == request_id]
    return [int(output.arrays[TOKEN][0]) for output in mine if TOKEN in output.arrays]


def prefilled(
    llm: LlmDouble, request_id: RequestId = REQUEST, prompt: Sequence[int] = PROMPT
) -> KVBlocks:
    """Run a request in the prefill role; return its ticket."""
    engine = half(llm, prefill=True)
    begin(engine, engine_request(request_id), prompt)
    run(engine)
    blocks = kv_of(engine).export_blocks(request_id)
    assert blocks is not None
    engine.finish(request_id)
    return blocks


@pytest.fixture
def answer() -> list[int]:
    engine = half(LlmDouble(), prefill=False)
    begin(engine, engine_request())
    return tokens_of(run(engine))


# Roles


def test_split_stage_has_a_prefill_and_a_decode_role() -> None:
    prefill, decode = load_config(None, ("stages.thinker.split={}",)).roles_of(THINKER)
    assert (prefill.name, prefill.walks, prefill.next) == (
        "thinker.prefill",
        (PREFILL,),
        "thinker.decode",
    )
    assert (decode.name, decode.walks, decode.next) == ("thinker.decode", (DECODE,), None)


def test_stage_without_split_has_one_role_that_hands_off_to_none() -> None:
    (role,) = load_config(None).roles_of(THINKER)
    assert (role.name, role.walks, role.next) == (THINKER, (PREFILL, DECODE), None)


def test_each_split_stage_of_a_pipeline_hands_off_to_its_own_decode_half() -> None:
    """Every split stage of a pipeline hands off to its own decode role; more than one stage may be
    split.
    """
    roles = load_config(REPO / "configs" / "both_pd.yaml").roles()
    assert [(role.name, role.next) for role in roles] == [
        ("thinker.prefill", "thinker.decode"),
        ("thinker.decode", None),
        ("talker.prefill", "talker.decode"),
        ("talker.decode", None),
        ("code2wav", None),
    ]


def test_half_belongs_to_its_stage_by_name_and_not_by_position() -> None:
    one = load_config(
        None, ("stages.code2wav.threads=1", "stages.thinker.split={}", "stages.talker.split={}")
    )
    other = load_config(
        None, ("stages.talker.split={}", "stages.thinker.split={}", "stages.code2wav.threads=1")
    )
    assert one.roles() == other.roles()


def test_sampling_given_once_applies_to_both_halves() -> None:
    config = load_config(
        None, ("stages.thinker.split={}", "stages.thinker.sampling.temperature=0.4")
    )
    halves = [for_role(config, role).stage(THINKER).sampling for role in config.roles_of(THINKER)]
    assert halves == [{"temperature": 0.4}, {"temperature": 0.4}]
    prefill, decode = RecordingLlm(), RecordingLlm()
    blocks = prefilled(prefill)
    engine = half(decode, prefill=False)
    begin(engine, engine_request())
    kv_of(engine).import_blocks(REQUEST, blocks)
    run(engine)
    assert (
        prefill.draws[0].request.sampling
        == decode.draws[0].request.sampling
        == engine_request().sampling
    )


@pytest.mark.parametrize(
    ("stage", "engine"), [("thinker", "torch"), ("talker", "torch"), ("thinker", "vllm")]
)
def test_split_needs_no_further_settings(stage: str, engine: str) -> None:
    """A split needs no further settings: connector, role and buffers follow from the stage and the
    role's name.
    """
    settings = (f"stages.{stage}.engine={engine}", f"stages.{stage}.split={{}}")
    assert len(load_config(None, settings).roles_of(StageName(stage))) == 2


# Draws and tickets


def test_prefill_half_draws_one_token_without_end_conditions() -> None:
    llm = RecordingLlm()
    engine, request = half(llm, end_ids=(11, 12), prefill=True), engine_request()
    begin(engine, request)
    run(engine)
    (draws,) = llm.draws
    assert (draws.max_tokens, draws.end_ids, draws.hands_off, draws.ticket) == (
        1,
        frozenset(),
        True,
        None,
    )
    assert draws.row_positions == list(range(30, 55)), "rows are wanted beside the ticket"
    assert request == engine_request(), "the request's own settings are unchanged"


def test_decode_half_draws_the_whole_answer_from_the_same_prompt() -> None:
    prefill, decode = RecordingLlm(), RecordingLlm()
    blocks = prefilled(prefill)
    engine = half(decode, end_ids=(11, 12), prefill=False)
    begin(engine, engine_request())
    assert kv_of(engine).import_blocks(REQUEST, blocks)
    run(engine)
    (draws,) = decode.draws
    assert (draws.max_tokens, draws.end_ids, draws.hands_off) == (NUM_TOKENS, {11, 12}, False)
    assert draws.row_positions is None, "the rows of the prompt are those of the prefill half"
    assert decode.prompts == prefill.prompts == [list(PROMPT)]


def test_answer_of_one_token_is_drawn_by_the_decode_half(answer: list[int]) -> None:
    """An answer of one token is sampled by the decode role: the first token ends the answer, which
    the prefill role must not see.
    """
    prefill = LlmDouble()
    engine = half(prefill, end_ids=answer[:1], prefill=True)
    begin(engine, engine_request())
    outputs = run(engine)
    assert not tokens_of(outputs) and not outputs[-1].final
    blocks = kv_of(engine).export_blocks(REQUEST)
    assert blocks is not None
    decode = half(LlmDouble(sources=[prefill]), end_ids=answer[:1], prefill=False)
    begin(decode, engine_request())
    assert kv_of(decode).import_blocks(REQUEST, blocks)
    outputs = run(decode)
    assert tokens_of(outputs) == answer[:1] and outputs[-1].final


@dataclass(slots=True)
class TicketLlm(LlmDouble):
    """Double of vLLM that ends each request with the same ticket."""

    ticket: Ticket = field(default_factory=dict[str, object])

    def step(self) -> Sequence[DoubleOutput]:
        outputs = LlmDouble.step(self)
        for output in outputs:
            output.kv_transfer_params = self.ticket if output.finished else None
        return outputs


def test_ticket_reaches_the_decode_half_unchanged() -> None:
    """The ticket reaches the decode role unchanged. Only vLLM interprets its host, port and blocks,
    which belong to the prefill role's engine.
    """
    ticket: Ticket = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_host": "10.0.0.7",
        "remote_port": 5601,
        "remote_engine_id": "e",
        "remote_request_id": "r-1a2b3c4d",
        "remote_block_ids": [[1, 2], [5]],
        "tp_size": 1,
        "none": None,
    }
    blocks = prefilled(TicketLlm(ticket=ticket))
    decode = RecordingLlm()
    engine = half(decode, prefill=False)
    begin(engine, engine_request())
    assert kv_of(engine).import_blocks(REQUEST, blocks)
    engine.step()
    assert decode.draws[0].ticket == ticket


def test_unsplit_stage_gives_and_wants_no_ticket() -> None:
    llm = RecordingLlm()
    engine = half(llm, prefill=False)
    begin(engine, engine_request())
    assert len(tokens_of(run(engine, 4))) > 0
    assert kv_of(engine).export_blocks(REQUEST) is None
    assert (llm.draws[0].hands_off, llm.draws[0].ticket) == (False, None)


def test_ticket_is_given_once_and_for_the_whole_prompt() -> None:
    engine = half(LlmDouble(), prefill=True)
    begin(engine, engine_request())
    assert kv_of(engine).export_blocks(REQUEST) is None, (
        "before the prompt is computed there is none"
    )
    run(engine)
    blocks = kv_of(engine).export_blocks(REQUEST)
    assert blocks is not None and blocks.num_rows == len(PROMPT)
    assert kv_of(engine).export_blocks(REQUEST) is None


def test_ticket_is_dropped_with_its_aborted_request() -> None:
    blocks = prefilled(LlmDouble())
    llm = RecordingLlm()
    engine = half(llm, prefill=False)
    begin(engine, engine_request())
    assert kv_of(engine).import_blocks(REQUEST, blocks)
    for _ in range(2):
        engine.abort(REQUEST)
    begin(engine, engine_request())
    engine.step()
    assert [draws.ticket for draws in llm.draws] == [None], (
        "the next request of this name computes its prompt"
    )


def test_ticket_of_an_unknown_request_is_refused() -> None:
    blocks = prefilled(LlmDouble())
    engine = half(LlmDouble(), prefill=False)
    engine.abort(REQUEST)
    assert kv_of(engine).export_blocks(REQUEST) is None
    assert not kv_of(engine).import_blocks(REQUEST, blocks)


def test_decode_half_without_ticket_computes_the_prompt(answer: list[int]) -> None:
    llm = RecordingLlm()
    engine = half(llm, prefill=False)
    begin(engine, engine_request())
    assert tokens_of(run(engine)) == answer and llm.draws[0].ticket is None


def test_tickets_are_matched_by_request_and_not_by_order() -> None:
    source, first, second = LlmDouble(), RequestId("first"), RequestId("second")
    other = [token + 1 for token in PROMPT]
    tickets = {first: prefilled(source, first), second: prefilled(source, second, other)}
    engine = half(LlmDouble(sources=[source]), prefill=False)
    for request_id, prompt in ((second, other), (first, PROMPT)):
        begin(engine, engine_request(request_id), prompt)
        assert kv_of(engine).import_blocks(request_id, tickets[request_id])
    run(engine)
    assert not source.held, "each ticket was read by the request of its prompt"
