"""Install third-party Realtime clients, each in a virtual environment of its own, since their
pinned dependencies clash with Fleet's.

`./check` runs this file with Fleet's Python. Clients that are installed already are left as they
are.
"""

import subprocess
import sys
import venv
from pathlib import Path

REQUIREMENTS = (
    "openai-agents[voice]==0.24.0",
    "livekit-plugins-openai==1.8.9",
    "pipecat-ai==1.14.0",
)


def environment_of(requirement: str) -> Path:
    """Return the folder of the virtual environment for `requirement`; it contains a file `ready`
    once the installation is complete.
    """
    return Path(sys.prefix) / "clients" / requirement


def install(requirement: str) -> None:
    home = environment_of(requirement)
    if (home / "ready").exists():
        return
    print(f"installing {requirement}", flush=True)
    venv.create(home, with_pip=True, clear=True)
    # Of thousands of modules, tests import a few: these are compiled then.
    pip = [home / "bin" / "python", "-m", "pip", "install", "-q", "--no-compile", requirement]
    subprocess.run(pip, check=True)
    (home / "ready").touch()


if __name__ == "__main__":
    for wanted in REQUIREMENTS:
        install(wanted)
