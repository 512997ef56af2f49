"""Unmodified third-party clients of the Realtime API, each in the environment that
`clients/install.py` made.
"""

import subprocess
from pathlib import Path

import pytest

from tests.web.conftest import ServedGateway
from tests.web.fake_client import Script
from tests.web.realtime.clients.install import REQUIREMENTS, environment_of

pytestmark = pytest.mark.one_file_in(2, "voice sockets")

CLIENTS = Path(__file__).parent / "clients"
AGENTS, LIVEKIT = REQUIREMENTS


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
        [home / "bin" / "python", CLIENTS / script, *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=env,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_openai_agents_receives_the_whole_answer(gateway: ServedGateway) -> None:
    printed = run_client("agents_client.script", AGENTS, gateway.url, "omni")
    assert printed.strip() == f"{Script().num_samples} samples"


def test_livekit_receives_the_whole_answer(gateway: ServedGateway) -> None:
    """LiveKit receives the whole answer with its defaults, `semantic_vad` and the voice marin; it
    recognises its response by the request's metadata.
    """
    printed = run_client("livekit_client.script", LIVEKIT, gateway.url, "omni")
    assert printed.strip() == f"{Script().num_samples} samples: {Script().text}"
