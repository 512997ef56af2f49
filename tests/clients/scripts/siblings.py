"""Runs a script of this folder that is a whole session of its own, for the scripts that list it as
a feature.
"""

import subprocess
import sys
from pathlib import Path


def printed_by(script: str, *arguments: str) -> list[str]:
    """Return the lines that the script prints, run by the same interpreter."""
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-300:]
    return done.stdout.splitlines()
