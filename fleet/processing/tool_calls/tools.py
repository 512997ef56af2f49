"""Functions that a request offers to the model, and the calls of earlier answers. Data only."""

from collections.abc import Mapping
from dataclasses import dataclass

from fleet.core.request import ToolUse

NO_ARGUMENTS: Mapping[str, object] = {"type": "object", "properties": {}}
NO_OTHERS: Mapping[str, object] = {**NO_ARGUMENTS, "additionalProperties": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTool:
    """A function that the model may call. `parameters`: JSON schema of the object of its arguments;
    None for a function without arguments. `is_strict`: True if every call must match the schema.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, object] | None = None
    is_strict: bool = False

    @property
    def schema(self) -> Mapping[str, object]:
        """The JSON schema of the arguments, which are always an object."""
        return {**(self.parameters or NO_OTHERS), "type": "object"}

    @property
    def definition(self) -> Mapping[str, object]:
        """The function as chat templates read it."""
        described = {"description": self.description} if self.description else {}
        function = {"name": self.name, **described, "parameters": self.parameters or NO_ARGUMENTS}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCall:
    """A call in an earlier answer. `arguments`: JSON text, as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPrompt:
    """Tools of a prompt. `call_format`: form in which the model writes calls, "" for a model that
    calls no functions. `described`: functions that the prompt describes. `use`: how the answer may
    call them, None if it may not.
    """

    call_format: str = ""
    described: tuple[FunctionTool, ...] = ()
    use: ToolUse | None = None
