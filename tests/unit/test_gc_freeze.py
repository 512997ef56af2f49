"""Exit of processes that have excluded their objects from garbage collection (`gc.freeze`)."""

import subprocess
import sys

from tests.support import cli_env

FROZEN = "import soxr, triton\nfrom fleet.process.gc_freeze import freeze_gc\nfreeze_gc()\n"


def test_process_with_frozen_objects_reports_no_leaks_at_exit() -> None:
    """A process with frozen objects reports no leaks at exit, although nanobind bindings, such as
    triton's, print each of their objects that survives the interpreter.
    """
    ended = subprocess.run(
        [sys.executable, "-c", FROZEN], env=cli_env(), capture_output=True, text=True, check=True
    )
    assert (ended.stdout, ended.stderr) == ("", "")


def test_forked_process_with_frozen_objects_reports_no_leaks_at_exit() -> None:
    forking = (
        f"{FROZEN}import os, sys\nif os.fork():\n    os.wait()\n    os._exit(0)\nsys.exit(0)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", forking], env=cli_env(), capture_output=True, text=True, check=True
    )
    assert (ended.stdout, ended.stderr) == ("", "")
