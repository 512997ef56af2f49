"""What a checkpoint knows of function calls: whether its chat template writes tools, and in which
form its model writes calls.
"""

from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer

from fleet.core.errors import BadInput
from fleet.core.request import Constraint
from fleet.processing.template import ChatTemplate
from fleet.processing.tool_calls.formats import FORMATS, CallFormat, format_of
from fleet.processing.tool_calls.grammar import CallGrammar
from fleet.processing.tool_calls.tools import FunctionTool

AUTO = "auto"
_PROBE = FunctionTool(name="probed_function_1f6c", description="nothing")


class ToolSupport:
    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self.writes_tools = _writes_tools(template)
        """True if the chat template writes tools into the prompt."""
        self._found = format_of(template.tool_source) if self.writes_tools else ""
        added = tokenizer.get_added_tokens_decoder()
        self._tokens = {token.content: number for number, token in added.items()}
        self._spoken = [number for number, token in added.items() if not token.special]

    @property
    def control_tokens(self) -> tuple[tuple[str, int], ...]:
        """(text, id) of each added token of the form `<...>`, which a grammar may name."""
        return tuple(
            (name, number)
            for name, number in self._tokens.items()
            if name.startswith("<") and name.endswith(">")
        )

    def format(self, wanted: str = AUTO) -> str:
        """Return the name of the form in which the model writes calls; "" if it calls no functions.
        `wanted`: the deployment's form (`web.tool_format`).
        """
        return self._found if wanted == AUTO else "" if wanted == "none" else wanted

    def required(self, form: str, tools: Sequence[FunctionTool], max_calls: int) -> Constraint:
        """Return the rule of an answer that calls `tools` at least once, in the form `form`.
        `max_calls`: most calls; 0 for the default limit (see `CallGrammar.required`).
        """
        return self._grammar(FORMATS[form]).required(tools, max_calls)

    def optional(
        self, form: str, tools: Sequence[FunctionTool], max_calls: int, schema: object = None
    ) -> Constraint:
        """Return the rule of an answer that may call `tools`, each by its schema, up to `max_calls`
        as in `required`. `schema`: JSON schema of an answer without calls; None for any text.
        """
        return self._grammar(FORMATS[form]).optional(tools, max_calls, schema)

    def _grammar(self, form: CallFormat) -> CallGrammar:
        return CallGrammar(form, self._tokens, self._spoken)


def _writes_tools(template: ChatTemplate) -> bool:
    message: Mapping[str, object] = {"role": "user", "content": "hello"}
    try:
        return _PROBE.name in template.render([message], [_PROBE.definition])
    except BadInput:
        return False
