"""The house style, checked over the source: sizes, line length, and forbidden content."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.sources import EVERYTHING, SOURCES, imports, nodes, parsed, relative

MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_NESTING, MAX_TEST_NESTING = 500, 60, 3, 4
MAX_FMT_SKIPS = 30


def test_files_and_functions_keep_the_size_limits() -> None:
    found = {
        f"{relative(path)}{place}": size for path in EVERYTHING for place, size in excesses(path)
    }
    assert found == {}


def test_layout_is_left_to_the_formatter() -> None:
    skips = sum(line.endswith("# fmt: skip") for path in EVERYTHING for line in lines_of(path))
    assert skips <= MAX_FMT_SKIPS


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines()


def excesses(path: Path) -> Iterator[tuple[str, str]]:
    """Yield what exceeds a limit, "" for the file or `: function`, and its size."""
    num_lines = len(lines_of(path))
    max_nesting = MAX_TEST_NESTING if relative(path).startswith("tests/") else MAX_NESTING
    if num_lines > MAX_FILE_LINES:
        yield "", f"{num_lines} lines, limit {MAX_FILE_LINES}"
    for function in ast.walk(parsed(path)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        assert function.end_lineno is not None
        length = function.end_lineno - function.lineno + 1
        if length > MAX_FUNCTION_LINES:
            yield f": {function.name}", f"{length} lines, limit {MAX_FUNCTION_LINES}"
        if (depth := nesting(function.body)) > max_nesting:
            yield f": {function.name}", f"nests {depth} deep, limit {max_nesting}"


def nesting(body: list[ast.stmt]) -> int:
    """Return the nesting depth of blocks; `elif` is no deeper than its `if`, and an inner function
    is counted separately.
    """
    return max((depth_of(statement) for statement in body), default=0)


def depth_of(statement: ast.stmt) -> int:
    if isinstance(statement, ast.If):
        chain = statement.orelse
        is_elif = len(chain) == 1 and isinstance(chain[0], ast.If)
        return max(
            1 + nesting(statement.body), depth_of(chain[0]) if is_elif else 1 + nesting(chain)
        )
    if isinstance(statement, ast.For | ast.AsyncFor | ast.While):
        return 1 + max(nesting(statement.body), nesting(statement.orelse))
    if isinstance(statement, ast.With | ast.AsyncWith):
        return 1 + nesting(statement.body)
    if isinstance(statement, ast.Try | ast.TryStar):
        handlers = [inner for handler in statement.handlers for inner in handler.body]
        return 1 + nesting(statement.body + handlers + statement.orelse + statement.finalbody)
    if isinstance(statement, ast.Match):
        return 1 + max(nesting(case.body) for case in statement.cases)
    return 0


def test_files_keep_the_house_rules() -> None:
    wrong = [
        f"{relative(path)}:{violation}" for path in EVERYTHING for violation in violations(path)
    ]
    assert not wrong, "\n".join(wrong)


def violations(path: Path) -> Iterator[str]:
    yield from (
        f"{line}: imports {target}"
        for line, target in imports(path)
        if target.split(".")[0] in PICKLES
    )
    for node in nodes(path):
        if found := offence(node, path):
            yield f"{getattr(node, 'lineno', 0)}: {found}"
    if path != Path(__file__):
        lines = enumerate(path.read_text().splitlines(), 1)
        yield from (
            f"{number}: {found[0]}" for number, line in lines if (found := UNFINISHED.search(line))
        )


PICKLES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")


def offence(node: ast.AST, path: Path) -> str | None:
    in_tests = relative(path).startswith("tests/")
    if isinstance(node, ast.ExceptHandler) and swallows_everything(node):
        return "swallows every error"
    if in_tests and isinstance(node, ast.Call) and is_sleep(node):
        return "a sleep in a test; poll with wait_until"
    if (
        in_tests
        and isinstance(node, ast.Attribute)
        and node.attr in {"skip", "skipif", "xfail", "importorskip"}
    ):
        return f"a test that may not run ({node.attr})"
    return None


def swallows_everything(handler: ast.ExceptHandler) -> bool:
    caught = handler.type.id if isinstance(handler.type, ast.Name) else None
    broad = handler.type is None or caught in {"Exception", "BaseException"}
    return broad and all(isinstance(inner, ast.Pass | ast.Continue) for inner in handler.body)


def is_sleep(call: ast.Call) -> bool:
    """Return True for a sleep with a duration; `asyncio.sleep(0)` only yields to the event loop."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    yields = (
        len(call.args) == 1 and isinstance(call.args[0], ast.Constant) and call.args[0].value == 0
    )
    return name == "sleep" and not yields


def test_modules_have_docstrings() -> None:
    assert not [relative(path) for path in SOURCES if not ast.get_docstring(parsed(path))]


def test_checks_find_violations() -> None:
    assert (
        nesting(ast.parse("if a:\n  for b in c:\n    while d:\n      with e:\n        f()\n").body)
        == 4
    )
    assert nesting(ast.parse("try:\n  f()\nfinally:\n  if a: g()\n").body) == 2
    assert nesting(ast.parse("if a: b()\nelif c: d()\nelif e: f()\n").body) == 1
    swallower = next(
        node
        for node in ast.walk(ast.parse("try: f()\nexcept Exception: pass"))
        if isinstance(node, ast.ExceptHandler)
    )
    assert swallows_everything(swallower)
