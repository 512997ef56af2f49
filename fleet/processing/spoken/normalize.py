"""A clause as it is spoken: without Markdown, and with numbers, dates, amounts, addresses and signs
said as a person would.

Only English has rules for more than Markdown; text of other languages is otherwise unchanged.
Knows no voice. Whole numbers, decimals, ordinals and years stay digits: the pronunciation reads
them.
"""

import re
from dataclasses import dataclass
from functools import cache

from fleet.processing.spoken.clauses import Clause
from fleet.processing.spoken.english import ENGLISH
from fleet.processing.spoken.markdown import EMOJI, MARKDOWN, MID_LINE
from fleet.processing.spoken.rules import Fragment, RuleSet

_ENDS = ".!?…:;,。！？、"

_MARKS = _ENDS + "\"'“”‘’«»()[]{}*-–—¿¡"


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenWord:
    """A word of the written text with the white space around it. `num_spoken`: number of words of
    the spoken clause that have been said when this word ends.
    """

    text: str
    num_spoken: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpokenWords:
    """A clause to be spoken. `text`: words separated by single spaces; "" if nothing is said.
    `written`: the words of the clause, whose texts, joined, are the clause.
    """

    text: str
    written: tuple[WrittenWord, ...]


@dataclass(slots=True, kw_only=True)
class _Word:
    """Spoken word in progress. `end`: position in the clause at which its written form ends."""

    text: str
    end: int


def spoken_text(clause: Clause, language: str) -> SpokenWords:
    """Return what is said for a clause. `language`: tag of the voice's language, such as `en-US`.

    Code blocks are not spoken.
    """
    words = [] if clause.is_code else _spoken_words(clause, language)
    return SpokenWords(
        text=" ".join(word.text for word in words),
        written=tuple(_written_words(clause.text, words)),
    )


@cache
def _rules(language: str) -> RuleSet:
    is_english = language.partition("-")[0].lower() == "en"
    return RuleSet((*MARKDOWN, *(ENGLISH if is_english else ()), *EMOJI))


def _spoken_words(clause: Clause, language: str) -> list[_Word]:
    mark = "" if clause.starts_line else MID_LINE
    fragments = _rules(language).fragments(mark + clause.text)
    words = _joined(fragments, len(mark))
    if clause.ends_line and words and words[-1].text.rstrip("\"'”’)")[-1:] not in _ENDS:
        words[-1].text += "."
    return words


def _joined(fragments: list[Fragment], skip: int) -> list[_Word]:
    """Return the spoken words of fragments, punctuation joined to the word before it. `skip`:
    number of characters before the clause.
    """
    words: list[_Word] = []
    end = -skip
    is_open = False
    for fragment in fragments:
        end += len(fragment.source)
        for part in re.findall(r"\s+|\S+", fragment.spoken):
            if part.isspace():
                is_open = False
            elif is_open or (words and _is_punctuation(part) and part[0] not in "\"'“‘("):
                _append(words[-1], part, end)
                is_open = True
            else:
                words.append(_Word(text=part, end=end))
                is_open = True
    return [word for word in words if not _is_punctuation(word.text)]


def _append(word: _Word, part: str, end: int) -> None:
    """Add a part to a word; of two pause marks in a row, the stronger stays."""
    word.end = end
    if _is_punctuation(part) and word.text[-1] in _ENDS and part[0] in _ENDS:
        stronger = min(word.text[-1], part[0], key="!?….:;,。！？、".index)
        word.text = word.text[:-1] + stronger + part[1:]
    else:
        word.text += part


def _is_punctuation(text: str) -> bool:
    return not text.strip(_MARKS)


def _written_words(text: str, words: list[_Word]) -> list[WrittenWord]:
    written: list[WrittenWord] = []
    end = num_spoken = 0
    for part in re.findall(r"\s*\S+\s*(?!\S)|\s+", text):
        end += len(part)
        while num_spoken < len(words) and words[num_spoken].end <= end:
            num_spoken += 1
        written.append(WrittenWord(text=part, num_spoken=num_spoken))
    return written
