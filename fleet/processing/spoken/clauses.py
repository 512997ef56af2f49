"""Division of a growing text into clauses, each of which is spoken in one piece.

Clauses depend on the text only and not on how it arrives: the cutter reads one character at a
time, and decides after each one from the characters so far. Their texts, joined, are the whole
text. Knows no voice and no language model; Markdown only as far as it forbids cuts.
"""

import re
from dataclasses import dataclass

from fleet.processing.spoken.abbreviations import AMBIGUOUS, NEVER_LAST, WEAK_WORDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Clause:
    """A part of the text. `starts_line`, `ends_line`: True if a line begins, or ends, with this
    part. `is_code`: True if the part belongs to a fenced code block, fences included.
    """

    text: str
    starts_line: bool
    ends_line: bool
    is_code: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClauseLengths:
    """Lengths in characters from which a clause may end: at the end of a sentence, at a comma or
    similar mark, and at a space.
    """

    sentence: int
    comma: int
    space: int


RAMP = (
    ClauseLengths(sentence=12, comma=12, space=40),
    ClauseLengths(sentence=12, comma=50, space=100),
    ClauseLengths(sentence=12, comma=120, space=200),
)
"""Lengths of the first clause, which is short so that sound begins early; of the second, which is
synthesised while the first plays; and of all later clauses.
"""
MAX_CLAUSE_CHARS = 300
"""Length in characters at which a clause is cut even within a sentence, at a space if possible."""
_MAX_OPEN_CHARS = 120
"""Length up to which an open code span or link is expected to close."""
_MAX_LINE_START_CHARS = 100
"""Length of the beginning of a line that tells what kind of line it is."""
_CLOSERS = "\"'”’»)]*_`~"
_FENCE = re.compile(r"\s{0,3}(```+|~~~+)")
_BLOCK_LINE = re.compile(r"\s*(?:#{1,6}\s|[-*+•]\s|\d{1,3}[.)]\s|>|\|)|\s*(?:[-*_]\s*){3,}$")
_LIST_MARKER = re.compile(r"\s*(?:\d{1,3}|[A-Za-z])[.)]$")
_INITIALS = re.compile(r"(?:[A-Za-z]\.)+$")
_MONTH_DAY = re.compile(
    r"(?:Jan|Feb|Mar|Apr|May|June?|July?|Aug|Sept?|Oct|Nov|Dec)[a-z]*\.? \d{1,2}(?:st|nd|rd|th)?,$"
)
_WIDE_ENDS = "。！？"


