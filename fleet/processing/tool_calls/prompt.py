"""Function calls, their results and the tools themselves in the messages of a prompt.

Source of the text for templates that write no tools: NousResearch/Hermes-2-Pro, as Qwen2.5 has it.
"""

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import cast

from pydantic_core import from_json

from fleet.processing.template import TemplateMessage
from fleet.processing.tool_calls.formats import FORMATS
from fleet.processing.tool_calls.tools import FunctionCall

_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz"
_SHORT_LEN = 9
_INSTRUCTIONS = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def calls_for_template(
    calls: Sequence[FunctionCall], form: str
) -> dict[str, list[Mapping[str, object]]]:
    """Return the field `tool_calls` of an assistant's message; {} without calls. Arguments that are
    a JSON object become a dict, as templates expect; other arguments stay text.
    """
    if not calls:
        return {}
    return {
        "tool_calls": [
            {
                "id": shown_id(call.id, form),
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call.arguments)},
            }
            for call in calls
        ]
    }


def shown_id(call_id: str, form: str) -> str:
    """Return a call's id, hashed to nine letters and digits if the form takes only short ids."""
    if not FORMATS[form].has_short_ids:
        return call_id
    digest = blake2b(call_id.encode(errors="surrogatepass"), digest_size=_SHORT_LEN).digest()
    return "".join(_LETTERS[byte % len(_LETTERS)] for byte in digest)


def _arguments(text: str) -> object:
    try:
        value: object = from_json(text, allow_inf_nan=False)
    except ValueError:
        return text
    return cast("object", value) if isinstance(value, dict) else text


def without_tools(
    messages: Sequence[TemplateMessage], tools: Sequence[Mapping[str, object]]
) -> list[TemplateMessage]:
    """Return messages for a template that knows no tools. `tools`: definitions, which become part
    of the system message; calls and results become texts in the form `hermes`.
    """
    flat = [_flat(message) for message in messages]
    if not tools:
        return flat
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _INSTRUCTIONS.format(tools=listed)
    first = flat[0] if flat else None
    if first is not None and first["role"] == "system" and isinstance(first["content"], str):
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *flat[1:]]
    return [{"role": "system", "content": text}, *flat]


def _flat(message: TemplateMessage) -> TemplateMessage:
    content = message["content"]
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    if "tool_calls" not in message:
        return message
    written = [
        f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
        for call in cast("list[Mapping[str, object]]", message["tool_calls"])
    ]
    said = [content] if isinstance(content, str) and content else []
    return {"role": message["role"], "content": "\n".join([*said, *written])}
