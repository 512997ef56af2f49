"""The job kind `bench`: runs the benchmark in its own process, so that nothing it loads remains in
the worker.
"""

from pathlib import Path
from typing import cast

from rq import get_current_job

from fleet.control.job_files import files_in
from fleet.control.jobs import note_files
from fleet.core.jobs import MEASURE_TAKES, BenchArguments, read_arguments
from fleet.jobs.command import open_folder, run_command
from fleet.jobs.measured import MEASURED, Measured

OF_THE_GATEWAY = ("serving", "voice", "barge-in")
"""Measures that call the deployment's gateway. Any other measure starts its own processes."""


def run(arguments: dict[str, object]) -> dict[str, str]:
    """Run `fleet bench` and return the end of its output; meanwhile, the latest line of output is
    the job's progress.

    The report and all temporary files are in the job's folder.
    Raises: BadInput for invalid arguments, before anything is run; RuntimeError with the output if
    the benchmark failed, which fails the job.
    """
    checked, measured, current = (
        read_arguments("bench", arguments),
        MEASURED.get(),
        get_current_job(),
    )
    assert current is not None, "a job must run in an rq worker"
    folder, config_file = open_folder(measured, current.id)
    options = command_line(cast(BenchArguments, checked), measured, config_file)
    status, tail = run_command(["bench", *options, *report_options(folder)], config_file.parent)
    note_files(current, files_in(folder))
    if status != 0:
        raise RuntimeError(f"fleet bench ended with status {status}: {tail}")
    return {"output": tail}


def command_line(arguments: BenchArguments, measured: Measured, config_file: Path) -> list[str]:
    """Return the command-line options of `fleet bench` for a job's arguments. `measured`:
    deployment to measure. `config_file`: file with the deployment's configuration.
    """
    measure = arguments.measure
    options = ["--config", str(config_file)]
    options += ["--url", measured.url] if measure in OF_THE_GATEWAY else []
    options += [f"--{measure}"] if measure != "serving" else []
    for name in MEASURE_TAKES[measure]:
        value: object = getattr(arguments, name)
        options += [
            f"--{name.replace('_', '-')}",
            ",".join(map(str, value)) if isinstance(value, tuple) else str(value),
        ]
    return [*options, "--check"] if arguments.check else options


def report_options(folder: Path) -> list[str]:
    return ["--json", str(folder / "report.json"), "--png", str(folder / "report.png")]
