"""The house style, checked over the source: sizes, line length, and forbidden content."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.sources import EVERYTHING, SOURCES, imports, nodes, parsed, relative
from tests.support import REPO

MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_NESTING, MAX_TEST_NESTING = 500, 60, 3, 4
MAX_COLUMNS = 100
MAX_FMT_SKIPS = 1


def test_files_and_functions_keep_the_size_limits() -> None:
    found = {
        f"{relative(path)}{place}": size for path in EVERYTHING for place, size in excesses(path)
    }
    assert found == {}


def test_lua_scripts_keep_the_limits_of_columns_and_functions() -> None:
    found = {
        f"{relative(path)}:{number}": excess
        for path in LUA_FILES
        for number, excess in lua_excesses(path.read_text())
    }
    assert found == {}


def lua_excesses(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > MAX_COLUMNS:
            yield number, f"{len(line)} columns, limit {MAX_COLUMNS}"
    for function in LUA_FUNCTION.finditer(text):
        if (length := function[0].count("\n") + 1) > MAX_FUNCTION_LINES:
            yield text[: function.start()].count("\n") + 1, f"function of {length} lines"


def test_lua_scripts_unpack_the_arguments_that_they_declare_in_that_order() -> None:
    scripts = {path.stem: path.read_text() for path in LUA_FILES if path.parent.name == "lua"}
    for name, text in scripts.items():
        unpacked = unpacked_arguments(text)
        assert declared_arguments(text)[: len(unpacked)] == unpacked, name
        assert text.count("ARGV[") == len(re.findall(r"^ *local \w+ = .*ARGV\[", text, re.M)), name


def declared_arguments(text: str) -> list[str]:
    """Return the names in a script's comment `ARGV: ...`."""
    (comment,) = re.findall(r"^-- ARGV: ((?:.*\n)(?:-- .*\n)*)", text, re.M)
    plain = re.sub(
        r"\([^)]*\)|\bthen\b|\brepeated\b[ \d]*:|\bnone\b", "", comment.replace("\n-- ", " ")
    )
    return re.findall(r"\w+", plain)


def unpacked_arguments(text: str) -> list[str]:
    """Return the names that a script gives to its arguments, each at its first place."""
    assigned = re.findall(r"local ((?:\w|[,\s])+?) =\s+(?:\{?unpack\(ARGV|\S*ARGV\[)", text)
    return list(dict.fromkeys(name for names in assigned for name in re.findall(r"\w+", names)))


LUA_FILES = sorted((REPO / "fleet").rglob("*.lua"))
LUA_FUNCTION = re.compile(r"^( *)local function .*?[^\n]$(?:\n(?:\1 .*|))*\n\1end$", re.MULTILINE)


def test_layout_is_left_to_the_formatter() -> None:
    skips = sum(line.endswith("# fmt: skip") for path in EVERYTHING for line in lines_of(path))
    assert skips <= MAX_FMT_SKIPS


def test_no_line_sets_three_attributes() -> None:
    found = [
        f"{relative(path)}:{node.lineno}"
        for path in EVERYTHING
        for node in nodes(path)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Tuple)
        if sum(isinstance(each, ast.Attribute) for each in target.elts) > 2
    ]
    assert found == []


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines()


def excesses(path: Path) -> Iterator[tuple[str, str]]:
    """Yield what exceeds a limit, "" for the file, `:line` or `: function`, and its size."""
    lines = lines_of(path)
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_COLUMNS:
            yield f":{number}", f"{len(line)} columns, limit {MAX_COLUMNS}"
    num_lines = len(lines)
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
    long_function = "local function f()\n" + "  g()\n" * MAX_FUNCTION_LINES + "end\n"
    assert [line for line, _ in lua_excesses(f"local a = 1\n{long_function}")] == [2]
    assert [line for line, _ in lua_excesses("g()\n" + "-" * 101)] == [2]
    swallower = next(
        node
        for node in ast.walk(ast.parse("try: f()\nexcept Exception: pass"))
        if isinstance(node, ast.ExceptHandler)
    )
    assert swallows_everything(swallower)
