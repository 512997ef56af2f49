"""The bounded HTTP and WebSocket protocols with the installed uvicorn, and their parts: abuse log,
descriptors, stop.
"""

import asyncio
import json
import logging
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import cast

import psutil
import pytest
from starlette.applications import Starlette
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import Frame, Opcode
from websockets.protocol import State

from tests.support import REPO, cli_env, free_port, wait_until
from tests.web import attacks
from tests.web.attacks import HEAD, SPOKEN, AttackTarget, attacking, read_to_end
from tests.web.conftest import ASK, Loaded, bounded, serving
from tests.web.test_serve import answers, start_with
from tests.web.test_slow_clients import LONG_ANSWER
from web import serve
from web.http.addresses import client_address
from web.http.protocol.abuse import MAX_TRACKED, OTHERS, PERIOD_S, AbuseLog
from web.http.protocol.config import BoundedConfig
from web.http.protocol.connection import Connection, ConnectionHandler, SendProgress
from web.http.protocol.http import BoundedHttp, PipelineFlow
from web.http.protocol.message import BodyPace
from web.http.protocol.table import ConnectionTable
from web.http.protocol.websocket import BoundedWebSocket

pytestmark = pytest.mark.one_file_in(3, "gateways under load")

MIB = 1024 * 1024
OWN = {
    BoundedHttp: {"close_if_overdue", "on_chunk_header"},
    BoundedWebSocket: {"close_if_overdue", "take_over"},
    PipelineFlow: set[str](),
}
"""Methods of the bounded protocols that override nothing; all their other methods must exist in
uvicorn.
"""
READ_OF_UVICORN = {
    HttpToolsProtocol: {
        "pipeline",
        "flow",
        "cycle",
        "parser",
        "transport",
        "connections",
        "server_state",
        "headers",
        "loop",
        "ws_protocol_class",
        "timeout_keep_alive_task",
        "timeout_keep_alive",
        "expect_100_continue",
    },
    RequestResponseCycle: {
        "disconnected",
        "message_event",
        "response_started",
        "response_complete",
        "keep_alive",
        "waiting_for_100_continue",
        "scope",
        "chunked_encoding",
        "expected_content_length",
    },
    WebSocketsSansIOProtocol: {
        "conn",
        "frames",
        "curr_msg_data_type",
        "close_sent",
        "writable",
        "handshake_initiated",
        "default_headers",
        "transport",
        "read_paused",
        "loop",
        "queue",
        "disconnected",
        "close_timer",
    },
    FlowControl: {"read_paused", "write_paused"},
}
"""Attributes of uvicorn's classes that the bounded protocols use."""


@pytest.fixture
def config(loaded: Loaded) -> BoundedConfig:
    return serve.uvicorn_config(Starlette(), loaded.config)


def test_uvicorn_uses_the_bounded_protocols(config: BoundedConfig) -> None:
    config.load()
    assert (
        config.http_protocol_class is BoundedHttp and config.ws_protocol_class is BoundedWebSocket
    )


@pytest.mark.parametrize("ours", OWN)
def test_each_override_is_a_method_of_the_installed_uvicorn(ours: type) -> None:
    public = {
        name for name, value in vars(ours).items() if callable(value) and not name.startswith("_")
    }
    assert public - OWN[ours] <= set(dir(ours.__mro__[1])), (
        "uvicorn changed: its protocol classes must be read again"
    )
    assert OWN[ours].isdisjoint(dir(ours.__mro__[1]))


@pytest.mark.parametrize("theirs", READ_OF_UVICORN)
def test_each_attribute_is_set_by_the_installed_uvicorn(theirs: type) -> None:
    named = set(theirs.__init__.__code__.co_names)
    assert READ_OF_UVICORN[theirs] <= named, (
        "uvicorn changed: its protocol classes must be read again"
    )
    for name in ("_start_asgi_task", "_unset_keepalive_if_required"):
        assert callable(getattr(HttpToolsProtocol, name))


async def test_websocket_fragments_are_joined_on_arrival(config: BoundedConfig) -> None:
    config.load()
    protocol = BoundedWebSocket(config, ServerState(), {})
    protocol.read_paused = True
    protocol.handle_text(Frame(Opcode.TEXT, b"a", fin=False))
    for piece in [b"", "ä".encode()[:1], "ä".encode()[1:], b""] * 1000:
        protocol.handle_cont(Frame(Opcode.CONT, piece, fin=False))
    assert not protocol.frames, "all of them are joined"
    protocol.handle_cont(Frame(Opcode.CONT, b"", fin=True))
    protocol.handle_bytes(Frame(Opcode.BINARY, b"b", fin=False))
    protocol.handle_cont(Frame(Opcode.CONT, b"c", fin=True))
    assert protocol.queue.get_nowait() == {"type": "websocket.receive", "text": "a" + "ä" * 1000}
    assert protocol.queue.get_nowait() == {"type": "websocket.receive", "bytes": b"bc"}


