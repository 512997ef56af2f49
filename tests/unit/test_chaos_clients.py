"""Clients of `fleet chaos`: an answer resumes at another gateway after a cut or a silence, and each
event arrives once.
"""

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

import pytest

from fleet.core.errors import GatewayStopping
from fleet.lab.client.errors import ApiRefused, ApiUnreachable
from fleet.lab.faults import clients
from fleet.lab.faults.clients import Gateways
from tests.support import HttpHandler, serve_http, wait_until
from web.http.errors import envelope_of
from web.http.sse import event

FIRST, SECOND, LAST = b"id: 1.0\ndata: one\n\n", b"id: 2.0\ndata: two\n\n", b"data: [DONE]\n\n"


@dataclass(slots=True)
class ScriptedGateway:
    """Fake gateway that sends `sends`. `then`: afterwards it ends the answer ("end"), cuts the
    connection ("cut"), or stays silent until it is closed ("silence"); a number is the response's
    status.

    `left`: set once the client has closed a silent connection. `saw_left`: whether `left` of the
    gateway `watched` was set, at each request to this gateway.
    """

    sends: bytes
    then: str = "end"
    url: str = ""
    requests: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    closing: threading.Event = field(default_factory=threading.Event)
    left: threading.Event = field(default_factory=threading.Event)
    watched: "ScriptedGateway | None" = None
    saw_left: list[bool] = field(default_factory=list[bool])

    def answer(self, handler: HttpHandler) -> None:
        handler.read_body()
        self.requests.append(
            (handler.command, handler.path, handler.headers.get("last-event-id", ""))
        )
        if self.watched is not None:
            self.saw_left.append(self.watched.left.wait(0.3))
        handler.send_response(int(self.then) if self.then.isdecimal() else 200)
        handler.send_header(
            "x-request-id", "req-1" if handler.command == "POST" else "req-of-this-call"
        )
        handler.send_header("transfer-encoding", "chunked")
        handler.end_headers()
        handler.wfile.write(b"%x\r\n%b\r\n" % (len(self.sends), self.sends))
        if self.then == "silence":
            self._await_leaving(handler.connection)
        elif self.then != "cut":
            handler.wfile.write(b"0\r\n\r\n")

    def _await_leaving(self, connection: socket.socket) -> None:
        connection.settimeout(0.01)
        while not self.left.is_set() and not self.closing.is_set():
            with suppress(TimeoutError):
                if connection.recv(1) == b"":
                    self.left.set()


@contextmanager
def serving(*gateways: ScriptedGateway) -> Iterator[list[str]]:
    with ExitStack() as stack:
        for gateway in gateways:
            gateway.url = stack.enter_context(serve_http(gateway.answer))
            stack.callback(gateway.closing.set)
        yield [gateway.url for gateway in gateways]


@pytest.mark.parametrize("then", ["cut", "silence"])
def test_answer_resumes_at_another_gateway(then: str) -> None:
    lost, other = ScriptedGateway(FIRST + SECOND[:9], then), ScriptedGateway(SECOND + LAST)
    with serving(lost, other) as urls:
        stream = Gateways(urls, silence_s=0.5).receive(b"{}", lambda: False)
    assert b"".join(piece for _, piece in stream.pieces) == FIRST + SECOND + LAST
    assert (stream.request_id, stream.gateway_changes) == ("req-1", 1)
    assert lost.requests == [("POST", "/v1/chat/completions", "")]
    assert other.requests == [("GET", "/v1/fleet/requests/req-1/stream", "1.0")]


@pytest.mark.parametrize("before", [FIRST, b""])
def test_stopping_gateway_is_followed_by_another(before: bytes) -> None:
    leave = event(envelope_of(GatewayStopping("this gateway stops")))
    leaving, other = ScriptedGateway(before + leave), ScriptedGateway(SECOND + LAST)
    with serving(leaving, other) as urls:
        stream = Gateways(urls).receive(b"{}", lambda: False)
    assert b"".join(piece for _, piece in stream.pieces) == before + SECOND + LAST
    assert stream.gateway_changes == 1 and other.requests == [
        ("GET", "/v1/fleet/requests/req-1/stream", "1.0" if before else "")
    ]


def test_client_without_an_event_id_resumes_from_the_beginning() -> None:
    lost, other = ScriptedGateway(FIRST[:5], "cut"), ScriptedGateway(FIRST + LAST)
    with serving(lost, other) as urls:
        stream = Gateways(urls).receive(b"{}", lambda: False)
    assert b"".join(piece for _, piece in stream.pieces) == FIRST + LAST
    assert other.requests == [("GET", "/v1/fleet/requests/req-1/stream", "")]


def test_unreachable_gateway_is_skipped() -> None:
    with serving(ScriptedGateway(b"")) as gone:
        pass
    with serving(ScriptedGateway(FIRST + LAST)) as there:
        stream = Gateways([*gone, *there]).receive(b"{}", lambda: False)
    assert (stream.request_id, stream.gateway_changes) == ("req-1", 0)


def test_client_gives_up_without_any_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "UNREACHABLE_S", 0.2)
    with serving(ScriptedGateway(b"")) as gone:
        pass
    with pytest.raises(ApiUnreachable, match="no gateway could be reached: nothing answers at"):
        Gateways(gone).receive(b"{}", lambda: False)


@pytest.mark.parametrize("status", ["429", "503"])
def test_request_refused_for_now_is_sent_again_and_another_refusal_is_final(status: str) -> None:
    with serving(ScriptedGateway(b"", status), ScriptedGateway(FIRST + LAST)) as urls:
        stream = Gateways(urls).receive(b"{}", lambda: False)
    assert (stream.request_id, stream.refusals, stream.gateway_changes) == ("req-1", 1, 0)
    with (
        serving(ScriptedGateway(b"", "400"), ScriptedGateway(FIRST + LAST)) as urls,
        pytest.raises(ApiRefused, match="status 400"),
    ):
        Gateways(urls).receive(b"{}", lambda: False)


def test_client_gives_up_on_gateways_that_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "UNREACHABLE_S", 0.2)
    with (
        serving(ScriptedGateway(b"", "503")) as urls,
        pytest.raises(ApiRefused, match="status 503"),
    ):
        Gateways(urls).receive(b"{}", lambda: False)


def test_silent_connection_stays_open_until_another_gateway_answers() -> None:
    """A silent connection stays open until another gateway answers, since a slow gateway would take
    its close for a cancelled request.
    """
    silent, other = ScriptedGateway(FIRST, "silence"), ScriptedGateway(SECOND + LAST)
    with serving(silent, other) as urls:
        other.watched = silent
        stream = Gateways(urls, silence_s=0.5).receive(b"{}", lambda: False)
        wait_until(silent.left.is_set, "the silent connection to be closed in the end")
    assert b"".join(piece for _, piece in stream.pieces) == FIRST + SECOND + LAST
    assert other.saw_left == [False], (
        "the silent connection was open during the request to the other gateway"
    )
