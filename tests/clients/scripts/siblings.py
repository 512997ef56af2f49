"""Runs, for the scripts that list them as features, a script of this folder that is a whole session
of its own, and programs that clients install.
"""

import subprocess
import sys
from pathlib import Path

TOOL_S = 600
"""The first start of a tool compiles all modules that it imports, vLLM's thousands of them."""


def printed_by(script: str, *arguments: str) -> list[str]:
    """Return the lines that the script prints, run by the same interpreter."""
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-300:]
    return done.stdout.splitlines()


def run_tool(program: str, *arguments: str) -> None:
    """Run a program of the client's environment.

    Raises: AssertionError with the end of what it printed, if it fails.
    """
    command = [str(Path(sys.executable).with_name(program)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_S, cwd=Path.home())
    assert done.returncode == 0, (done.stdout + done.stderr)[-300:]
