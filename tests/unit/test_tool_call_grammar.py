"""Rules of answers with function calls: which answers they allow, token by token."""

import json
from pathlib import Path

import pytest

from fleet.constraints.rules import Constraints, MatchedRule
from fleet.core.request import Constraint
from fleet.models.qwen3_omni.tiny_tokenizer import build_tokenizer
from fleet.processing.template import ChatTemplate, load_template
from fleet.processing.tokenizer import token_ids
from fleet.processing.tool_calls.support import ToolSupport
from fleet.processing.tool_calls.tools import FunctionTool
from tests.tool_template import TEMPLATE, call_text, write_tool_template
from tests.web.checkpoint import write_frontend_files

TOKENIZER = build_tokenizer()
END = TOKENIZER.get_vocab()["<|im_end|>"]
SUPPORT = ToolSupport(ChatTemplate(TEMPLATE, {}), TOKENIZER)
RULES = Constraints(lambda: TOKENIZER, TOKENIZER.get_vocab_size(), frozenset([END]))
CITY = {"city": {"enum": ["Paris", "Rome"]}}
TOOLS = (
    FunctionTool(
        name="get_weather",
        parameters={
            "type": "object",
            "properties": {**CITY, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    ),
    FunctionTool(name="now"),
)
PARIS = call_text(arguments='{"city": "Paris"}')
NOW = call_text("now", "{}")


def keeps(rule: Constraint, text: str) -> bool:
    """Return True if an answer of this text, with its end, keeps the rule."""
    open_rule = RULES.compile(rule, 256)
    assert open_rule is not None
    matched: MatchedRule = open_rule()
    for token in [*token_ids(TOKENIZER, text, ""), END]:
        allowed = matched.allowed(())
        assert allowed is not None and matched.error is None
        if not allowed[token]:
            return False
        matched.add(token)
    return True


@pytest.mark.parametrize(
    ("text", "once", "often", "optional"),
    [
        (PARIS, True, True, True),
        (f"{PARIS}\n{NOW}", False, True, True),
        (call_text(arguments='{"city": "Rome", "days": 3}'), True, True, True),
        (call_text(arguments='{"city": "Bonn"}'), False, False, False),
        (call_text(arguments="{}"), False, False, False),
        (call_text("now", '{"x": 1}'), False, False, False),
        (call_text("other", "{}"), False, False, False),
        (f"One moment.\n{NOW}", False, False, True),
        ("<think>So?</think> Hello, [x] {y}.", False, False, True),
        ("", False, False, True),
    ],
)
def test_rule_allows_calls_that_keep_the_schemas(
    text: str, *, once: bool, often: bool, optional: bool
) -> None:
    assert keeps(SUPPORT.required("hermes", TOOLS, 1), text) == once
    assert keeps(SUPPORT.required("hermes", TOOLS, 0), text) == often
    assert keeps(SUPPORT.optional("hermes", TOOLS, 0), text) == optional


def test_answer_without_calls_keeps_its_own_schema() -> None:
    rule = SUPPORT.optional("hermes", TOOLS, 0, {"type": "array", "items": {"const": 1}})
    assert keeps(rule, "[1, 1]") and keeps(rule, PARIS) and not keeps(rule, "[2]")


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("llama3", '{"name": "get_weather", "parameters": {"city": "Paris"}}'),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]',
        ),
        ("mistral_args", '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}[TOOL_CALLS]now[ARGS]{}'),
        ("pythonic", '[get_weather(city="Rome", days=2), now()]'),
        ("json", '[{"name": "now", "arguments": {}}]'),
    ],
)
def test_every_form_has_a_rule(form: str, text: str) -> None:
    assert keeps(SUPPORT.required(form, TOOLS, 0), text)
    assert not keeps(SUPPORT.required(form, TOOLS, 0), f"Well. {text}")
    assert keeps(SUPPORT.optional(form, TOOLS, 0), "Well, no.")


def test_template_shows_whether_a_model_calls_functions(tmp_path: Path) -> None:
    folder = write_frontend_files(tmp_path)
    knows_none = ToolSupport(load_template(folder), TOKENIZER)
    assert not knows_none.writes_tools
    assert [knows_none.format(wanted) for wanted in ("auto", "none", "json")] == ["", "", "json"]
    knows = ToolSupport(load_template(write_tool_template(folder)), TOKENIZER)
    assert knows.writes_tools and knows.format() == "hermes" and knows.format("none") == ""
    (folder / "chat_template.jinja").unlink()
    sources = {"default": "x", "tool_use": "[TOOL_CALLS]{{ tools }}"}
    templates = [{"name": name, "template": source} for name, source in sources.items()]
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": templates}))
    named = ToolSupport(load_template(folder), TOKENIZER)
    assert named.writes_tools and named.format() == "mistral"
