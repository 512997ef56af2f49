"""Clients of the Realtime API that are not ours, unmodified, each in an environment of its own: their pins clash with ours."""

import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.web.conftest import Gateway
from tests.web.fake_client import Script

CLIENTS = Path(__file__).parent / "clients"
SETUP_S = 1500
"""On a slow machine with a cold cache; seconds on a usual one, and nothing the second time."""


@pytest.fixture
def run_client(pytestconfig: pytest.Config) -> Callable[..., str]:
    """Runs a script of `clients`, which imports what we do not, with a requirement installed; its output. Environments are kept
    in pytest's cache.
    """

    def run(script: str, requirement: str, *arguments: str) -> str:
        assert pytestconfig.cache is not None
        home = pytestconfig.cache.mkdir(f"client-{requirement}-py{sys.version_info.minor}")
        python, ready = home / "bin" / "python", home / "ready"
        if not ready.exists():
            venv.create(home, with_pip=True, clear=True)
            subprocess.run([python, "-m", "pip", "install", "-q", requirement], check=True, timeout=SETUP_S)
            ready.touch()
        env = {"PATH": "/usr/bin:/bin", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
        done = subprocess.run(
            [python, CLIENTS / script, *arguments], capture_output=True, text=True, timeout=300, check=False, env=env
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.mark.timeout(SETUP_S + 400)
def test_openai_agents(gateway: Gateway, run_client: Callable[..., str]) -> None:
    told = run_client("agents_client.script", "openai-agents[voice]==0.24.0", gateway.url, "omni")
    assert told.strip() == f"{Script().num_samples} samples"


@pytest.mark.timeout(SETUP_S + 400)
def test_livekit(gateway: Gateway, run_client: Callable[..., str]) -> None:
    """Its defaults are `semantic_vad` and the voice marin; it knows a response by the metadata that it gave it."""
    told = run_client("livekit_client.script", "livekit-plugins-openai==1.8.9", gateway.url, "omni")
    assert told.strip() == f"{Script().num_samples} samples: {Script().text}"
