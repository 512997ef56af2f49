"""Prompt and answer of a split Thinker as the Talker reads them, on doubles.
`tests/split_behaviours.md` has a table of these tests.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from fleet.config.credits import Credits
from fleet.core.errors import ChunkOrderError
from fleet.core.ids import DECODE, PREFILL, EdgeName, Epoch, RequestId
from fleet.core.request import RequestSpec, Sampling
from fleet.engine.base import NUM_POSITIONS, TOKEN, Arrays, EngineOutput
from fleet.engine.vllm.llm import TappedRows
from fleet.graphs import EACH
from fleet.graphs.qwen3_omni import QWEN3_OMNI, TALKER, THINKER
from fleet.models.qwen3_omni.roles import HEADER_LEN, RoleIds
from fleet.models.qwen3_omni.talker import NUM_OPENING_ROWS
from fleet.processing.tokenizer import Tokenizer
from fleet.stages.base import LoggedOutput
from fleet.stages.qwen3_omni.talker import TalkerAdapter
from fleet.stages.qwen3_omni.thinker import ThinkerAdapter
from fleet.stages.stop_strings import StopDetector
from fleet.worker.task.outbound import Draft, EdgeLog, OutboundEdge
from fleet.worker.task.task import Task
from tests.capabilities import kv_of
from tests.contract.llm_double import LlmDouble, rows_of
from tests.unit.test_split_behaviours import (
    MEDIA_ID,
    PROMPT,
    REQUEST,
    begin,
    engine_request,
    half,
    run,
    tokens_of,
)

TEXT, THOUGHT, CODES = EdgeName("text"), EdgeName("thought"), EdgeName("codes")
START, SYSTEM, USER, ASSISTANT, LINE = 1, 2, 3, 4, 5
ROLES = RoleIds(start=START, user=USER, assistant=ASSISTANT)


@pytest.fixture
def answer() -> list[int]:
    engine = half(LlmDouble(), prefill=False)
    begin(engine, engine_request())
    return tokens_of(run(engine))


def never_loaded() -> Tokenizer:
    raise AssertionError("without stop strings nothing is detokenized")


SPEC = RequestSpec(
    id=REQUEST, graph="qwen3_omni", prompt_ids=PROMPT, outputs=(TEXT, EdgeName("audio"))
)


def thinker() -> ThinkerAdapter:
    return ThinkerAdapter(
        SPEC, None, lambda _clips: {}, StopDetector((), never_loaded), lambda *_: None
    )


def thought_of(
    outputs: Sequence[EngineOutput], logged: EdgeLog | None = None, *, imported: bool = False
) -> list[Draft]:
    """Return the chunks for the Talker that these outputs release."""
    edge = OutboundEdge(
        QWEN3_OMNI.edge(THOUGHT), EACH, Credits(chunks=256), writes_markers=True, logged=logged
    )
    task = Task(
        spec=SPEC,
        stage=THINKER,
        epoch=Epoch(1),
        adapter=thinker(),
        inbound={},
        outbound={THOUGHT: edge},
        producers={},
        strides={},
    )
    if imported:
        task.skip_walks([PREFILL])
    for output in outputs:
        task.add_output(output)
    return [draft for _, draft in task.unsent]


def log_of(drafts: Sequence[Draft], *, remote: bool = False) -> EdgeLog:
    with_rows = (
        {draft.index: Epoch(1) for draft in drafts if "rows" in draft.arrays} if remote else {}
    )
    rows, walks = (
        [len(draft.arrays["ids"]) for draft in drafts],
        [draft.producer_walk for draft in drafts],
    )
    return EdgeLog(rows=rows, walks=walks, remote=with_rows)


def ids_of(drafts: Sequence[Draft]) -> list[int]:
    return [int(token) for draft in drafts for token in draft.arrays.get("ids", ())]


def outputs_of_halves(*, imported: bool) -> tuple[list[EngineOutput], list[EngineOutput]]:
    source = LlmDouble()
    prefill = half(source, prefill=True)
    begin(prefill, engine_request())
    before = run(prefill)
    blocks = kv_of(prefill).export_blocks(REQUEST)
    assert blocks is not None
    decode = half(LlmDouble(sources=[source]), prefill=False)
    begin(decode, engine_request())
    if imported:
        assert kv_of(decode).import_blocks(REQUEST, blocks)
    return before, run(decode)


def test_chunks_of_both_halves_are_the_prompt_and_the_answer_once(answer: list[int]) -> None:
    before, after = outputs_of_halves(imported=True)
    first = thought_of(before)
    second = thought_of(after, log_of(first), imported=True)
    assert ids_of(first) == list(PROMPT)
    assert ids_of(second) == answer[:-1] and second[-1].final, "the last token is not spoken"
    assert [draft.index for draft in (*first, *second)] == list(range(len(first) + len(second)))


def test_prompt_that_the_decode_half_recomputes_is_released_once(answer: list[int]) -> None:
    """A prompt that the decode role recomputes is released once: recomputed chunks repeat rows of
    the prefill role, and only lost tensors get new locations.
    """
    before, after = outputs_of_halves(imported=False)
    first = thought_of(before)
    second = thought_of(after, log_of(first, remote=True))
    again = [draft for draft in second if draft.is_logged]
    assert ids_of([draft for draft in second if not draft.is_logged]) == answer[:-1]
    assert [draft.index for draft in again] == [0, 1] and not any(
        "ids" in draft.arrays for draft in again
    )
    for draft in again:
        assert (draft.arrays["rows"] == first[draft.index].arrays["rows"]).all()


def test_prompt_without_media_has_chunks_without_rows() -> None:
    engine = half(LlmDouble(), prefill=True)
    prompt = [token for token in PROMPT if token != MEDIA_ID]
    begin(engine, engine_request(), prompt)
    drafts = thought_of(run(engine))
    assert ids_of(drafts) == prompt and not any("rows" in draft.arrays for draft in drafts)


@dataclass(slots=True)
class ReversingLlm(LlmDouble):
    """Double of vLLM that returns a step's hidden states in the reverse order of its requests."""

    def take_rows(self) -> Sequence[TappedRows]:
        return list(LlmDouble.take_rows(self))[::-1]


