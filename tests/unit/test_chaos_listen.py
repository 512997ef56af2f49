"""A listener of chaos whose gateway is cut off or falls silent goes on at another, and hears each event once."""

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fleet.chaos import listen
from fleet.chaos.errors import Unanswered
from fleet.chaos.listen import Gateways
from fleet.core.errors import GatewayStopping
from tests.support import wait_until
from web.http.errors import envelope_of
from web.http.sse import event

FIRST, SECOND, LAST = b"id: 1.0\ndata: one\n\n", b"id: 2.0\ndata: two\n\n", b"data: [DONE]\n\n"


@dataclass(slots=True)
class FakeGateway:
    """Tells `says`, then ends the answer, cuts the connection off, or says nothing more until it is closed.

    `left`: the listener of a silent one has gone. `saw_left`: whether that of `watched` had, each time that this one was asked.
    """

    says: bytes
    then: str = "end"
    url: str = ""
    asked: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    closing: threading.Event = field(default_factory=threading.Event)
    left: threading.Event = field(default_factory=threading.Event)
    watched: "FakeGateway | None" = None
    saw_left: list[bool] = field(default_factory=list[bool])

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        handler.rfile.read(int(handler.headers.get("content-length", "0")))
        self.asked.append((handler.command, handler.path, handler.headers.get("last-event-id", "")))
        if self.watched is not None:
            self.saw_left.append(self.watched.left.wait(0.3))
        handler.send_response(200)
        handler.send_header("x-request-id", "req-1" if handler.command == "POST" else "req-of-this-call")
        handler.send_header("transfer-encoding", "chunked")
        handler.end_headers()
        handler.wfile.write(b"%x\r\n%b\r\n" % (len(self.says), self.says))
        if self.then == "silence":
            self._await_leaving(handler.connection)
        elif self.then == "end":
            handler.wfile.write(b"0\r\n\r\n")

    def _await_leaving(self, connection: socket.socket) -> None:
        connection.settimeout(0.01)
        while not self.left.is_set() and not self.closing.is_set():
            with suppress(TimeoutError):
                if connection.recv(1) == b"":
                    self.left.set()


@contextmanager
def serving(*gateways: FakeGateway) -> Iterator[list[str]]:
    with ExitStack() as stack:
        for gateway in gateways:
            stack.enter_context(_served(gateway))
        yield [gateway.url for gateway in gateways]


@contextmanager
def _served(gateway: FakeGateway) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.close_connection = True
            gateway.answer(self)

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    gateway.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield
    finally:
        gateway.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("then", ["cut", "silence"])
def test_an_answer_goes_on_at_another_gateway(then: str) -> None:
    lost, other = FakeGateway(FIRST + SECOND[:9], then), FakeGateway(SECOND + LAST)
    with serving(lost, other) as urls:
        take = Gateways(urls, silence_s=0.5).answer(b"{}", lambda: False)
    assert b"".join(piece for _, piece in take.pieces) == FIRST + SECOND + LAST
    assert (take.request_id, take.moves) == ("req-1", 1)
    assert lost.asked == [("POST", "/v1/chat/completions", "")]
    assert other.asked == [("GET", "/v1/fleet/requests/req-1/stream", "1.0")]


@pytest.mark.parametrize("before", [FIRST, b""])
def test_a_gateway_that_takes_its_leave_is_followed_by_another(before: bytes) -> None:
    leave = event(envelope_of(GatewayStopping("this gateway stops")))
    leaving, other = FakeGateway(before + leave), FakeGateway(SECOND + LAST)
    with serving(leaving, other) as urls:
        take = Gateways(urls).answer(b"{}", lambda: False)
    assert b"".join(piece for _, piece in take.pieces) == before + SECOND + LAST
    assert take.moves == 1 and other.asked == [("GET", "/v1/fleet/requests/req-1/stream", "1.0" if before else "")]


def test_one_that_was_told_nothing_yet_is_told_all() -> None:
    lost, other = FakeGateway(FIRST[:5], "cut"), FakeGateway(FIRST + LAST)
    with serving(lost, other) as urls:
        take = Gateways(urls).answer(b"{}", lambda: False)
    assert b"".join(piece for _, piece in take.pieces) == FIRST + LAST
    assert other.asked == [("GET", "/v1/fleet/requests/req-1/stream", "")]


def test_a_gateway_that_is_not_there_is_passed_over() -> None:
    with serving(FakeGateway(b"")) as gone:
        pass
    with serving(FakeGateway(FIRST + LAST)) as there:
        take = Gateways([*gone, *there]).answer(b"{}", lambda: False)
    assert (take.request_id, take.moves) == ("req-1", 0)


def test_without_any_gateway_a_listener_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "UNREACHABLE_S", 0.2)
    with serving(FakeGateway(b"")) as gone:
        pass
    with pytest.raises(Unanswered, match="no gateway could be reached: .*refused"):
        Gateways(gone).answer(b"{}", lambda: False)


def test_a_silent_gateway_is_not_left_before_another_has_the_answer() -> None:
    """It may be slow and not frozen: to be left would make it abort the request."""
    silent, other = FakeGateway(FIRST, "silence"), FakeGateway(SECOND + LAST)
    with serving(silent, other) as urls:
        other.watched = silent
        take = Gateways(urls, silence_s=0.5).answer(b"{}", lambda: False)
        wait_until(silent.left.is_set, "the silent one to be left in the end")
    assert b"".join(piece for _, piece in take.pieces) == FIRST + SECOND + LAST
    assert other.saw_left == [False], "while the other was asked, the silent one was still listened to"
