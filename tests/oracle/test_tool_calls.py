"""Function calls by tiny models: required calls are always parseable in every form, and their
arguments keep the schema; a call is never spoken, also after the death of a worker.
"""

import dataclasses
import json
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from jsonschema import validate
from tokenizers import Tokenizer

from fleet.core.ids import EdgeName, RequestId, StageName, new_request_id
from fleet.core.request import RequestSpec, Sampling, ToolUse
from fleet.graphs.qwen3_omni import QWEN3_OMNI, TALKER, THINKER
from fleet.models.causal_lm.tiny import write_tiny_checkpoint
from fleet.processing.detokenize import IncrementalDetokenizer
from fleet.processing.template import ChatTemplate
from fleet.processing.tokenizer import load_tokenizer, token_ids
from fleet.processing.tool_calls.formats import FORMATS
from fleet.processing.tool_calls.support import ToolSupport
from fleet.processing.tool_calls.tools import FunctionTool
from fleet.stages.base import BuiltStage
from tests.harness import (
    ThreadFleet,
    answer,
    answer_disturbed,
    assert_same,
    gateway,
    in_step,
    thread_fleet,
)
from tests.oracle.cases import AUDIO, CASES, TEXT, make_frontend, spec_of
from tests.oracle.test_given_answers import replace
from tests.oracle.test_text_engine import PROMPTS, answers_of, stage
from tests.tool_template import call_text
from web.gateway.answer_calls import AnswerCalls, CallPiece, CollectedCall, collect

pytestmark = pytest.mark.one_file_in(6, "engines")

TOOLS = (
    FunctionTool(
        name="get_weather",
        parameters={
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 8},
                "days": {"$ref": "#/$defs/days"},
                "at": {"enum": ["noon", 'a "night"', None]},
            },
            "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 99}},
            "required": ["city"],
            "additionalProperties": False,
        },
    ),
    FunctionTool(name="now"),
)
MAX_TOKENS, CALLER = 400, RequestId("r")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("lm"))


def required_calls(
    built: BuiltStage,
    folder: Path,
    jobs: Sequence[tuple[str, list[int]]],
    tools: Sequence[FunctionTool],
    max_calls: int,
) -> list[tuple[str, str]]:
    """Return names and arguments of all whole calls of answers that have to call `tools`, after
    checking that the answers are calls, that the pieces of a stream are the whole calls, and that
    all arguments keep their schema. `jobs`: form of the calls and prompt of each answer.
    """
    tokenizer = load_tokenizer(folder)
    support = ToolSupport(ChatTemplate("", {}), tokenizer)
    rules = {form: support.required(form, tools, max_calls) for form in FORMATS}

    def sampling(n: int) -> Sampling:
        rule = rules[jobs[n][0]]
        return Sampling(max_tokens=MAX_TOKENS, temperature=1.2, seed=n, constraint=rule)

    answers = answers_of(built, [prompt for _, prompt in jobs], sampling)
    schemas = {tool.name: dict(tool.schema) for tool in tools}
    found: list[tuple[str, str]] = []
    for (form, _), ids in zip(jobs, answers, strict=True):
        use = ToolUse(format=form, names=tuple(schemas))
        calls = streamed_calls(tokenizer, ids, use)
        assert calls == whole_calls(tokenizer.decode(ids), use)
        assert len(calls) == 1 or (calls and not max_calls)
        whole = [(call.name, call.arguments) for call in calls if call.is_whole]
        assert len(whole) == len(calls) or len(ids) >= MAX_TOKENS, calls
        for name, arguments in whole:
            validate(json.loads(arguments), schemas[name])
        found += whole
    return found


def streamed_calls(tokenizer: Tokenizer, ids: Sequence[int], use: ToolUse) -> list[CollectedCall]:
    """Return the calls of an answer from the pieces that a client receives, one token at a time."""
    spec = RequestSpec(id=CALLER, graph="text", prompt_ids=(0,), outputs=(), tools=use)
    answer, text = AnswerCalls(spec), IncrementalDetokenizer(tokenizer)
    calls: list[CollectedCall] = []
    pieces = [piece for number in ids for piece in answer.add(text.add([number]))]
    for piece in [*pieces, *answer.add(text.finish(), is_whole=True)]:
        assert isinstance(piece, CallPiece), f"said: {piece}"
        collect(calls, piece)
    return calls


def whole_calls(text: str, use: ToolUse) -> list[CollectedCall]:
    """Return the calls of an answer that is read at once."""
    spec = RequestSpec(id=CALLER, graph="text", prompt_ids=(0,), outputs=(), tools=use)
    calls: list[CollectedCall] = []
    for piece in AnswerCalls(spec).add(text, is_whole=True):
        assert isinstance(piece, CallPiece), f"said: {piece}"
        collect(calls, piece)
    return calls


@pytest.mark.parametrize("max_calls", [0, 1])
def test_required_calls_are_parseable_in_every_form(folder: Path, max_calls: int) -> None:
    built = stage(folder, speculation={"drafter": "off"})
    jobs = [(form, prompt) for form in FORMATS for prompt in PROMPTS[:3]]
    calls = required_calls(built, folder, jobs, TOOLS, max_calls)
    assert {name for name, _ in calls} == {tool.name for tool in TOOLS}


WAYS = ("engine=torch", "device=cpu", "dtype=float32", "numerics=invariant", *in_step(QWEN3_OMNI))
CASE = dataclasses.replace(
    next(case for case in CASES if case.name == "text"), frames=24, tokens=200
)


@pytest.fixture
async def fleet(redis_url: str, tiny_checkpoint: Path) -> AsyncGenerator[ThreadFleet]:
    with thread_fleet(redis_url, *WAYS, checkpoint=tiny_checkpoint, transfer="nixl") as fleet:
        yield fleet


async def test_talker_speaks_the_text_before_a_call_also_after_deaths(fleet: ThreadFleet) -> None:
    """An answer with a call has the same samples as its text alone, also if the stages die within
    the call.
    """
    frontend = make_frontend(fleet.checkpoint)
    end = min(frontend.end_ids())
    spoken = token_ids(frontend.tokenizer, "One moment, please.", "")
    call = token_ids(frontend.tokenizer, call_text(), "")
    use = ToolUse(format="hermes", names=("get_weather",))
    spec, _ = spec_of(CASE, frontend, seed=4)

    def asked(ids: list[int], tools: ToolUse | None) -> RequestSpec:
        given = {"id": new_request_id(), "given": tuple(ids), "tools": tools}
        return msgspec.structs.replace(spec, **given)

    async with gateway(fleet) as client:
        alone = await answer(client, asked([*spoken, end], None))
        assert len(alone[AUDIO]) > 0
        whole = await answer(client, asked([*spoken, *call, end], use))
        assert whole[TEXT].tolist() == [*spoken, *call, end]
        np.testing.assert_array_equal(whole[AUDIO], alone[AUDIO])
        silent = await answer(client, asked([*call, end], use))
        assert len(silent[AUDIO]) == 0, "an answer that only calls has no audio"
        for stages in ((THINKER,), (THINKER, TALKER)):
            again = asked([*spoken, *call, end], use)

            def kill(
                edge: EdgeName,
                index: int,
                spec: RequestSpec = again,
                dying: tuple[StageName, ...] = stages,
            ) -> None:
                if (edge, index) == (AUDIO, 0):
                    replace(fleet, spec, dying)

            assert_same(await answer_disturbed(client, again, None, kill), whole)
