"""A bigram language model of Pocket's training sentences in the ARPA format, which recognisers
read.

Source: Witten and Bell 1991, interpolated: the more different words follow a word, the likelier is
a new one after it.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

START, END = "<s>", "</s>"
_NEVER = -99.0


def arpa(sentences: Iterable[str], vocabulary: Sequence[str]) -> str:
    """Return the language model; every word of `vocabulary` can follow every other, also those in
    no sentence.

    Invariants: the probabilities after a word sum to 1; every word of the sentences is in
    `vocabulary`.
    """
    bigrams: Counter[tuple[str, str]] = Counter()
    for sentence in sentences:
        words = [START, *sentence.split(), END]
        bigrams.update(zip(words, words[1:], strict=False))
    unigrams: Counter[str] = Counter(dict.fromkeys((*vocabulary, END), 1))
    num_after: Counter[str] = Counter()
    num_kinds = Counter(first for first, _ in bigrams)
    for (first, second), count in bigrams.items():
        unigrams[second] += count
        num_after[first] += count
    total = unigrams.total()
    probability = {word: count / total for word, count in unigrams.items()}
    backoff = {
        word: num_kinds[word] / (num_after[word] + num_kinds[word]) if num_after[word] else 1.0
        for word in (START, *probability)
    }

    def smoothed(first: str, second: str, count: int) -> float:
        return (count + num_kinds[first] * probability[second]) / (
            num_after[first] + num_kinds[first]
        )

    lines = [
        f"{_log(probability.get(word, 0))} {word} {_log(backoff[word])}" for word in sorted(backoff)
    ]
    pairs = [
        f"{_log(smoothed(first, second, count))} {first} {second}"
        for (first, second), count in sorted(bigrams.items())
    ]
    head = ["\\data\\", f"ngram 1={len(lines)}", f"ngram 2={len(pairs)}", ""]
    return "\n".join([*head, "\\1-grams:", *lines, "", "\\2-grams:", *pairs, "", "\\end\\", ""])


def _log(value: float) -> str:
    return f"{math.log10(value) if value else _NEVER:.4f}"
