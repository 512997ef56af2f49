"""Fixtures of the comparisons with `transformers`, computed once per test run, since they take
longer than the comparisons.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.oracle.cases import CASES, expected, make_frontend, spec_of
from tests.oracle.oracle import Oracle, OracleAnswer
from tests.oracle.twins import Built, speaking_stages
from tests.run_cache import compute_once

collect_ignore = [] if find_spec("ctranslate2") else ["test_whisper_ctranslate2.py"]


@pytest.fixture(scope="session")
def truth(tiny_checkpoint: Path, run_folder: Path) -> Mapping[str, OracleAnswer]:
    """The oracle's answers, by case name, each from a `generate()` call of its own."""

    def compute(folder: Path) -> None:
        oracle, frontend = Oracle(tiny_checkpoint), make_frontend(tiny_checkpoint)
        for number, case in enumerate(CASES):
            answer = expected(oracle, *spec_of(case, frontend), case)
            np.savez(
                folder / f"{number}.npz",
                token_ids=answer.token_ids,
                codes=answer.codes,
                wave=answer.wave,
            )

    folder = compute_once(run_folder / "truth", compute)
    return {case.name: _read(folder / f"{number}.npz") for number, case in enumerate(CASES)}


@pytest.fixture(scope="module")
def built(tiny_checkpoint: Path) -> Built:
    """Thinker and Talker stages built with the numerics `fast`."""
    return speaking_stages(tiny_checkpoint)


def _read(path: Path) -> OracleAnswer:
    with np.load(path, allow_pickle=False) as stored:
        return OracleAnswer(
            token_ids=stored["token_ids"].tolist(), codes=stored["codes"], wave=stored["wave"]
        )
