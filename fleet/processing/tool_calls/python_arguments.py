"""Arguments of a call written in Python's form, such as `(city="Paris", days=2)`, as JSON."""

import ast
import json
import warnings

_JSON_NAMES = {"true": True, "false": False, "null": None}


class _Names(ast.NodeTransformer):
    """Replaces the names of JSON's constants, which models write too."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


def json_of_arguments(text: str) -> str | None:
    """Return the JSON object of keyword arguments in brackets; None if `text` is none such, or a
    value is no constant that JSON has.
    """
    try:
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
            call = ast.parse(f"f{text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        values = {
            each.arg: ast.literal_eval(_Names().visit(each.value))
            for each in call.keywords
            if each.arg is not None
        }
        if len(values) < len(call.keywords):
            return None
        written = json.dumps(values, ensure_ascii=False, allow_nan=False)
        # escapes of JSON for one character, of which Python makes two halves
        return json.dumps(values) if any("\ud800" <= c <= "\udfff" for c in written) else written
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None
