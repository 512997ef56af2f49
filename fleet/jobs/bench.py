"""The job kind `bench`: the benchmark as its own process, so that nothing it loads stays in the worker."""

import subprocess
import sys
import time

from rq import get_current_job

from fleet.control.jobs import note_progress
from fleet.core.telemetry import JobProgress

TAIL_CHARS = 20_000
MAX_NOTE_CHARS = 200
NOTE_EVERY_S = 1.0


def run(arguments: list[str]) -> dict[str, str]:
    """Run `fleet bench ARGUMENTS` and return the end of what it printed; its last line is the job's progress.

    Raises: RuntimeError with that text if the benchmark failed, which makes the job a failed one.
    """
    command = [sys.executable, "-m", "fleet.cli", "bench", *arguments]
    tail, noted_s = "", 0.0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            tail = (tail + line)[-TAIL_CHARS:]
            if line.strip() and time.monotonic() - noted_s > NOTE_EVERY_S:
                noted_s = time.monotonic()
                _note(line.strip())
    if process.returncode != 0:
        raise RuntimeError(f"fleet bench ended with status {process.returncode}: {tail}")
    return {"output": tail}


def _note(line: str) -> None:
    current = get_current_job()
    if current is not None:
        note_progress(current, JobProgress(note=line[:MAX_NOTE_CHARS]))
