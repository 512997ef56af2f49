"""What every comparison with `transformers` starts from, computed once a session: it takes longer than what is compared."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from fleet.models.qwen3_omni.tiny import write_tiny_checkpoint
from tests.oracle.cases import CASES, expected, make_frontend, spec_of
from tests.oracle.oracle import Oracle, OracleAnswer


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def truth(tiny_checkpoint: Path) -> Mapping[str, OracleAnswer]:
    """What single `generate()` calls answer to each case, by its name."""
    oracle, frontend = Oracle(tiny_checkpoint), make_frontend(tiny_checkpoint)
    return {case.name: expected(oracle, *spec_of(case, frontend), case) for case in CASES}
