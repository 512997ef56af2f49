"""The job kind `bench`: the benchmark in a process of its own, so that nothing it loads remains in the worker."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import yaml
from rq import get_current_job

from fleet.control.job_files import files_in, make_folder
from fleet.control.jobs import note_files, note_progress
from fleet.core.jobs import MEASURE_TAKES, BenchArguments, read_arguments
from fleet.core.telemetry import JobProgress
from fleet.jobs.measured import MEASURED, TEMPORARY, Measured

TAIL_CHARS = 20_000
MAX_NOTE_CHARS = 200
NOTE_EVERY_S = 1.0
OF_THE_GATEWAY = ("serving", "voice", "barge-in")
"""The measures that call the deployment's gateway; the others start their own processes."""
CONFIG_NAME = "deployment.yaml"


def run(arguments: dict[str, object]) -> dict[str, str]:
    """Run `fleet bench` and return the end of its output; the last line so far is the job's progress.

    The report and all temporary files are in the job's folder.
    Raises: BadInput for invalid arguments, before anything is run; RuntimeError with the output if the benchmark failed, which
    fails the job.
    """
    checked, measured, current = read_arguments("bench", arguments), MEASURED.get(), get_current_job()
    assert current is not None, "a job must run in an rq worker"
    folder = make_folder(measured.config.data_dir, current.id)
    temporary = folder / TEMPORARY
    temporary.mkdir(mode=0o700)
    config_file = temporary / CONFIG_NAME
    config_file.write_text(yaml.safe_dump(measured.config.model_dump(mode="json"), sort_keys=False))
    status, tail = _run([*command_line(checked, measured, config_file), *report_options(folder)], temporary)
    note_files(current, files_in(folder))
    if status != 0:
        raise RuntimeError(f"fleet bench ended with status {status}: {tail}")
    return {"output": tail}


def command_line(arguments: BenchArguments, measured: Measured, config_file: Path) -> list[str]:
    """Return the options of `fleet bench` for these arguments; the deployment and the address are the worker's own."""
    measure = arguments.measure
    options = ["--config", str(config_file)]
    options += ["--url", measured.url] if measure in OF_THE_GATEWAY else []
    options += [f"--{measure}"] if measure != "serving" else []
    for name in MEASURE_TAKES[measure]:
        value: object = getattr(arguments, name)
        options += [f"--{name.replace('_', '-')}", ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    return [*options, "--check"] if arguments.check else options


def report_options(folder: Path) -> list[str]:
    return ["--json", str(folder / "report.json"), "--png", str(folder / "report.png")]


def _run(options: Sequence[str], temporary: Path) -> tuple[int, str]:
    """Run the benchmark; return its exit status and the end of its output."""
    command = [sys.executable, "-m", "fleet.cli", "bench", *options]
    env = {**os.environ, "TMPDIR": str(temporary)}
    tail, noted_s = "", 0.0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as process:
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
