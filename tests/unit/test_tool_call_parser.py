"""Function calls in texts of answers: the forms of the model families, in any division into pieces,
and texts that only resemble calls.
"""

import json
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.core.request import ToolUse
from fleet.processing.tool_calls.formats import FORMATS, format_of
from fleet.processing.tool_calls.parser import CallArguments, CallBegun, CallEnded, CallParser, Said

NAMES = ("get_weather", "get_weather_map", "now")
PARIS = '{"city": "Paris \\"}<", "days": [1, {"x": null}]}'
Calls = list[tuple[str, str]]
CASES: list[tuple[str, str, str, Calls]] = [
    (
        "hermes",
        f'Let me see.\n<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>',
        "Let me see.",
        [("get_weather", PARIS)],
    ),
    (
        "hermes",
        '<tool_call>{"name":"now"}</tool_call> and <tool_call>\n'
        '{"name": "get_weather_map", "arguments": {"a": "</tool_call>"}}\n</tool_call> done',
        "",
        [("now", "{}"), ("get_weather_map", '{"a": "</tool_call>"}')],
    ),
    (
        "hermes",
        '<tool_call>[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]',
        "",
        [("now", "{}"), ("now", "{}")],
    ),
    (
        "llama3",
        f'<|python_tag|>{{"type": "function", "name": "now", "parameters": {PARIS}}}',
        "",
        [("now", PARIS)],
    ),
    ("llama3", f'{{"name": "now", "parameters": {PARIS}}}', "", [("now", PARIS)]),
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "now", "arguments": {PARIS}}}, '
        '{"name":"now","arguments":{}}]',
        "",
        [("now", PARIS), ("now", "{}")],
    ),
    (
        "mistral_args",
        f"One moment. [TOOL_CALLS]now[CALL_ID]a1b2[ARGS]{PARIS}[TOOL_CALLS]get_weather{{}}",
        "One moment.",
        [("now", PARIS), ("get_weather", "{}")],
    ),
    (
        "pythonic",
        "Yes: [get_weather(city='Pa)ris', days=[1, -2], on=true), now()]",
        "Yes:",
        [("get_weather", '{"city": "Pa)ris", "days": [1, -2], "on": true}'), ("now", "{}")],
    ),
    ("json", f'```json\n{{"name": "now", "arguments": {PARIS}}}\n```', "", [("now", PARIS)]),
    (
        "json",
        f'Well [{{"name": "now", "arguments": {PARIS}}}, {{"name": "now", "parameters": {{}}}}]',
        "Well",
        [("now", PARIS), ("now", "{}")],
    ),
]
NO_CALLS: list[tuple[str, str]] = [
    (
        "hermes",
        'Write <tool_call> before {"name": "now"}; <tool_call>{"name": "other"}</tool_call>',
    ),
    ("hermes", '<tool_call>\n{"name": "get_weather_", "arguments": {}}\n</tool_call> \n '),
    ("hermes", '<tool_call>{"name": "now", "arguments": "soon'),
    ("llama3", '{"name": "Ann", "parameters": {}} and {"nam'),
    ("mistral", "[TOOL_CALLS] is a token [TOOL_"),
    ("pythonic", "a[now(x)], [now(**d)] [now('a')] [now(a=print)] and [now(a=1"),
    ("pythonic", "[now(a='\\x00', b={1})]"),
    ("json", '```json\n{"name": 5}\n```'),
]


def read(form: str, pieces: Sequence[str], max_calls: int = 0) -> tuple[str, Calls, int]:
    """Return the text that is said, the calls with their arguments, and how many have ended."""
    parser = CallParser(ToolUse(format=form, names=NAMES, max_calls=max_calls))
    said, calls, num_ended = "", list[tuple[str, str]](), 0
    for event in [*(e for piece in pieces for e in parser.add(piece)), *parser.finish()]:
        match event:
            case Said(text):
                assert not calls, "what is said ends where the first call begins"
                said += text
            case CallBegun(index, name):
                assert index == len(calls) == num_ended
                calls.append((name, ""))
            case CallArguments(index, text):
                assert index == num_ended == len(calls) - 1
                calls[index] = (calls[index][0], calls[index][1] + text)
            case CallEnded(index):
                assert index == num_ended
                num_ended += 1
    return said, calls, num_ended


@pytest.mark.parametrize(("form", "text", "said", "calls"), CASES)
def test_call_is_read_from_any_pieces_and_any_part(
    form: str, text: str, said: str, calls: Calls
) -> None:
    assert read(form, [text]) == read(form, list(text)) == (said, calls, len(calls))
    for _, arguments in calls:
        json.loads(arguments)
    for end in range(len(text)):
        part = read(form, list(text[:end]))
        assert part == read(form, [text[:end]])
        for (name, arguments), (whole_name, whole) in zip(part[1], calls, strict=False):
            assert name == whole_name and whole.startswith(arguments)
        if not part[1]:
            assert part[0] == text[:end], "without a call everything is said"


@pytest.mark.parametrize(("form", "text"), NO_CALLS)
def test_text_that_is_no_call_stays_text(form: str, text: str) -> None:
    assert read(form, [text]) == read(form, list(text)) == (text, [], 0)


_PIECES = st.sampled_from(
    [*(piece for _, text, _, _ in CASES for piece in text.split()), "now", "(", ")", '"', "{", " "]
)


@given(st.sampled_from(sorted(FORMATS)), st.lists(_PIECES, max_size=12), st.randoms())
def test_any_division_of_any_text_gives_the_same_calls(
    form: str, words: list[str], random: Random
) -> None:
    text = "".join(words)
    cuts = sorted(random.choices(range(len(text) + 1), k=4))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(form, pieces) == read(form, [text])


def test_call_beyond_the_limit_is_dropped() -> None:
    for form, text, said, calls in CASES:
        assert read(form, [text], max_calls=1) == (said, calls[:1], 1)


def test_form_is_found_from_the_chat_template() -> None:
    assert format_of('... <tool_call>\\n{"name": ...') == "hermes"
    assert format_of("[TOOL_CALLS] {%- ... [ARGS]") == "mistral_args"
    assert format_of("{{ '[TOOL_CALLS]' }}") == "mistral"
    assert format_of("respond with <|python_tag|>") == "llama3"
    assert format_of("You SHOULD write [func_name1(a=b)]") == "pythonic"
    assert format_of("{{ tools | tojson }}") == "json"
    assert format_of("<tool_call>\\n<function=x>") == "", "a form that is not read"
