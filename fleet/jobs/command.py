"""Runs a command of `fleet` as a job: its configuration file, its process, and its latest output
line as the job's progress.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import yaml
from rq import get_current_job

from fleet.control.job_files import make_folder
from fleet.control.jobs import note_progress
from fleet.jobs.measured import TEMPORARY, Measured
from fleet.process.parent_death import signalled_with_parent
from fleet.telemetry.views import JobProgress

TAIL_CHARS = 20_000
MAX_NOTE_CHARS = 200
NOTE_EVERY_S = 1.0
CONFIG_NAME = "deployment.yaml"


def open_folder(measured: Measured, job_id: str) -> tuple[Path, Path]:
    """Create a job's folder. Returns the folder, and the path of the deployment's configuration,
    written into the folder's temporary part.
    """
    folder = make_folder(measured.config.data_dir, job_id)
    temporary = folder / TEMPORARY
    temporary.mkdir(mode=0o700)
    config_file = temporary / CONFIG_NAME
    config_file.write_text(yaml.safe_dump(measured.config.model_dump(mode="json"), sort_keys=False))
    return folder, config_file


def run_command(options: Sequence[str], temporary: Path) -> tuple[int, str]:
    """Run `fleet` with `options`, and make its latest output line the job's progress; return its
    exit status and the end of its output. The command is killed when this process dies.
    `temporary`: folder for the command's temporary files.
    """
    command = [sys.executable, "-m", "fleet.cli", *options]
    env = {**os.environ, "TMPDIR": str(temporary)}
    tail, noted_s = "", 0.0
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
        preexec_fn=signalled_with_parent(signal.SIGKILL),
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            tail = (tail + line)[-TAIL_CHARS:]
            if line.strip() and time.monotonic() - noted_s > NOTE_EVERY_S:
                noted_s = time.monotonic()
                _note(line.strip())
    return process.returncode, tail


def _note(line: str) -> None:
    current = get_current_job()
    if current is not None:
        note_progress(current, JobProgress(note=line[:MAX_NOTE_CHARS]))