def test_rows_are_matched_by_request_and_not_by_order() -> None:
    """Hidden states are matched by request and not by order; two prompts are computed in the same
    steps.
    """
    prompts = {
        RequestId("a"): PROMPT,
        RequestId("b"): (*range(100, 140), *[MEDIA_ID] * 3, *range(10, 30)),
    }
    engine = half(ReversingLlm(), prefill=False)
    for request_id, prompt in prompts.items():
        begin(engine, engine_request(request_id), prompt)
    outputs = run(engine)
    for request_id, prompt in prompts.items():
        mine = [
            output.arrays
            for output in outputs
            if output.request_id == request_id and "rows" in output.arrays
        ]
        positions = np.concatenate([arrays["row_positions"] for arrays in mine])
        assert positions.tolist() == [
            place for place, token in enumerate(prompt) if token == MEDIA_ID
        ]
        assert (
            np.concatenate([arrays["rows"] for arrays in mine]) == rows_of(prompt, positions)
        ).all()


SYSTEM_TURN = (START, SYSTEM, LINE, 20, 21, 22)
USER_TURNS = ((START, USER, LINE, 30, MEDIA_ID, MEDIA_ID, 31), (START, USER, LINE, 40))
HEADER = (START, ASSISTANT, LINE)
CHAT = (*SYSTEM_TURN, *USER_TURNS[0], *HEADER, 50, *USER_TURNS[1], *HEADER)


def talker(prompt: Sequence[int] = CHAT, max_tokens: int = 64) -> TalkerAdapter:
    sampling = {TALKER: Sampling(max_tokens=max_tokens)}
    return TalkerAdapter(
        RequestSpec(id=REQUEST, graph="qwen3_omni", prompt_ids=tuple(prompt), sampling=sampling),
        ROLES,
    )


