"""Function calls by tiny models: required calls are always parseable in every form, and their
arguments keep the schema; a call is never spoken, also after the death of a worker.
"""

import dataclasses
import json
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from jsonschema import validate

from fleet.core.ids import EdgeName, StageName, new_request_id
from fleet.core.request import RequestSpec, Sampling, ToolUse
from fleet.graphs.qwen3_omni import QWEN3_OMNI, TALKER, THINKER
from fleet.models.causal_lm.tiny import write_tiny_checkpoint
from fleet.processing.template import ChatTemplate
from fleet.processing.tokenizer import load_tokenizer, token_ids
from fleet.processing.tool_calls.formats import FORMATS
from fleet.processing.tool_calls.parser import CallArguments, CallBegun, CallEnded, CallParser
from fleet.processing.tool_calls.support import ToolSupport
from fleet.processing.tool_calls.tools import FunctionTool
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
NAMES = tuple(tool.name for tool in TOOLS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("lm"))


@pytest.mark.parametrize("max_calls", [0, 1])
def test_required_calls_are_parseable_in_every_form(folder: Path, max_calls: int) -> None:
    built = stage(folder, speculation={"drafter": "off"})
    tokenizer = load_tokenizer(folder)
    support = ToolSupport(ChatTemplate("", {}), tokenizer)
    forms = [form for form in FORMATS for _ in range(3)]
    rules = [support.required(form, TOOLS, max_calls) for form in forms]

    def sampling(n: int) -> Sampling:
        return Sampling(max_tokens=400, temperature=1.2, seed=n, constraint=rules[n])

    answers = answers_of(built, [PROMPTS[n % 3] for n in range(len(forms))], sampling)
    called: set[str] = set()
    for form, ids in zip(forms, answers, strict=True):
        parser = CallParser(ToolUse(format=form, names=NAMES))
        text = tokenizer.decode(ids)
        calls: list[tuple[str, str]] = []
        num_ended = 0
        for event in parser.add(text) + parser.finish():
            assert isinstance(event, CallBegun | CallArguments | CallEnded), (text, event)
            if isinstance(event, CallBegun):
                calls.append((event.name, ""))
            elif isinstance(event, CallArguments):
                calls[event.index] = (calls[event.index][0], calls[event.index][1] + event.text)
            else:
                num_ended += 1
        is_cut = len(ids) >= 400
        assert calls and (num_ended == len(calls) or is_cut), text
        assert len(calls) == 1 or not max_calls
        for name, arguments in calls[:num_ended]:
            validate(json.loads(arguments), dict(TOOLS[NAMES.index(name)].schema))
        called |= {name for name, _ in calls}
    assert called == set(NAMES)


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
