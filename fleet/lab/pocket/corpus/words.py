"""Data files of the corpus, and the word lists that its families share."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


def read_data(name: str) -> Any:
    """Return the content of `data/NAME.yaml`."""
    return yaml.safe_load(
        (Path(__file__).parent / "data" / f"{name}.yaml").read_text(encoding="utf-8")
    )


WORDS: Mapping[str, list[str]] = {name: text.split() for name, text in read_data("words").items()}