async def test_pings_of_unreading_client_are_not_answered(config: BoundedConfig) -> None:
    """Pings of a client that does not read are not answered, since unsent pongs would fill memory
    without bound.
    """
    config.load()
    protocol = BoundedWebSocket(config, ServerState(), {})
    protocol.conn.state = State.OPEN
    protocol.pause_writing()
    protocol.data_received(attacks.PING * 1000)  # there is no transport: an answer would raise
    assert protocol.conn.data_to_send() == []


@pytest.mark.parametrize(
    "host, counted_as",
    [
        ("10.0.0.5", "10.0.0.5"),
        ("::ffff:10.0.0.5", "10.0.0.5"),
        ("2001:db8:0:1::1", "2001:db8:0:1::/64"),
        ("2001:db8:0:1:ffff::2", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::1"),
        ("testclient", "testclient"),
    ],
)
def test_connections_are_counted_by_address_or_ipv6_network(host: str, counted_as: str) -> None:
    assert client_address((host, 1)) == counted_as
    assert client_address(None) is None


def test_send_progress_ignores_writes_meanwhile() -> None:
    progress = SendProgress()
    assert not progress.is_stalled(70_000, 0, 10)
    assert not progress.is_stalled(70_010, 5, 10), "a ping"
    assert progress.is_stalled(70_010, 10, 10)
    assert not progress.is_stalled(60_000, 15, 10) and not progress.is_stalled(60_000, 20, 10), (
        "10 kB left"
    )
    assert not progress.is_stalled(59_999, 25, 10) and progress.is_stalled(59_998, 30, 10), (
        "two bytes left"
    )


async def test_slow_reader_makes_progress_within_kernel_buffer() -> None:
    """A slow reader makes progress within the kernel buffer: Linux accepts more data only once a
    third of up to 4 MiB has left the socket.
    """
    loop = asyncio.get_running_loop()
    accepted: asyncio.Future[Connection] = loop.create_future()

    class Writer(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = cast(asyncio.Transport, transport)
            self.transport.write(bytes(16 * MIB))
            accepted.set_result(Connection(self.transport, None, self))

        def close_if_overdue(self, now: float) -> None: ...

    server = await loop.create_server(Writer, "127.0.0.1", 0)
    with socket.socket() as reader:
        reader.setblocking(False)
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        await loop.sock_connect(reader, server.sockets[0].getsockname())
        connection, progress = await accepted, SendProgress()
        assert not progress.is_stalled(connection.num_unacknowledged(), 0, 10)
        num_read = 0
        while num_read < 600_000:
            num_read += len(await loop.sock_recv(reader, 65_536))
        assert not progress.is_stalled(connection.num_unacknowledged(), 10, 10)
        assert progress.is_stalled(connection.num_unacknowledged(), 20, 10), "nothing was read"
        connection.raw.abort()
        assert connection.num_unacknowledged() == 0
    server.close()
    await server.wait_closed()


def test_body_pace_needs_first_bytes_and_average_rate() -> None:
    pace = BodyPace()
    pace.begin(0)
    pace.num_bytes += 20_000
    assert not pace.is_too_slow(10, 10)
    pace.num_bytes += 100
    assert not pace.is_too_slow(15, 10)
    assert pace.is_too_slow(20, 10), "100 bytes in 10 s"


def test_abuse_log_has_one_line_per_minute_address_and_kind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    abuse = AbuseLog()
    with caplog.at_level(logging.WARNING):
        for second in range(int(PERIOD_S)):
            abuse.note("slow heads", "10.0.0.1", "a slow head", second)
            abuse.sweep(second)
        assert len(caplog.messages) == 1
        abuse.sweep(PERIOD_S)
        assert "slow heads, 59 times" in caplog.messages[-1] and len(caplog.messages) == 2
        for number in range(10_000):
            abuse.note(
                "slow heads", f"10.1.{number // 256}.{number % 256}", "a slow head", PERIOD_S
            )
        assert len(caplog.messages) <= MAX_TRACKED + 3
        abuse.sweep(2 * PERIOD_S)
        abuse.sweep(3 * PERIOD_S)
        assert any(line.startswith(OTHERS) for line in caplog.messages)


DESCRIPTORS = """
import logging, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (150, 400))
logging.basicConfig(level=logging.INFO, format="%(message)s")
from fleet.config.schema import WebConfig
from web.http.protocol.descriptors import connection_bound
few = connection_bound(WebConfig(max_connections=10))
print(connection_bound(WebConfig()), few, resource.getrlimit(resource.RLIMIT_NOFILE))
"""


class StalledLoop:
    """An event loop whose timer is called `late_s` seconds after it is due."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timer: tuple[float, Callable[..., None], tuple[object, ...]]

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[..., None], *args: object) -> None:
        self.timer = (when, callback, args)

    def run_timer(self, late_s: float = 0.0) -> None:
        when, callback, args = self.timer
        self.now = when + late_s
        callback(*args)


def test_time_outs_after_a_stall_are_checked_once_the_input_was_read(loaded: Loaded) -> None:
    """After a stall, timeouts are checked only once the input was read: the timer of a stalled
    event loop may run before its sockets are read.
    """
    table, loop, checked = ConnectionTable(loaded.config.web), StalledLoop(), list[float]()
    handler = SimpleNamespace(close_if_overdue=checked.append)
    table.add(Connection(cast(asyncio.Transport, None), None, cast(ConnectionHandler, handler)))
    table.start(cast(asyncio.AbstractEventLoop, loop))
    loop.run_timer()
    assert len(checked) == 1
    loop.run_timer(late_s=60.0)
    assert len(checked) == 1, "sockets are read before the next call"
    loop.run_timer(late_s=60.0)
    assert len(checked) == 2, "an event loop that is always late must not disable the time-outs"


def test_connection_limit_follows_raised_descriptor_limit() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", DESCRIPTORS],
        cwd=REPO,
        env=cli_env(),
        capture_output=True,
        text=True,
        check=True,
    )
    bound, small, *limits = ran.stdout.split(maxsplit=2)
    assert 200 < int(bound) < 400 - 100 and small == "10" and limits == ["(400, 400)\n"]
    assert "LimitNOFILE" in ran.stderr and len(ran.stderr.splitlines()) == 2


def test_stop_ends_connections_in_every_state(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serve, "GRACE_S", 0.2)
    with caplog.at_level(logging.WARNING), ExitStack() as held:
        with serving(bounded(loaded, send_timeout_s=60)) as gateway:
            target = AttackTarget.of(gateway.url)
            gateway.client.script = LONG_ANSWER
            wires = [
                *attacks.idle_sockets(target, 3),
                *attacks.half_open(target, 3),
                attacks.slow_body(target),
                attacks.unread_stream(target, SPOKEN),
                attacks.open_websocket(target),
                attacks.open_websocket(target, b"/" * 10_000),
            ]
            for wire in wires:
                held.enter_context(wire)
            wait_until(lambda: gateway.client.streams, "the request")
        (stream,) = gateway.client.streams.values()
    assert stream.aborted is None, "its client may resume it at another gateway"
    assert not any("Cancel" in line or "Exception" in line for line in caplog.messages), (
        caplog.messages
    )


@pytest.fixture
def process(loaded: Loaded, redis_url: str) -> Iterator[tuple[subprocess.Popen[str], AttackTarget]]:
    port = free_port()
    web = {
        "port": port,
        "model_name": "omni",
        "header_timeout_s": 1,
        "body_timeout_s": 1,
        "max_connections_per_address": 300,
    }
    with start_with(json.dumps({"web": web}), loaded, redis_url) as running:
        wait_until(
            lambda: answers(f"http://127.0.0.1:{port}"), "the gateway to answer", timeout_s=30
        )
        yield running, AttackTarget("127.0.0.1", port)
        running.kill()


def test_gateway_under_attack_has_bounded_memory_and_stops(
    process: tuple[subprocess.Popen[str], AttackTarget],
) -> None:
    running, target = process
    assert _asked(target).startswith(b"HTTP/1.1 503"), "no worker serves"
    memory = psutil.Process(running.pid)
    before = memory.memory_info().rss
    floods = [
        attacks.header_flood,
        attacks.trailer_flood,
        attacks.chunk_extension_flood,
        attacks.pipeline_flood,
    ]
    at_work = [lambda attack=attack: attack(target, 32 * MIB) for attack in floods]
    with attacking(
        *at_work,
        lambda: attacks.half_open(target, 50),
        lambda: attacks.long_websocket_address(target),
    ) as made:
        wait_until(lambda: min(made) >= 3, "each attack to be made three times", timeout_s=30)
        assert _asked(target).startswith(b"HTTP/1.1 503"), "it answers all the while"
    grown = memory.memory_info().rss - before
    assert grown < 64 * MIB, f"{grown / MIB:.0f} MiB more"
    with ExitStack() as held:
        for wire in [*attacks.half_open(target, 100), *attacks.idle_sockets(target, 100)]:
            held.enter_context(wire)
        running.send_signal(signal.SIGTERM)
        assert running.wait(timeout=10) == 0
    output, _ = running.communicate()
    assert "Traceback" not in output and "Cancel" not in output
    assert len(output.splitlines()) < 30, output


def _asked(target: AttackTarget) -> bytes:
    with target.connect() as wire:
        attacks.post(wire, ASK, HEAD + b"connection: close\r\n")
        return read_to_end(wire)