class ClauseCutter:
    """Cutter of one answer's text, fed in pieces of any size."""

    def __init__(self) -> None:
        self._text = ""
        self._line = ""
        self._fence = ""
        self._starts_line = True
        self._newline_open = False
        self._num_cut = 0

    @property
    def num_chars(self) -> int:
        """Number of characters fed that belong to no clause yet."""
        return len(self._text)

    def feed(self, piece: str) -> list[Clause]:
        """Add text; return the clauses that it completes."""
        return [clause for char in piece for clause in self._add(char)]

    def finish(self) -> list[Clause]:
        """Return the rest of the text, which ends here."""
        is_code = bool(self._fence) or self._is_fence_line()
        return self._cut(len(self._text), ends_line=True, is_code=is_code) if self._text else []

    def _add(self, char: str) -> list[Clause]:
        before = self._text
        self._text += char
        if char == "\n":
            return self._end_line()
        clauses: list[Clause] = []
        if self._newline_open and not char.isspace():
            self._newline_open = False
            if not char.islower():
                clauses = self._cut(len(before), ends_line=True)
        if len(self._line) < _MAX_LINE_START_CHARS:
            self._line += char
        if self._fence or self._is_fence_line():
            return clauses + self._cut_long(is_code=bool(self._fence))
        return clauses or self._cut_at(char, before)

    def _cut_at(self, char: str, before: str) -> list[Clause]:
        """Return the clause that ends with `char`, or just before `char`; empty if none ends.
        `before`: text that belongs to no clause yet, without `char`.
        """
        if char in _WIDE_ENDS:
            return self._cut(len(self._text))
        if before and not self._is_inside():
            if char.isspace() and not before[-1].isspace():
                return self._cut(len(self._text)) if self._ends_before_space(before) else []
            if not char.isspace() and self._ends_before_word(before, char):
                return self._cut(len(before))
        return self._cut_long(is_code=False)

    def _end_line(self) -> list[Clause]:
        """Return the clauses that end with the current line; empty if the sentence may continue on
        the next line, or the text so far is blank.
        """
        line, self._line = self._line, ""
        if self._fence or _FENCE.match(line):
            return self._end_code_line(line)
        plain = self._text[:-1].rpartition("\n")[2].rstrip()
        if not self._text.strip():
            is_long = len(self._text) >= MAX_CLAUSE_CHARS
            return self._cut(len(self._text), ends_line=True) if is_long else []
        ends = plain.rstrip(_CLOSERS)[-1:] in ".!?:;…。！？" or not plain
        if ends or _BLOCK_LINE.match(line):
            self._newline_open = False
            return self._cut(len(self._text), ends_line=True)
        self._newline_open = True
        return []

    def _end_code_line(self, line: str) -> list[Clause]:
        fence = _FENCE.match(line)
        clauses: list[Clause] = []
        if not self._fence:
            assert fence is not None
            self._fence = fence[1]
            clauses = self._cut(self._text.rfind("\n", 0, -1) + 1, ends_line=True)
        elif fence and fence[1].startswith(self._fence) and not line[fence.end() :].strip():
            self._fence = ""
        self._newline_open = False
        return clauses + self._cut(len(self._text), ends_line=True, is_code=True)

    def _is_fence_line(self) -> bool:
        return _FENCE.match(self._line) is not None

    def _is_inside(self) -> bool:
        """Return True within a code span or a link of the current line."""
        recent = self._text[-_MAX_OPEN_CHARS:].rpartition("\n")[2]
        if recent.count("`") % 2:
            return True
        opened = recent.rfind("[")
        if opened < 0:
            return False
        closed = recent.find("]", opened)
        if closed < 0:
            return True
        return recent[closed + 1 : closed + 2] == "(" and ")" not in recent[closed:]

    def _ends_before_space(self, head: str) -> bool:
        lengths, length = self._lengths, len(head.strip())
        bare = head.rstrip(_CLOSERS)
        if length < lengths.sentence or not bare:
            return False
        if bare[-1] in "!?":
            return True
        if bare[-1] == "." and not bare.endswith(".."):
            return self._is_full_stop(bare)
        is_dash = bare[-1] == "—" or bare[-2:] in (" -", " –")
        return (
            length >= lengths.comma
            and (bare[-1] in ",;:…" or is_dash or bare.endswith("..."))
            and not _MONTH_DAY.search(bare)
        )

    def _is_full_stop(self, bare: str) -> bool:
        word = bare.rsplit(None, 1)[-1].lstrip("\"'“‘([*_")
        return (
            word.lower() not in NEVER_LAST
            and word.lower() not in AMBIGUOUS
            and not _INITIALS.fullmatch(word)
            and not _LIST_MARKER.match(self._line.rstrip())
        )

    def _ends_before_word(self, head: str, char: str) -> bool:
        """Return True if a clause ends before the word that begins with `char`."""
        length = len(head.strip())
        if head[-1] == "—":
            return length >= self._lengths.comma and char.isalpha()
        if not head[-1].isspace():
            return False
        words = head.rsplit(None, 1)
        word = words[-1].lstrip("\"'“‘([*_") if words else ""
        if word.lower() in AMBIGUOUS or (_INITIALS.fullmatch(word) and len(word) > 2):
            return char.isupper() and length >= self._lengths.sentence
        is_joined = word.lower() in WEAK_WORDS or word.lower() in NEVER_LAST
        return (
            length >= self._lengths.space
            and char.isalpha()
            and word[-1:].isalpha()
            and not is_joined
        )

    @property
    def _lengths(self) -> ClauseLengths:
        return RAMP[min(self._num_cut, len(RAMP) - 1)]

    def _cut_long(self, *, is_code: bool) -> list[Clause]:
        """Return a clause if the text is too long for one: up to its last space, or all of it."""
        if len(self._text) < MAX_CLAUSE_CHARS:
            return []
        space = 0 if is_code else self._text.rstrip().rfind(" ") + 1
        end = space if space > MAX_CLAUSE_CHARS // 2 else len(self._text)
        return self._cut(end, is_code=is_code)

    def _cut(self, end: int, *, ends_line: bool = False, is_code: bool = False) -> list[Clause]:
        text, self._text = self._text[:end], self._text[end:]
        if not text:
            return []
        clause = Clause(
            text=text, starts_line=self._starts_line, ends_line=ends_line, is_code=is_code
        )
        self._starts_line = ends_line
        self._num_cut += bool(text.strip()) and not is_code
        return [clause]
