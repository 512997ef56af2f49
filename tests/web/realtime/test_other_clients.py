"""Unmodified third-party clients of the Realtime API, each in the environment that
`tests/clients/environments.py` made.
"""

import wave
from pathlib import Path

import pytest

from tests.clients.environments import AGENTS, LIVEKIT, PIPECAT, run_client
from tests.web.conftest import ServedGateway
from tests.web.fake_client import Script
from tests.web.realtime.speech_samples import QUESTION, RATE_HZ, speech

pytestmark = pytest.mark.one_file_in(2, "voice sockets")

HEARD_TEXT = "What day comes after Monday?"


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
