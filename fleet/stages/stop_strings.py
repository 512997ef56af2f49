"""Meeting a stop string in an answer's tokens. Knows no edge."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

from fleet.core.errors import ConfigError
from fleet.processing.detokenize import IncrementalDetokenizer, StopTrimmer


class StopDetector:
    """Tells at which token an answer met a stop string. Costs nothing where there are none."""

    def __init__(self, stops: Sequence[str], tokenizer: Callable[[], Tokenizer]) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer()) if stops else None
        self._trimmer = StopTrimmer(stops)

    @property
    def is_met(self) -> bool:
        return self._trimmer.stopped

    def add(self, token: int) -> bool:
        """Whether this token completes a stop string."""
        if self._detokenizer is None:
            return False
        self._trimmer.add(self._detokenizer.add([token]))
        return self.is_met


def tokenizer_of(folder: Path) -> Callable[[], Tokenizer]:
    """Reads the folder's tokenizer when first asked, and once."""

    @cache
    def load() -> Tokenizer:
        path = folder / "tokenizer.json"
        if not path.exists():
            raise ConfigError(f"checkpoint {folder}: has no tokenizer.json, which stop strings need", param="checkpoint")
        return Tokenizer.from_file(str(path))

    return load
