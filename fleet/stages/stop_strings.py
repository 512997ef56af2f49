"""Detection of stop strings in an answer's tokens. Knows no edge."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

from tokenizers import Tokenizer

from fleet.processing.detokenize import IncrementalDetokenizer, StopTrimmer
from fleet.processing.tokenizer import load_tokenizer


class StopDetector:
    """Finds the token that completes a stop string. Without stop strings it does not detokenize.
    `after`: token ids that the answer continues.
    """

    def __init__(
        self, stops: Sequence[str], tokenizer: Callable[[], Tokenizer], after: Sequence[int] = ()
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer()) if stops else None
        if self._detokenizer is not None:
            self._detokenizer.begin_after(after)
        self._trimmer = StopTrimmer(stops)

    @property
    def is_met(self) -> bool:
        return self._trimmer.stopped

    def add(self, token: int) -> bool:
        """Add the answer's next token; return True if it completes a stop string."""
        if self._detokenizer is None:
            return False
        self._trimmer.add(self._detokenizer.add([token]))
        return self.is_met


def tokenizer_of(folder: Path) -> Callable[[], Tokenizer]:
    """Return a function that returns the tokenizer of a checkpoint folder, loaded on its first
    call.
    """
    return cache(partial(load_tokenizer, folder))
