"""Parser of YAML text to plain values that refuses mistakes YAML permits, such as duplicate keys
and recursive aliases. Knows no field.
"""

import re

import yaml
from yaml.reader import ReaderError

from fleet.config.names import join_path

MAX_DEPTH = 16
MAX_VALUES = 10_000
"""Most values of a document with its aliases expanded. No deployment has as many; a chain of
aliases reaches the limit in a few lines.
"""
_TEXT, _MERGE = "tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"


class Malformed(Exception):
    """Error for text that is not a deployment. `field`: dotted key at fault; empty if the text is
    not valid YAML.
    """

    def __init__(self, problem: str, *, field: str = "", line: int | None = None) -> None:
        super().__init__(problem)
        self.problem = problem
        self.field = field
        self.line = line

    @property
    def message(self) -> str:
        where = f" (line {self.line})" if self.line else ""
        return (
            f"{self.field}: {self.problem}{where}"
            if self.field
            else f"not valid YAML{where}: {self.problem}"
        )


def parse_yaml(text: str) -> object:
    """Return the values of the one YAML document in `text`; None if there is no document.

    Raises: Malformed, with a message of one line.
    """
    try:
        loader = _Loader(text)
    except ReaderError as error:
        raise Malformed(
            f"the character {chr(error.character)!r} is not allowed; remove it"
        ) from error
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _Audit().check(node)
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        raise Malformed(
            _problem(error), line=error.problem_mark.line + 1 if error.problem_mark else None
        ) from error
    finally:
        loader.dispose()


def _problem(error: yaml.MarkedYAMLError) -> str:
    problem = " ".join(str(error.problem or error.context).split())
    if "'\\t'" in problem:
        return "a tab; indent with spaces"
    if error.context and "document" in error.context:
        return f"{error.context}, {problem}; keep one"
    return problem


_WITHOUT_BASE_60 = re.compile(r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)$")


class _Loader(yaml.SafeLoader):
    """YAML loader that limits nesting, and names the line of an invalid date or number. Text such
    as 10:19 stays text instead of becoming a base-60 number.
    """

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Malformed(
                f"sections are nested more than {MAX_DEPTH} deep; a deployment has four levels",
                line=self.line + 1,
            )
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        try:
            return super().construct_object(node, deep)
        except ValueError as error:
            raise Malformed(
                f"{node.value!r:.60} is no date and no number; put it in quotes", line=_line(node)
            ) from error


_INT = "tag:yaml.org,2002:int"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, _WITHOUT_BASE_60 if tag == _INT else form) for tag, form in resolvers]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _Audit:
    """Check of the parsed YAML nodes before values are constructed: finds recursive aliases,
    duplicate keys, and aliases that expand to too many values.

    Every node is visited once, regardless of the number of its aliases.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._open: set[int] = set()

    def check(self, root: yaml.Node) -> None:
        if self._size(root, ()) > MAX_VALUES:
            raise Malformed(
                f"its aliases expand to more than {MAX_VALUES} values; write the values out"
            )

    def _size(self, node: yaml.Node, path: tuple[str, ...]) -> int:
        """Return the number of values of the node with every alias expanded."""
        known = self._sizes.get(id(node))
        if known is not None:
            return known
        if id(node) in self._open:
            raise Malformed(
                "an alias refers to a section that contains it; write the values out",
                line=_line(node),
            )
        self._open.add(id(node))
        size = 1 + sum(self._size(child, place) for child, place in _children(node, path))
        self._open.discard(id(node))
        self._sizes[id(node)] = size
        return size


def _children(node: yaml.Node, path: tuple[str, ...]) -> list[tuple[yaml.Node, tuple[str, ...]]]:
    if isinstance(node, yaml.SequenceNode):
        return [(item, (*path, str(number))) for number, item in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        return []
    lines: dict[str, int] = {}
    for key, _ in node.value:
        name = _name(key)
        if name in lines:
            raise Malformed(_twice(lines[name], _line(key)), field=join_path((*path, name)))
        lines[name] = _line(key)
    return [(value, (*path, str(key.value))) for key, value in node.value]


def _name(key: yaml.Node) -> str:
    if not isinstance(key, yaml.ScalarNode) or key.tag not in (_TEXT, _MERGE):
        shown = repr(key.value)[:60] if isinstance(key, yaml.ScalarNode) else "a list or a section"
        raise Malformed(f"{shown} as a key is not text; put it in quotes", line=_line(key))
    return str(key.value)


def _twice(first: int, second: int) -> str:
    return (
        f"given twice (lines {first} and {second}); keep one"
        if first != second
        else "given twice; keep one"
    )


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
