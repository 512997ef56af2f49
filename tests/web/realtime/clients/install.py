"""Install third-party clients, each in a virtual environment of its own, since their pinned
dependencies clash with Fleet's, and run scripts with them.

`./check` runs this file with Fleet's Python. Clients that are installed already are left as they
are.
"""

import subprocess
import sys
import venv
from pathlib import Path

AGENTS = "openai-agents[voice]==0.24.0"
LIVEKIT = "livekit-plugins-openai==1.8.9"
PIPECAT = "pipecat-ai==1.14.0"
REQUIREMENTS = (AGENTS, LIVEKIT, PIPECAT)


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


def run_client(script: str, requirement: str, *arguments: str) -> str:
    """Run a script of the folder `clients` in the environment of `requirement`; return its
    output.
    """
    home = environment_of(requirement)
    assert (home / "ready").exists(), (
        f"{requirement} is not installed; run: python tests/web/realtime/clients/install.py"
    )
    env = {"PATH": "/usr/bin:/bin", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
    done = subprocess.run(
        [home / "bin" / "python", Path(__file__).parent / script, *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=env,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


if __name__ == "__main__":
    for wanted in REQUIREMENTS:
        install(wanted)
