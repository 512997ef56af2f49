"""Length of the silence that ends a turn, from the words that were spoken before it. Pure; knows no
audio, no recogniser and no clock.

A complete sentence ends a turn soon. A speaker who stops after a conjunction, an article or a
hesitation, in the middle of an enumeration or of a subordinate clause goes on, so that the turn
waits for longer. Recognisers put a full stop after whatever they hear, so that punctuation alone
means little: words are read first.
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
    UNKNOWN = "unknown"
    """Words without a clear end, or none that were recognised."""
    UNFINISHED = "unfinished"
    """Words after which more must come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndWaits:
    """Silence that ends a turn, by what the words say. Units: milliseconds."""

    complete_ms: int
    unknown_ms: int
    unfinished_ms: int

    def of(self, ending: SentenceEnd) -> int:
        match ending:
            case SentenceEnd.COMPLETE:
                return self.complete_ms
            case SentenceEnd.UNKNOWN:
                return self.unknown_ms
            case SentenceEnd.UNFINISHED:
                return self.unfinished_ms


MEDIUM = EndWaits(complete_ms=320, unknown_ms=500, unfinished_ms=1600)
WAITS: Mapping[Eagerness, EndWaits] = {
    "low": EndWaits(complete_ms=600, unknown_ms=1000, unfinished_ms=3000),
    "medium": MEDIUM,
    "auto": MEDIUM,
    "high": EndWaits(complete_ms=200, unknown_ms=400, unfinished_ms=1000),
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
INTENSIFIERS = frozenset("very quite rather least such only even just".split())
OPEN_WORDS = HESITATIONS | CONJUNCTIONS | ARTICLES | SUBJECTS | INTENSIFIERS
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
MAYBE_OPEN = frozenset(
    "in on over explain describe remind suggest recommend offer choose order reserve use keep hold "
    "follow reach visit invite allow remove add create include require consider discuss compare "
    "mention provide contain cause prefer enjoy avoid seen done made taken given".split()
)
"""Last words of a complete sentence ("Come in.", "Can you explain?") or of an unfinished one ("I
live in", "Can you explain how")."""
ADDRESSED = frozenset("tell ask remind show give send".split())
MAX_ADDRESSED_WORDS = 3
"""Longest sentence that may have only said whom it addresses, not what: "Tell my brother"."""
LONE_OPENERS = frozenset("so well actually basically also then plus anyway".split())
"""Words that, alone, begin a sentence."""
SUBORDINATORS = frozenset("when after before once until whenever since while as".split())
CONDITIONS = frozenset("if unless although though whereas".split())
"""First words of a clause that needs a main clause; those of `SUBORDINATORS` also begin an answer
("After dinner.").
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
LIST_ITEM_WORDS = 3
"""Longest item of an enumeration, in words."""
MIN_DICTATED_DIGITS = 3
NAME = ""
"""Stands for a name, which is none of the words above."""
_WORD = re.compile(r"[\w']+")
_END = re.compile(r"[.!?。！？]+[\"'”)\]]*$")


def end_of_turn_ms(transcript: str | None, waits: EndWaits) -> int:
    """Return the length of the silence that ends a turn. `transcript` is what was recognised of
    the turn up to the silence; None while nothing is known.
    """
    return waits.of(ending_of(transcript))


def wait_ms(silent_ms: int, transcript: str | None, waits: EndWaits) -> int:
    """Return how much longer to wait for the end of a turn after `silent_ms` of silence; 0 if the
    turn has ended.
    """
    return max(0, end_of_turn_ms(transcript, waits) - silent_ms)


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
    is_unclear = _may_be_open(words) or _is_dictated(sentence) or _is_short_list(sentence)
    return SentenceEnd.UNKNOWN if is_unclear or not _END.search(text) else SentenceEnd.COMPLETE


def _is_name(word: str) -> bool:
    """Return True if the last word of a sentence is a name, such as May."""
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


def _may_be_open(words: list[str]) -> bool:
    is_addressed_only = words[0] in ADDRESSED and len(words) <= MAX_ADDRESSED_WORDS
    return is_addressed_only or (
        words[-1] in MAYBE_OPEN and not QUESTION_WORDS.intersection(words[:-1])
    )


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
    return not any(item[0] in ANSWERS or any(map(str.isdigit, item)) for item in tail)


def _is_short_list(sentence: str) -> bool:
    """Return True if the sentence ends in two items that may be the beginning of an enumeration: "I
    bought apples, pears."
    """
    items = [_WORD.findall(part) for part in sentence.split(",")]
    if len(items) != 2 or not all(items):
        return False
    last, has_clause = items[1], len(items[0]) > 1
    is_item = len(last) == 1 and len(last[0]) > 1 and last[0] not in CLOSERS
    return is_item and has_clause and sentence.rstrip().endswith(".")


def _is_dictated(sentence: str) -> bool:
    """Return True if the sentence ends in a number that may have further digits."""
    last = sentence.split()[-1].rstrip(".!,\"')")
    return last.replace("-", "").isdigit() and len(last) >= MIN_DICTATED_DIGITS
