"""Responses of a gateway that is killed: each is stored as a whole or not at all, and another
gateway continues from those that are.
"""

import signal
from pathlib import Path

import openai
import pytest
from openai import OpenAI

from fleet.graphs import DEFAULT_GRAPH, GRAPHS
from tests.e2e.fleets import FAKE, fleet_up
from tests.e2e.gateways import another_gateway

pytestmark = pytest.mark.one_file_in(5, "answers of processes")

MAIN = GRAPHS[DEFAULT_GRAPH].main_stage.name
SETTINGS = (
    *FAKE,
    "web.model_name=omni",
    f"stages.{MAIN}.extra.step_ms=40",
    f"stages.{MAIN}.sampling.max_tokens=1000",
)
QUESTION = "what is the opposite of hot"


def client_of(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def test_killed_gateway_leaves_whole_responses_only(tmp_path: Path) -> None:
    with (
        fleet_up(tmp_path, *SETTINGS) as fleet,
        another_gateway(fleet) as (first, port),
        client_of(f"http://127.0.0.1:{port}") as there,
        client_of(fleet.url) as here,
    ):
        whole = there.responses.create(model="omni", input=QUESTION, max_output_tokens=4)
        stream = there.responses.create(model="omni", input=QUESTION, stream=True)
        began = next(stream)
        assert began.type == "response.created"
        assert next(stream).type == "response.in_progress"
        assert first.stop(signal.SIGKILL) == -signal.SIGKILL
        with pytest.raises(openai.APIError):
            list(stream)
        assert here.responses.retrieve(whole.id).to_dict() == whole.to_dict()
        with pytest.raises(openai.NotFoundError):
            here.responses.retrieve(began.response.id)
        answer = here.responses.create(
            model="omni", input="and of cold", previous_response_id=whole.id, max_output_tokens=4
        )
        assert whole.usage is not None and answer.usage is not None
        assert answer.usage.input_tokens > whole.usage.input_tokens
