"""A checkpoint's chat template, rendered in Jinja's sandbox as `transformers` renders it. Knows no
tokenizer.

Source: transformers 5.23, utils/chat_template_utils.py (`_compile_jinja_template`).
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import NoReturn, cast

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fleet.core.errors import BadInput, ConfigError

TemplateMessage = Mapping[str, object]


class _Generation(jinja2.ext.Extension):
    """Jinja extension for the tag `{% generation %}...{% endgeneration %}`, which marks the
    assistant's text for training; here it only opens a scope.
    """

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
        )


class ChatTemplate:
    """A compiled chat template, which renders messages to the text of a prompt, up to where the
    answer begins. `tool_source`: a second template for prompts with tools, if the checkpoint has
    one.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None
    ) -> None:
        self.tool_source = tool_source or source
        """Source of the template of prompts with tools."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        names = cast("dict[str, object]", environment.globals)
        names |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        try:
            self._template = environment.from_string(source)
            self._tool_template = environment.from_string(self.tool_source)
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"the chat template is not valid Jinja: {error}", param="checkpoint"
            ) from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[TemplateMessage],
        tools: Sequence[Mapping[str, object]] = (),
        *,
        where: str = "messages",
        opens_answer: bool = True,
    ) -> str:
        """Return the text of the prompt. `where`: field of the user's input that has the messages.
        `tools`: definitions of the functions that the answer may call. `opens_answer`: False for a
        prompt that ends with the last message. Raises: BadInput if the template refuses the
        messages (their roles or order).
        """
        has_calls = any("tool_calls" in each or each["role"] == "tool" for each in messages)
        template = self._tool_template if tools or has_calls else self._template
        try:
            return template.render(
                messages=messages,
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=opens_answer,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise BadInput(
                f"{where}: the model's chat template refuses the messages: {error}", param=where
            ) from error


def load_template(checkpoint: Path) -> ChatTemplate:
    """Load a checkpoint's chat template from chat_template.jinja, chat_template.json or
    tokenizer_config.json, whichever exists first.

    Raises: ConfigError if the checkpoint has no template.
    """
    config = read_json(checkpoint / "tokenizer_config.json")
    source = _template_source(checkpoint, config, "default")
    if source is None:
        raise ConfigError(
            f"checkpoint {checkpoint} has no chat template (chat_template.jinja); use an "
            "instruction-tuned one",
            param="checkpoint",
        )
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    tokens = {name: text for name in names if (text := token_text(config.get(name))) is not None}
    return ChatTemplate(source, tokens, _template_source(checkpoint, config, "tool_use"))


def read_json(path: Path) -> dict[str, object]:
    """Read a file with a JSON object; return an empty one if the file does not exist. Raises:
    ConfigError if the content is not a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}", param="checkpoint") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must hold a JSON object", param="checkpoint")
    return value


def _template_source(checkpoint: Path, config: Mapping[str, object], name: str) -> str | None:
    """Return the source of the checkpoint's template `name`, or of the checkpoint's only template,
    which then serves for every name; None if there is neither.
    """
    other = checkpoint / "additional_chat_templates" / f"{name}.jinja"
    for jinja in (other, checkpoint / "chat_template.jinja"):
        if jinja.is_file():
            return jinja.read_text(encoding="utf-8")
    for value in (
        read_json(checkpoint / "chat_template.json").get("chat_template"),
        config.get("chat_template"),
    ):
        if isinstance(value, str):
            return value
        if isinstance(value, list):
            named = {
                str(entry.get("name")): entry.get("template")
                for entry in value
                if isinstance(entry, dict)
            }
            if isinstance(named.get(name), str):
                return str(named[name])
    return None


def token_text(value: object) -> str | None:
    """Return the text of a special token from its entry in tokenizer_config.json, which is a string
    or an object with a key `content`.
    """
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
