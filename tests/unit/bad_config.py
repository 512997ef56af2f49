"""Helper for tests of broken deployment files: the error message about such a file."""

from pathlib import Path

import pytest

from fleet.config import load_config
from fleet.core.errors import ConfigError

Case = tuple[str, str, str]
"""Test case: its name, the content of a deployment file, and the whole error message about it
without the file's name.
"""
MISSING_STAGE = "graph qwen3_omni has no such stage; it has thinker, talker, code2wav, trainer"


def refusal_of(folder: Path, text: str | bytes, *overrides: str) -> ConfigError:
    """Write `text` to a file `x.yaml` and return the error of loading it; its message names the
    file without its folder.
    """
    path = folder / "x.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    caught.value.message = caught.value.message.removeprefix(f"{folder}/")
    return caught.value
