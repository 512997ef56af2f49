"""The words of the source: plain technical English in prose, names and messages, and one class for
each class name.
"""

import ast
import io
import re
import subprocess
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.sources import parsed, relative
from tests.support import REPO

ROOTS = (
    "fleet",
    "web",
    "tests",
    "configs",
    "deploy",
    "README.md",
    "Procfile",
    "check",
    "pyproject.toml",
)
SKIPPED = (
    "web/static/vendor/",
    "fleet_serving.egg-info/",
    "deploy/requirements.lock",
    "tests/unit/test_language.py",
)

PROCESS = (
    "(?:(?:worker|gateway|conductor|engine|stage|keeper|decoder|script|producer|consumer)s?"
    "|redis|process(?:es)?)"
)
PROSE: dict[str, str] = {
    r"told|tells?|telling": "send, report, notify, show, distinguish",
    r"anew": "again",
    r"bears?|bearing": "has, carries",
    r"bids?|bidden|bade": "orders, requests",
    r"obeys?|obeyed": "follows",
    r"whoever|whomever|whatever|nobody": "name the subject",
    r"ours|theirs": "name the owner",
    r"at once": "immediately; at one time",
    r"(?:made|makes?|making|made all) again": "recomputed",
    r"(?:goes|go|going|went|gone) on(?! (?:a|an|the|its|top)\b)": "continues, resumes",
    r"for ever": "indefinitely",
    r"stor(?:y|ies)": "trace",
    r"spared|stirred|astray|amiss|awry|lest|thereof|whence|alas|aftermath": "plain words",
    r"blows?": "fault",
    r"hall|(?:a|the|each|every) makings?|makings": "session registry, generation",
    r"(?<!speech )(?<!vowel )sound(?! (?:card|device)\b)": "audio, speech",
    r"(?<!speech )(?<!vowel )sounds(?! (?:like|as|natural|the same)\b)": "audio",
    r"(?:is|are|was|were|been|be|never|ever|not) heard (?:of|from)": "received",
    r"(?:hears?|heard|speaks?|spoke) of": "receives, names",
    PROCESS + r" (?:(?:does|do|did|will|must|can|may) (?:not "
    r")?)?(?:knows?|knew|hears?|heard|wants?|wishes|thinks?|believes?)": (
        "things are not persons: has, receives, reads"
    ),
    r"(?:what|who|whose) (?:nobody|does not|did not|no one)": "name the subject",
}
"""Pattern of prose -> what to write instead; matched as whole words, in any case, outside of
`code`.
"""

NAMES = (
    "told tells anew whose whom whoever whatever nobody spared stirred owes astray unattended "
    "blows aftermath story bids bears"
).split()
"""Words that no name of a function, class, parameter, variable or attribute has."""
TEST_NAMES: list[str] = [*NAMES, "who", "what", "tell", "at_once", "goes_on", "go_on", "made_again"]
CLASS_NAMES = set(
    "Adoption Ahead Asked Ear Gift Hall Heard Listener Mail Making Marks Opened Passing Replies "
    "Said Told Waiter Watcher".split()
)
"""Names of classes that have been replaced."""
FIRST_WORDS = {
    "Whether",
    "What",
    "Who",
    "Whose",
    "Whom",
    "Of",
    "Nobody",
    "How",
    "Where",
    "That",
    "Whatever",
    "Whoever",
}
"""Docstrings begin with a verb or a noun phrase."""

EXCEPTIONS: dict[tuple[str, str], str] = {}
"""(file, word) -> why it is right there. May only shrink."""

ANY = re.compile("|".join(f"(?:{pattern})" for pattern in PROSE), re.IGNORECASE)
FIXES = [
    (re.compile(rf"(?<![\w-])(?:{pattern})(?![\w-])", re.IGNORECASE), advice)
    for pattern, advice in PROSE.items()
]
CODE_SPAN = re.compile(r"`[^`\n]*`|https?://\S+")


