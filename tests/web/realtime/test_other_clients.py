"""Unmodified third-party clients of the Realtime API, each in the environment that
`clients/install.py` made.
"""

import subprocess
import wave
from pathlib import Path

import pytest

from tests.web.conftest import ServedGateway
from tests.web.fake_client import Script
from tests.web.realtime.clients.install import REQUIREMENTS, environment_of
from tests.web.realtime.speech_samples import QUESTION, RATE_HZ, speech

pytestmark = pytest.mark.one_file_in(2, "voice sockets")

CLIENTS = Path(__file__).parent / "clients"
AGENTS, LIVEKIT, PIPECAT = REQUIREMENTS
HEARD_TEXT = "What day comes after Monday?"


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


@pytest.fixture
def question(tmp_path: Path) -> str:
    """Path of a spoken question as a WAV file."""
    path = tmp_path / "question.wav"
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE_HZ)
        file.writeframes(speech(QUESTION))
    return str(path)


@pytest.mark.one_in(2, "typed questions of other clients")
def test_openai_agents_receives_the_whole_answer(any_gateway: ServedGateway) -> None:
    printed = run_client("agents_client.script", AGENTS, any_gateway.url, "omni")
    assert printed.strip() == f"{Script().num_samples} samples"


@pytest.mark.one_in(2, "typed questions of other clients")
def test_livekit_receives_the_whole_answer(any_gateway: ServedGateway) -> None:
    """LiveKit receives the whole answer with its defaults, `semantic_vad` and the voice marin; it
    recognises its response by the request's metadata.
    """
    printed = run_client("livekit_client.script", LIVEKIT, any_gateway.url, "omni")
    assert printed.strip() == f"{Script().num_samples} samples: {Script().text}"


@pytest.mark.one_in(2, "spoken questions of other clients")
@pytest.mark.parametrize(
    ("script", "requirement"),
    [("livekit_client.script", LIVEKIT), ("pipecat_client.script", PIPECAT)],
    ids=["livekit", "pipecat"],
)
def test_spoken_question_is_heard_and_answered(
    any_gateway: ServedGateway, question: str, script: str, requirement: str
) -> None:
    any_gateway.client.script = Script(heard=HEARD_TEXT)
    printed = run_client(script, requirement, any_gateway.url, "omni", question)
    assert f"heard: {HEARD_TEXT}" in printed.splitlines()
    assert f"{Script().num_samples} samples: {Script().text}" in printed.splitlines()
