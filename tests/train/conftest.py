"""Fixtures of the tests of training."""

from pathlib import Path

import pytest

from fleet.models.causal_lm.tiny import write_tiny_checkpoint


@pytest.fixture(scope="session")
def text_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "tiny"
    write_tiny_checkpoint(folder)
    return folder
