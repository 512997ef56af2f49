"""A disconnect aborts the request: before submission, while it waits, and within the answer."""

import json
import socket
import threading

import httpx
import pytest

from tests.support import wait_until
from tests.web.conftest import HELLO, Loaded, ServedGateway, request_id_of, serving
from tests.web.fake_client import Script
from web import serve


def in_flight(gateway: ServedGateway) -> float:
    text = gateway.http.get("/metrics").text
    line = next(line for line in text.splitlines() if line.startswith("fleet_requests_in_flight "))
    return float(line.split()[1])


def leave_after_asking(gateway: ServedGateway, *, stream: bool, ready: str) -> None:
    """Send the request over a plain socket, wait for `ready`, and close."""
    body = json.dumps({"model": "omni", "messages": HELLO, "stream": stream}).encode()
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as wire:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n"
        wire.sendall(head.encode() + body)
        if ready == "submitted":
            wait_until(lambda: gateway.client.submitted, "the request to be submitted")
        elif ready == "events":
            wait_until(lambda: b"data:" in wire.recv(65_536), "the first event")


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_within_answer_aborts_request(gateway: ServedGateway, stream: bool) -> None:
    gateway.client.script = Script(stall_at=3)
    leave_after_asking(gateway, stream=stream, ready="events" if stream else "submitted")
    (fake,) = gateway.client.streams.values()
    wait_until(lambda: fake.aborted == "the client left", "the abort")
    wait_until(lambda: in_flight(gateway) == 0, "nothing in flight")


def test_disconnect_during_submission_aborts_request(gateway: ServedGateway) -> None:
    gate = threading.Event()
    gateway.client.script = Script(submit_gate=gate)
    waiting = httpx.Client(timeout=0.3)
    with pytest.raises(httpx.ReadTimeout):
        waiting.post(f"{gateway.url}/v1/chat/completions", json={"model": "omni", "messages": HELLO})
    waiting.close()
    gate.set()
    wait_until(lambda: gateway.client.streams, "the request to be submitted")
    (fake,) = gateway.client.streams.values()
    wait_until(lambda: fake.aborted == "the client left", "the abort")


def test_stopping_gateway_leaves_answer_resumable(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway closes the connection, not the client."""
    monkeypatch.setattr(serve, "GRACE_S", 1)
    body = json.dumps({"model": "omni", "messages": HELLO, "stream": True}).encode()
    with socket.socket() as wire:
        with serving(loaded) as gateway:
            gateway.client.script = Script(stall_at=3)
            host, _, port = gateway.url.removeprefix("http://").partition(":")
            wire.connect((host, int(port)))
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n"
            wire.sendall(head.encode() + body)
            wait_until(lambda: b"data:" in wire.recv(65_536), "the first event")
        (fake,) = gateway.client.streams.values()
        assert fake.aborted is None


def test_connected_client_is_not_aborted(gateway: ServedGateway) -> None:
    answer = gateway.create()
    assert gateway.client.streams[request_id_of(answer)].aborted is None
