"""Counts docstring habits that are hard to follow, and checks that a class name has one class."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.sources import EVERYTHING, nodes, relative

SENTENCES = "sentences that begin with a pronoun"
HABITS = {
    "headless glosses": (
        re.compile(
            r"`[^`\n]{1,40}`: (?:of|that|those|as|from|to|in|on|for|with|by|until|where|None"
            r"|its|their)\b"
        ),
        5,
    ),
    "counted pronouns": (
        re.compile(r"\b(?:so many|that of|those of|one of them|another one)\b", re.IGNORECASE),
        20,
    ),
    SENTENCES: (
        re.compile(r"(?:^|[.:!?] )(?:It|They|These|Those|None|Others|Both|Each|One)\b(?= )"),
        10,
    ),
}
"""Pattern of each habit, and the number of docstrings that may have it, which may only shrink."""


def docstrings(path: Path) -> list[tuple[int, str]]:
    """Return the docstrings of a file, with the line of the function, class or module they belong
    to.
    """
    return [
        (getattr(node, "lineno", 1), text)
        for node in nodes(path)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (text := ast.get_docstring(node))
    ]


@pytest.mark.parametrize("habit", HABITS)
def test_habit_does_not_grow(habit: str) -> None:
    pattern, ceiling = HABITS[habit]
    places = [
        f"{relative(path)}:{line}"
        for path in EVERYTHING
        for line, text in docstrings(path)
        if pattern.search(text.replace("\n", " ") if habit == SENTENCES else text)
    ]
    assert len(places) <= ceiling, "\n".join(places)


def test_class_name_has_one_class() -> None:
    classes: dict[str, set[str]] = defaultdict(set)
    for path in EVERYTHING:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                classes[node.name].add(relative(path))
    assert {name: files for name, files in classes.items() if len(files) > 1} == {}
