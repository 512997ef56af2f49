"""Detection of stop strings in an answer's tokens. Knows no edge."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

from fleet.core.errors import ConfigError
from fleet.processing.detokenize import IncrementalDetokenizer, StopTrimmer


class StopDetector:
    """Finds the token that completes a stop string. Without stop strings it does not detokenize."""

    def __init__(self, stops: Sequence[str], tokenizer: Callable[[], Tokenizer]) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer()) if stops else None
        self._trimmer = StopTrimmer(stops)

    @property
    def is_met(self) -> bool:
        return self._trimmer.stopped

    def add(self, token: int) -> bool:
        """Return True if this token completes a stop string."""
        if self._detokenizer is None:
            return False
        self._trimmer.add(self._detokenizer.add([token]))
        return self.is_met


def tokenizer_of(folder: Path) -> Callable[[], Tokenizer]:
    """Return a loader that reads the folder's tokenizer once, when first called."""

    @cache
    def load() -> Tokenizer:
        path = folder / "tokenizer.json"
        if not path.exists():
            raise ConfigError(f"checkpoint {folder}: has no tokenizer.json, which stop strings need", param="checkpoint")
        return Tokenizer.from_file(str(path))

    return load
