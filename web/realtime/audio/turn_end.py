"""Length of the silence that ends a turn, from the words that were spoken before it. Pure; knows no
audio, no recogniser and no clock.

A complete sentence ends a turn soon. A speaker who stops after a conjunction, an article or a
hesitation, in the middle of an enumeration or of a subordinate clause goes on, so that the turn
waits for longer. A short statement, a number or two items of a list may be the whole sentence or
not, so that the turn waits a little longer than for a complete one. Recognisers put a full stop
after whatever they hear, so that punctuation alone means little: words are read first.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal

Eagerness = Literal["low", "medium", "high", "auto"]


class SentenceEnd(Enum):
    """What the words say about the end of a turn."""

    COMPLETE = "complete"
    """A sentence that can stand alone."""
    UNCLEAR = "unclear"
    """Words that may be whole or not."""
    UNFINISHED = "unfinished"
    """Words after which more must come."""
    UNKNOWN = "unknown"
    """No words: none were recognised, or not yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndWaits:
    """Silence that ends a turn, by what the words say. Units: milliseconds."""

    complete_ms: int
    unclear_ms: int
    unfinished_ms: int
    unknown_ms: int

    def of(self, ending: SentenceEnd) -> int:
        match ending:
            case SentenceEnd.COMPLETE:
                return self.complete_ms
            case SentenceEnd.UNCLEAR:
                return self.unclear_ms
            case SentenceEnd.UNFINISHED:
                return self.unfinished_ms
            case SentenceEnd.UNKNOWN:
                return self.unknown_ms


MEDIUM = EndWaits(complete_ms=320, unclear_ms=600, unfinished_ms=1600, unknown_ms=500)
WAITS: Mapping[Eagerness, EndWaits] = {
    "low": EndWaits(complete_ms=600, unclear_ms=1000, unfinished_ms=3000, unknown_ms=1000),
    "medium": MEDIUM,
    "auto": MEDIUM,
    "high": EndWaits(complete_ms=200, unclear_ms=500, unfinished_ms=1000, unknown_ms=400),
}

HESITATIONS = frozenset("um uh uhm erm er hmm hm ähm äh euh".split())
CONJUNCTIONS = frozenset(
    "and or but nor because although unless until while whereas if whether than und oder aber "
    "weil dass wenn et ou mais parce que".split()
)
ARTICLES = frozenset(
    "a an the my your his its our their every der die das ein eine le la les un une".split()
)
SUBJECTS = frozenset("i we they he she".split())
OPEN_WORDS = HESITATIONS | CONJUNCTIONS | ARTICLES | SUBJECTS
"""Last words after which more must come."""
PREPOSITIONS = frozenset(
    "of to from with without into onto at for by about between among against during through "
    "towards toward via per despite except like as near".split()
)
AUXILIARIES = frozenset(
    "is are was were be been am has have had can could will would shall should may might must "
    "i'm you're we're they're it's that's there's i'd you'd we'd i'll you'll we'll i've you've "
    "we've let's gonna wanna".split()
)
TRANSITIVES = frozenset(
    "want need tell give show send bring put make find buy take get let say said says mean means "
    "called think thought wondering looking trying which who whom whose that where when why how "
    "what".split()
)
OPEN_AFTER_STATEMENT = PREPOSITIONS | AUXILIARIES | TRANSITIVES
"""Last words after which more must come, except behind a question word: "Where are you from?",
"I know what it is."
"""
QUESTION_WORDS = frozenset("what where who whom which why when how whose".split())
LONE_OPENERS = frozenset("so well actually basically also then plus anyway".split())
"""Words after which more must come if they are the only word of the sentence."""
SUBORDINATORS = frozenset("after before once until since as".split())
CONDITIONS = frozenset("if unless although though whereas when whenever while".split())
"""First words of a subordinate clause, which needs a main clause. The words in `SUBORDINATORS` may
also begin a complete answer ("After dinner.").
"""
CLAUSE_BEGINNING = re.compile(
    r"\b(?:i|you|he|she|it|we|they|this|that|there|who|what|let|please|can|could|would|will|do|"
    r"does|did|is|are|tell|give|show|send|turn|call|take|go|ask|open|close|play|set|make|put)\b"
)
ANSWERS = frozenset("yes no yeah yep nope okay ok right sure thanks please and or".split())
CLOSERS = ANSWERS | frozenset(
    "though too then today tomorrow now again maybe sir madam mom dad everyone honestly actually "
    "really instead anyway however already".split()
)
"""Single words that end a sentence after a comma."""
ENDERS = CLOSERS | frozenset("it him them me us so not".split())
"""Last words of a statement that is probably whole, however short."""
LIST_ITEM_WORDS = 3
"""Longest item of an enumeration, in words."""
LAST_ITEM = frozenset({"and", "or"})
"""Words that introduce the last item of an enumeration."""
ADDRESSING = frozenset("tell ask remind show give send".split())
ASKING = frozenset("do does did can could would will shall should".split())
GREETINGS = frozenset("hi hello hey".split())
STATING = frozenset(
    "i you he she it we they this that these those there the my your his her its our their "
    "everything everyone something someone".split()
)
MIN_WORDS: Mapping[str, int] = {
    **dict.fromkeys(ADDRESSING, 4),
    **dict.fromkeys(ASKING, 4),
    **dict.fromkeys(GREETINGS, 3),
    **dict.fromkeys(STATING, 6),
}
"""Fewest words of a sentence that is probably whole, by its first word. Shorter ones often go on:
"Tell my brother", "Can you lower", "Hi there", "I left my keys".
"""
NAME = ""
"""Stands for a name, which is none of the words above."""
_WORD = re.compile(r"[\w']+")
_END = re.compile(r"[.!?。！？]+[\"'”)\]]*$")


