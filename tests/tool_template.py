"""A chat template that writes tools, calls and results as Qwen's do, for tiny checkpoints, and the
tools of tests.
"""

import json
from pathlib import Path
from typing import Any

TEMPLATE = """\
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages[0].role == 'system' -%}{{- messages[0].content + '\\n' -}}{%- endif -%}
{%- for tool in tools -%}{{- tool | tojson + '\\n' -}}{%- endfor -%}
{{- 'call as <tool_call>{"name": ...}</tool_call><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'system' and tools -%}
{%- elif message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>' + message.content + '</tool_response><|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'audio' -%}
{{- '<|audio_start|><|audio_pad|><|audio_end|>' -}}
{%- else -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- for call in message.tool_calls -%}
{{- '<tool_call>' + call.function | tojson + '</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def write_tool_template(checkpoint: Path) -> Path:
    """Replace the chat template of a checkpoint by one that writes tools."""
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return checkpoint


def function(name: str, strict: bool = False, **properties: Any) -> dict[str, Any]:
    """Return a tool of a chat whose arguments are all required."""
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    given: dict[str, Any] = {"name": name, "description": "a test", "parameters": parameters}
    return {"type": "function", "function": given | ({"strict": True} if strict else {})}


WEATHER = function("get_weather", city={"enum": ["Paris", "Rome"]}, days={"type": "integer"})
NOW = function("now")
ARGUMENTS = '{"city": "Paris", "days": 2}'


def call_text(name: str = "get_weather", arguments: str = ARGUMENTS) -> str:
    """Return a call as a model writes it."""
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'
