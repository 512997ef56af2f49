"""Install other Realtime clients, each in a virtual environment of its own, since their pins clash
with Fleet's.

Run by `./check` with the Python whose environment they belong to; does nothing where they are
installed already.
"""

import subprocess
import sys
import venv
from pathlib import Path

REQUIREMENTS = ("openai-agents[voice]==0.24.0", "livekit-plugins-openai==1.8.9")


def environment_of(requirement: str) -> Path:
    """The folder of the virtual environment; it contains a file `ready` once the requirement is
    installed.
    """
    return Path(sys.prefix) / "clients" / requirement


def install(requirement: str) -> None:
    home = environment_of(requirement)
    if (home / "ready").exists():
        return
    print(f"installing {requirement}", flush=True)
    venv.create(home, with_pip=True, clear=True)
    subprocess.run([home / "bin" / "python", "-m", "pip", "install", "-q", requirement], check=True)
    (home / "ready").touch()


if __name__ == "__main__":
    for wanted in REQUIREMENTS:
        install(wanted)
