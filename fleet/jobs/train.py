"""The job kind `train`: trains the deployment's draft head in a separate process."""

from typing import cast

from rq import get_current_job

from fleet.core.jobs import TrainArguments, read_arguments
from fleet.jobs.command import open_folder, run_command
from fleet.jobs.measured import MEASURED


def run(arguments: dict[str, object]) -> dict[str, str]:
    """Run `fleet train` and return the end of its output; meanwhile, the latest line of output is
    the job's progress.

    Raises: BadInput for invalid arguments, before anything is run; RuntimeError with the output if
    the run did not finish.
    """
    checked = cast(TrainArguments, read_arguments("train", arguments))
    measured = MEASURED.get()
    current = get_current_job()
    assert current is not None, "a job must run in an rq worker"
    _, config_file = open_folder(measured, current.id)
    options = ["--corpus", str(checked.samples), "--name", checked.name or f"job {current.id[:8]}"]
    status, tail = run_command(
        ["train", "--config", str(config_file), *options], config_file.parent
    )
    if status != 0:
        raise RuntimeError(f"fleet train ended with status {status}: {tail}")
    return {"output": tail}
