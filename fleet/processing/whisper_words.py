"""Words of a Whisper transcript: runs of tokens, with punctuation at the words that it belongs to.

Source: transformers 5.23, models/whisper/tokenization_whisper.py (`_combine_tokens_into_words`).
Knows no times.
"""

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

UNSPACED = frozenset("zh ja th lo my yue".split())
"""Languages that are written without spaces; each of their characters counts as a word."""
BEFORE, AFTER = "\"'“¡¿([{-", "\"'.。,，!！?？:：”)]}、"
"""Punctuation that belongs to the word after it, and to the word before it."""
REPLACEMENT = "\ufffd"
DIGIT_LETTERS = 4
"""Average number of letters in a digit's name, by which a digit counts in `num_spoken_letters`."""
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class TokenRun:
    """A word as it is written, with the blank before it: tokens `begin` to `end`. `spoken_end`: end
    of the tokens that are spoken; punctuation follows them.
    """

    text: str
    begin: int
    end: int
    spoken_end: int


def text_parts(tokens: Sequence[int], end: int) -> list[tuple[int, list[int]]]:
    """Return (index of the first token, tokens) of each run of text tokens between timestamps.
    `end`: smallest id that is not text.
    """
    runs = groupby(range(len(tokens)), lambda n: tokens[n] < end)
    places = [list(run) for is_text, run in runs if is_text]
    return [(run[0], [tokens[n] for n in run]) for run in places]


def num_spoken_letters(word: str) -> int:
    """Return the estimated number of letters of a word as it is spoken, at least 1: a digit counts
    as `DIGIT_LETTERS`, punctuation as none.
    """
    spoken = sum(DIGIT_LETTERS if char.isdigit() else char.isalnum() for char in word)
    return max(1, spoken)


def words_of(tokens: Sequence[int], decode: Decode, language: str) -> list[TokenRun]:
    """Divide text tokens into words. `language`: ISO code; "" counts as a language with spaces."""
    runs = _characters(tokens, decode)
    if language not in UNSPACED:
        runs = _joined_to_words(runs)
    return [run for run in _with_punctuation(runs) if run.text.strip()]


def _characters(tokens: Sequence[int], decode: Decode) -> list[TokenRun]:
    """Return the shortest runs of tokens that are whole characters."""
    whole, offset, begin = decode(tokens), 0, 0
    runs: list[TokenRun] = []
    for end in range(1, len(tokens) + 1):
        text = decode(tokens[begin:end])
        at = offset + text.find(REPLACEMENT)
        if REPLACEMENT not in text or at >= len(whole) or whole[at] == REPLACEMENT:
            runs.append(TokenRun(text, begin, end, end))
            offset, begin = offset + len(text), end
    return runs


def _joined_to_words(runs: Sequence[TokenRun]) -> list[TokenRun]:
    words: list[TokenRun] = []
    for run in runs:
        begins = run.text.startswith(" ") or run.text.strip() in string.punctuation
        if begins or not words:
            words.append(run)
        else:
            words[-1] = TokenRun(words[-1].text + run.text, words[-1].begin, run.end, run.end)
    return words


def _with_punctuation(words: Sequence[TokenRun]) -> list[TokenRun]:
    """Return the words with punctuation joined to them: `BEFORE` to the next word, `AFTER` to the
    previous one.
    """
    opened: list[TokenRun] = []
    for word in reversed(words):
        if opened and word.text.startswith(" ") and word.text.strip() in BEFORE:
            after = opened.pop()
            word = TokenRun(word.text + after.text, word.begin, after.end, after.spoken_end)
        opened.append(word)
    joined: list[TokenRun] = []
    for word in reversed(opened):
        before = joined[-1] if joined else None
        if before is not None and not before.text.endswith(" ") and word.text in AFTER:
            joined[-1] = TokenRun(
                before.text + word.text, before.begin, word.end, before.spoken_end
            )
        else:
            joined.append(word)
    return joined
