"""A worker whose model is shared by two vLLM processes gives the same answers, and ends if either
process is lost.
"""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.support import REPO
from tests.vllm.two_ranks import RanksReport, answers, build


@pytest.mark.timeout(300)
def test_two_ranks_answer_as_the_torch_engine_and_a_lost_one_stops_the_engine(
    tiny_checkpoint: Path,
) -> None:
    # else vLLM wants a memory node for each rank
    env = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.two_ranks", str(tiny_checkpoint)],
        cwd=REPO,
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    reports = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert reports, done.stdout[-2000:] + done.stderr[-2000:]
    report = msgspec.json.decode(reports[-1], type=RanksReport)
    assert report.num_ranks == 2
    assert report.tokens == answers(build(tiny_checkpoint, "torch"))
    assert "vLLM does not compute any more" in report.error
