"""A client disconnect aborts its request: before submission, in the queue, and during the
answer.
"""

import threading
from contextlib import ExitStack

import httpx
import pytest

from tests.support import wait_until
from tests.web import attacks
from tests.web.attacks import AttackTarget, read_up_to
from tests.web.conftest import ASK, Loaded, ServedGateway, request_id_of, serving
from tests.web.fake_client import Script
from web import serve


def in_flight(gateway: ServedGateway) -> float:
    text = gateway.http.get("/metrics").text
    line = next(line for line in text.splitlines() if line.startswith("fleet_requests_in_flight "))
    return float(line.split()[1])


def wait_for_abort(gateway: ServedGateway) -> None:
    """Wait until the only request has been aborted because its client left."""
    (fake,) = gateway.client.streams.values()
    wait_until(lambda: fake.aborted == "the client left", "the abort")
    wait_until(lambda: in_flight(gateway) == 0, "nothing in flight")


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_within_answer_aborts_request(gateway: ServedGateway, stream: bool) -> None:
    gateway.client.script = Script(stall_at=3)
    with AttackTarget.of(gateway.url).connect() as wire:
        attacks.post(wire, {**ASK, "stream": stream})
        if stream:
            read_up_to(wire, b"data:")
        wait_until(lambda: gateway.client.submitted, "the request to be submitted")
    wait_for_abort(gateway)


def test_disconnect_during_submission_aborts_request(gateway: ServedGateway) -> None:
    gate = threading.Event()
    gateway.client.script = Script(submit_gate=gate)
    waiting = httpx.Client(timeout=0.3)
    with pytest.raises(httpx.ReadTimeout):
        waiting.post(f"{gateway.url}/v1/chat/completions", json=ASK)
    waiting.close()
    gate.set()
    wait_until(lambda: gateway.client.streams, "the request to be submitted")
    wait_for_abort(gateway)


def test_stopping_gateway_leaves_answer_resumable(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopping gateway leaves its answer resumable, since the gateway and not the client closed
    the connection.
    """
    monkeypatch.setattr(serve, "GRACE_S", 1)
    with ExitStack() as open_until_the_end:
        with serving(loaded) as gateway:
            gateway.client.script = Script(stall_at=3)
            wire = open_until_the_end.enter_context(AttackTarget.of(gateway.url).connect())
            attacks.post(wire, {**ASK, "stream": True})
            read_up_to(wire, b"data:")
        (fake,) = gateway.client.streams.values()
        assert fake.aborted is None


def test_connected_client_is_not_aborted(gateway: ServedGateway) -> None:
    answer = gateway.create()
    assert gateway.client.streams[request_id_of(answer)].aborted is None