class Offence(NamedTuple):
    """One passage that breaks a rule, and what to write instead."""

    file: str
    line: int
    word: str
    text: str
    advice: str

    def __str__(self) -> str:
        return (
            f"{self.file}:{self.line}: {self.word!r} ({self.advice}): "
            f"{' '.join(self.text.split())[:110]}"
        )


Passage = tuple[int, str]
"""The line that a piece of prose begins at, and its text."""


def offences() -> list[Offence]:
    found: list[Offence] = []
    classes: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for path in _files():
        name = relative(path)
        if path.suffix != ".py":
            found += _prose(name, _text_prose(path))
            continue
        nodes = list(ast.walk(parsed(path)))
        if path.name.startswith("test_"):
            found += _name(name, 1, path.stem, TEST_NAMES)
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                classes[node.name].append((name, node.lineno))
        found += [
            *_prose(name, _python_prose(nodes, path.read_text())),
            *_docstring_starts(name, nodes),
            *_names(name, nodes),
        ]
    return sorted({*found, *_double_classes(classes)})


def _files() -> list[Path]:
    """Files under version control, and new ones that are not ignored."""
    listing = [
        "git",
        "-C",
        str(REPO),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
        "--",
        *ROOTS,
    ]
    names = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.split("\0")
    return [
        REPO / name
        for name in sorted(set(names))
        if name and not name.startswith(SKIPPED) and (REPO / name).is_file()
    ]


def _prose(name: str, passages: Iterator[Passage]) -> Iterator[Offence]:
    for line, text in passages:
        if ANY.search(text) is None:
            continue
        bare = CODE_SPAN.sub(lambda span: " " * len(span[0]), text)
        for pattern, advice in FIXES:
            for match in pattern.finditer(bare):
                before = bare[: match.start()]
                start = before.rfind("\n") + 1
                end = bare.find("\n", match.end())
                passage = text[start : end if end >= 0 else None]
                yield Offence(
                    name,
                    line + before.count("\n"),
                    " ".join(match[0].lower().split()),
                    passage,
                    advice,
                )


def _python_prose(nodes: list[ast.AST], source: str) -> Iterator[Passage]:
    """Docstrings (also those of attributes), comments, and the texts of log lines, errors and
    `--help`.
    """
    for node in nodes:
        match node:
            case ast.Expr(value=ast.Constant(value=str(text), lineno=line)):
                yield line, text
            case ast.Raise(exc=ast.Call() as call):
                yield from _strings(call)
            case ast.Assert(msg=ast.expr() as message):
                yield from _strings(message)
            case ast.Call() if _is_message(node):
                yield from _strings(node)
            case ast.keyword(arg="help" | "description" | "epilog", value=value):
                yield from _strings(value)
            case _:
                pass
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _is_message(call: ast.Call) -> bool:
    """Return True if the call logs a line, or builds an error or a metric."""
    match call.func:
        case ast.Attribute(value=ast.Name(id=owner), attr=method):
            return owner in ("log", "logger", "logging") or (owner, method) == ("typer", "echo")
        case ast.Name(id=name):
            return name.endswith(
                (
                    "Error",
                    "Exception",
                    "Refused",
                    "Counter",
                    "Gauge",
                    "Histogram",
                    "Metric",
                    "Family",
                )
            )
        case _:
            return False


def _strings(node: ast.expr) -> Iterator[Passage]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and " " in part.value:
            yield part.lineno, part.value.replace("\n", " ")


def _docstring_starts(name: str, nodes: list[ast.AST]) -> Iterator[Offence]:
    for node in nodes:
        match node:
            case ast.Expr(value=ast.Constant(value=str(text), lineno=line)):
                first = re.match(r"\W*(\w+)", text)
                if first is not None and first[1] in FIRST_WORDS:
                    opening = text.strip().splitlines()[0]
                    yield Offence(
                        name,
                        line,
                        first[1],
                        opening,
                        "begin with a verb or a noun; a predicate: Return True if ...",
                    )
            case _:
                pass