def chunk(start: int, stop: int) -> Arrays:
    """Return the chunk of the positions from `start` to `stop`, whose rows hold their positions."""
    positions = np.array(
        [place for place in range(start, stop) if CHAT[place] == MEDIA_ID], np.int32
    )
    arrays: dict[str, np.ndarray] = {"ids": np.array(CHAT[start:stop], np.int32)}
    if len(positions):
        arrays |= {
            "row_positions": positions,
            "rows": np.stack([positions, positions], axis=1).astype(np.float32),
        }
    return arrays


def test_talker_positions_are_user_turns_opening_rows_and_answer() -> None:
    """The Talker's positions are user turns, opening rows and answer; system and earlier assistant
    turns are skipped.
    """
    request, _ = talker(max_tokens=64).open()
    assert NUM_OPENING_ROWS == 9 and HEADER_LEN == len(HEADER)
    assert int(request.params[NUM_POSITIONS]) == sum(map(len, USER_TURNS)) + NUM_OPENING_ROWS + 64


@pytest.mark.parametrize("cut", [1, 5, 8, 11, len(CHAT)])
def test_talker_reads_the_same_rows_however_the_prompt_is_cut(cut: int) -> None:
    adapter = talker()
    fed: list[int] = []
    rows: dict[int, float] = {}
    for start in range(0, len(CHAT), cut):
        (piece,) = adapter.consume(
            THOUGHT, PREFILL, chunk(start, min(start + cut, len(CHAT))), final=False
        )
        for index, row in zip(
            piece.arrays.get("row_index", ()), piece.arrays.get("rows", ()), strict=True
        ):
            rows[len(fed) + int(index)] = float(row[0])
        fed += piece.arrays["ids"].tolist()
    assert fed == [token for turn in USER_TURNS for token in turn]
    media = [place for place, token in enumerate(CHAT) if token == MEDIA_ID]
    assert [(fed[at], row) for at, row in sorted(rows.items())] == [
        (MEDIA_ID, place) for place in media
    ]


def corrupt(name: str) -> Arrays:
    whole = dict(chunk(0, len(CHAT)))
    match name:
        case "other ids":
            whole["ids"] = whole["ids"] + 1
        case "positions before the chunk":
            whole["row_positions"] = whole["row_positions"] - len(CHAT)
        case "positions after the chunk":
            whole["row_positions"] = whole["row_positions"] + len(CHAT)
        case _:
            whole["rows"] = whole["rows"][:1]
    return whole


@pytest.mark.parametrize(
    "name",
    ["other ids", "positions before the chunk", "positions after the chunk", "rows are missing"],
)
def test_corrupt_prefill_output_fails_the_request(name: str) -> None:
    """Corrupt prefill output fails the request; speech without the prompt's media would be wrong
    unnoticed.
    """
    with pytest.raises(ChunkOrderError, match="edge thought"):
        talker().consume(THOUGHT, PREFILL, corrupt(name), final=False)


def test_codes_are_joined_along_frames_with_a_row_of_16_per_frame() -> None:
    frames = np.arange(6 * 16, dtype=np.int32).reshape(6, 16)
    adapter, edge = (
        talker(),
        OutboundEdge(QWEN3_OMNI.edge(CODES), EACH, Credits(chunks=64), writes_markers=True),
    )
    outputs = [
        EngineOutput(request_id=REQUEST, walk=DECODE, arrays={"codes": frame[None]})
        for frame in frames
    ]
    drafts = [
        draft
        for output in outputs
        for item in adapter.produce(output)
        for draft in edge.offer(item)
    ]
    assert (np.concatenate([draft.arrays["codes"] for draft in drafts]) == frames).all()


def test_history_of_the_decode_half_is_the_longest_log_of_tokens(answer: list[int]) -> None:
    logged: LoggedOutput = {
        (TEXT, DECODE): {"ids": np.array(answer[:3], np.int32)},
        (THOUGHT, DECODE): {"ids": np.array(answer[:2], np.int32)},
    }
    request, _ = thinker().open(logged)
    assert request.history[TOKEN].tolist() == answer[:3]
