"""The source tree as data (files, syntax trees, imports) for tests of layering, style and
vocabulary.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support import REPO

OURS = ("fleet", "web")


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(parsed(path)))


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (REPO / folder).rglob("*.py"))


SOURCES = python_files(*OURS)
EVERYTHING = python_files(*OURS, "tests")


@cache
def relative(path: Path) -> str:
    return path.relative_to(REPO).as_posix()


def module_of(path: Path) -> str:
    parts = path.relative_to(REPO).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def within(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Return (line, module) of every import in a file, lazy and type-checking imports included;
    `from a import b` counts as a.b.
    """
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno}: write imports in full"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