def _names(name: str, nodes: list[ast.AST]) -> Iterator[Offence]:
    for node in nodes:
        match node:
            case ast.FunctionDef(name=word) | ast.AsyncFunctionDef(name=word) if word.startswith(
                "test_"
            ):
                yield from _name(name, node.lineno, word, TEST_NAMES)
            case ast.FunctionDef(name=word) | ast.AsyncFunctionDef(name=word) | ast.arg(arg=word):
                yield from _name(name, node.lineno, word, NAMES)
            case ast.Name(id=word, ctx=ast.Store()) | ast.Attribute(attr=word, ctx=ast.Store()):
                yield from _name(name, node.lineno, word, NAMES)
            case ast.ClassDef(name=word):
                if word.lstrip("_") in CLASS_NAMES:
                    yield Offence(
                        name, node.lineno, word, f"class {word}", "a noun that the field uses"
                    )
                parts = "_".join(re.findall("[A-Z][a-z0-9]*", word)).lower()
                yield from _name(name, node.lineno, parts, NAMES)
            case _:
                pass


def _name(file: str, line: int, identifier: str, banned: Sequence[str]) -> Iterator[Offence]:
    for word in banned:
        if f"_{word}_" in f"_{identifier.lower()}_":
            yield Offence(file, line, word, identifier, "a name in plain words")


def _double_classes(classes: dict[str, list[tuple[str, int]]]) -> Iterator[Offence]:
    for word, places in classes.items():
        if len({file for file, _ in places}) > 1:
            for file, line in places:
                others = ", ".join(sorted({other for other, _ in places} - {file}))
                yield Offence(
                    file, line, word, f"class {word}; also in {others}", "one name, one class"
                )


def _text_prose(path: Path) -> Iterator[Passage]:
    text = path.read_text(errors="replace") if path.suffix in TEXT else ""
    comment = TEXT.get(path.suffix)
    if path.suffix == ".md":
        yield 1, _blank(r"^( *)```.*?^\1```|^(?: {4}|\t).*?$", text)
    elif path.suffix == ".html":
        yield 1, _blank(r"\{%.*?%\}|\{\{.*?\}\}|<script.*?</script>|<[^>]*>", text)
    elif comment is not None:
        for match in re.finditer(comment, text, re.MULTILINE | re.DOTALL):
            yield text.count("\n", 0, match.start()) + 1, match[0]


def _blank(pattern: str, text: str) -> str:
    """Replace what matches by as many empty lines."""
    return re.sub(
        pattern,
        lambda match: "\n" * match[0].count("\n") + " ",
        text,
        flags=re.MULTILINE | re.DOTALL,
    )


TEXT: dict[str, str | None] = {
    ".md": None,
    ".html": None,
    ".lua": r"--\[\[.*?\]\]|--[^\n]*",
    ".js": r"/\*.*?\*/|(?:^|(?<=[\s;{}]))//[^\n]*",
    ".css": r"/\*.*?\*/",
    ".yaml": r"(?:^|(?<=\s))#[^\n]*",
    ".toml": r"(?:^|(?<=\s))#[^\n]*",
    ".sh": r"(?:^|(?<=\s))#[^\n]*",
    ".service": r"^#[^\n]*",
    "": r"(?:^|(?<=\s))#[^\n]*",
}
"""Ending of a file -> its comments; Markdown and templates are read as prose without their code."""


def test_language_is_plain() -> None:
    found = offences()
    left = [offence for offence in found if (offence.file, offence.word) not in EXCEPTIONS]
    assert left == [], "\n".join(["", *map(str, left)])
    assert EXCEPTIONS.keys() <= {(offence.file, offence.word) for offence in found}, (
        "each exception is needed"
    )
