"""Hostile requests are refused by name or served, and never fail the server.

`--events 20000` sends all of them, otherwise a share is drawn, a different one in each run.
"""

import logging
import random

import httpx
import pytest

from tests.web.conftest import Loaded, serving
from tests.web.console.busy_gateway import fill
from tests.web.fake_client import Script
from tests.web.hostile_requests import HostileRequest, requests

pytestmark = pytest.mark.one_file_in(2, "gateways under load")


def send(http: httpx.Client, hostile: HostileRequest) -> httpx.Response:
    return http.request(
        hostile.method,
        hostile.path,
        content=hostile.raw,
        headers=[(name.encode(), text.encode("latin-1")) for name, text in hostile.headers.items()],
    )


def fault_of(hostile: HostileRequest, answer: httpx.Response) -> str:
    """Return what is wrong with the answer to a hostile request; "" if nothing is."""
    if answer.status_code >= 500 and answer.status_code not in hostile.allowed:
        return "the server failed"
    is_page = "text/html" in answer.headers.get("content-type", "")
    if answer.status_code < 400 or hostile.method == "HEAD" or is_page or answer.status_code == 503:
        return ""
    error = answer.json()["error"]
    if set(error) != {"message", "type", "param", "code"} or not error["message"]:
        return "the error has not the shape of OpenAI's"
    return "a long error" if len(error["message"]) > 1_000 else ""


@pytest.mark.timeout(1800)
def test_hostile_requests_are_refused_and_never_fail_the_server(
    loaded: Loaded,
    num_events: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = list(requests())
    drawn = random.sample(made, min(num_events, len(made)))
    statuses: dict[int, int] = {}
    with serving(loaded) as gateway, caplog.at_level(logging.ERROR):
        fill(gateway)
        gateway.client.script = Script(text="Yes.", num_samples=2_000)
        for hostile in drawn:
            answer = send(gateway.http, hostile)
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            fault = fault_of(hostile, answer)
            assert not fault, f"{fault}: {hostile}\n{answer.status_code} {answer.text[:1_000]}"
    logged = [each.getMessage() for each in caplog.records if each.exc_info]
    assert not logged, f"the server logged a traceback: {logged[0]}"
    assert statuses[200] and statuses[400]