def end_of_turn_ms(transcript: str | None, waits: EndWaits) -> int:
    """Return the length of the silence that ends a turn. `transcript` is what was recognised of
    the turn up to the silence; None while nothing is known.
    """
    return waits.of(ending_of(transcript))


def ending_of(transcript: str | None) -> SentenceEnd:
    """Judge the last sentence of a transcript."""
    text = (transcript or "").strip().replace("’", "'")
    if text.endswith(("...", "…", ",", "-", "–", "—", ":", ";")):
        return SentenceEnd.UNFINISHED
    sentence = re.split(r"(?<=[.!?])\s+", text)[-1]
    words = [word.lower() for word in _WORD.findall(sentence)]
    if not words:
        return SentenceEnd.UNKNOWN
    if len(words) > 1 and _is_name(_WORD.findall(sentence)[-1]):
        words[-1] = NAME
    sentence = sentence.lower()
    is_question = "?" in sentence or "？" in sentence
    is_open = _ends_open(words) or (
        not is_question and (_is_open_clause(sentence, words) or _is_open_list(sentence))
    )
    if is_open:
        return SentenceEnd.UNFINISHED
    is_unclear = _is_short(words) or _ends_in_number(sentence) or _is_short_list(sentence)
    return SentenceEnd.UNCLEAR if is_unclear or not _END.search(text) else SentenceEnd.COMPLETE


def _is_name(word: str) -> bool:
    """Return True if `word`, the last of a sentence, looks like a name, such as May."""
    return word[0].isupper() and len(word) > 1 and "'" not in word


def _ends_open(words: list[str]) -> bool:
    """Return True if the last word needs another one after it."""
    last, before = words[-1], words[:-1]
    if last in OPEN_WORDS or ("between" in before and _lacks_second(words)):
        return True
    if not before:
        return last in LONE_OPENERS
    if before[0] in ANSWERS and last in AUXILIARIES:
        return False
    return last in OPEN_AFTER_STATEMENT and not QUESTION_WORDS.intersection(before)


def _lacks_second(words: list[str]) -> bool:
    """Return True if the last "between" of a sentence has only one of its two parts: "between a
    lake".
    """
    after = words[len(words) - words[::-1].index("between") :]
    return not {"and", "them", "us", "both"}.intersection(after)


def _is_short(words: list[str]) -> bool:
    """Return True if the sentence has fewer words than a whole one that begins with its first word
    usually has (`MIN_WORDS`), unless it is a statement that ends in one of `ENDERS`.
    """
    first = words[0].partition("'")[0]
    is_whole = first in STATING and words[-1] in ENDERS
    return len(words) < MIN_WORDS.get(first, 1) and not is_whole


def _is_open_clause(sentence: str, words: list[str]) -> bool:
    """Return True if the sentence is a subordinate clause without its main clause: "If it rains
    tomorrow."
    """
    if words[0] not in SUBORDINATORS | CONDITIONS:
        return False
    head, comma, rest = sentence.partition(",")
    if comma:
        return not _WORD.search(rest)
    num_clauses = len(CLAUSE_BEGINNING.findall(" ".join(_WORD.findall(head)[1:])))
    return num_clauses == 1 or (num_clauses == 0 and words[0] in CONDITIONS)


def _is_open_list(sentence: str) -> bool:
    """Return True if the sentence ends in an enumeration of at least three short items whose last
    one has no "and" or "or" before it: "I need eggs, milk, bread."
    """
    items = [_WORD.findall(part) for part in sentence.split(",")]
    tail = items[-2:]
    if len(items) < 3 or not all(0 < len(item) <= LIST_ITEM_WORDS for item in tail):
        return False
    is_listed = not any(item[0] in ANSWERS or any(map(str.isdigit, item)) for item in tail)
    return is_listed and not LAST_ITEM.intersection(items[-1])


def _is_short_list(sentence: str) -> bool:
    """Return True if the sentence ends in two items that may be the beginning of an enumeration: "I
    bought apples, pears."
    """
    items = [_WORD.findall(part) for part in sentence.split(",")]
    if len(items) != 2 or not all(items):
        return False
    first, last = items
    has_clause = len(first) > 1 and first[0] not in SUBORDINATORS | CONDITIONS
    is_item = len(last) <= LIST_ITEM_WORDS and last[0] not in CLOSERS | STATING
    is_last = bool(LAST_ITEM.intersection(last))
    return is_item and not is_last and has_clause and sentence.rstrip().endswith(".")


def _ends_in_number(sentence: str) -> bool:
    """Return True if the sentence ends in a number, which may have further digits or a unit. A time
    such as 5:30 is whole.
    """
    last = sentence.split()[-1].rstrip(".!,\"')")
    return last.replace("-", "").isdigit()
