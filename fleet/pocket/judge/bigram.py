"""A bigram language model of Pocket's training sentences, in the format recognisers read (ARPA).

Knows no sound.
Source: Witten and Bell 1991, interpolated: what follows a word for the first time is as likely as different words followed it.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

START, END = "<s>", "</s>"
_NEVER = -99.0


def arpa(sentences: Iterable[str], vocabulary: Sequence[str]) -> str:
    """Every word of `vocabulary` can follow every other, also those that no sentence has.

    Invariants: what can follow a word sums to 1; no word outside `vocabulary` is in a sentence.
    """
    bigrams: Counter[tuple[str, str]] = Counter()
    for sentence in sentences:
        words = [START, *sentence.split(), END]
        bigrams.update(zip(words, words[1:], strict=False))
    unigrams: Counter[str] = Counter(dict.fromkeys((*vocabulary, END), 1))
    before: Counter[str] = Counter()
    kinds = Counter(first for first, _ in bigrams)
    for (first, second), count in bigrams.items():
        unigrams[second] += count
        before[first] += count
    total = unigrams.total()
    share = {word: count / total for word, count in unigrams.items()}
    left = {word: kinds[word] / (before[word] + kinds[word]) if before[word] else 1.0 for word in (START, *share)}
    lines = [f"{_log(share.get(word, 0))} {word} {_log(left[word])}" for word in sorted(left)]
    pairs = [
        f"{_log((count + kinds[first] * share[second]) / (before[first] + kinds[first]))} {first} {second}"
        for (first, second), count in sorted(bigrams.items())
    ]
    head = ["\\data\\", f"ngram 1={len(lines)}", f"ngram 2={len(pairs)}", ""]
    return "\n".join([*head, "\\1-grams:", *lines, "", "\\2-grams:", *pairs, "", "\\end\\", ""])


def _log(probability: float) -> str:
    return f"{math.log10(probability) if probability else _NEVER:.4f}"
