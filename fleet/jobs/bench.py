"""The job kind `bench`: the benchmark as its own process, so that nothing it loads stays in the worker."""

import subprocess
import sys

TAIL_CHARS = 20_000


def run(arguments: list[str]) -> dict[str, str]:
    """Run `fleet bench ARGUMENTS` and return the end of what it printed.

    Raises: RuntimeError with that text if the benchmark failed, which makes the job a failed one.
    """
    command = [sys.executable, "-m", "fleet.cli", "bench", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    tail = done.stdout[-TAIL_CHARS:]
    if done.returncode != 0:
        raise RuntimeError(f"fleet bench ended with status {done.returncode}: {tail}")
    return {"output": tail}
