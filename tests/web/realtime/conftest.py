"""Fixtures: clients connected to the gateway's two voice sockets."""

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.web.conftest import Loaded, ServedGateway, serving
from tests.web.realtime.manual_clock import ManualClock
from tests.web.realtime.socket_client import SocketClient, opened


@pytest.fixture(scope="module")
def clock() -> ManualClock:
    """The clock of a gateway whose time the tests of one file set."""
    return ManualClock()


@pytest.fixture(scope="module")
def timed_cascade(cascade: Loaded, clock: ManualClock) -> Iterator[ServedGateway]:
    """A gateway of the graph `cascade` with this clock."""
    with serving(cascade, clock=clock) as gateway:
        yield gateway


@pytest.fixture
async def page(gateway: ServedGateway) -> AsyncIterator[SocketClient]:
    """A client of the console's voice socket, after its session has begun."""
    async with opened(gateway) as page:
        yield page


@pytest.fixture
async def client(gateway: ServedGateway) -> AsyncIterator[SocketClient]:
    """A client of the OpenAI-compatible voice socket, after its session has begun."""
    async with opened(gateway, "/v1/realtime") as client:
        yield client


@pytest.fixture
def only_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let both sides of calls use loopback, so that the tests need no network."""
    monkeypatch.setattr("aioice.ice.get_host_addresses", lambda **_: ["127.0.0.1"])


@pytest.fixture(params=["shared_gateway", "shared_cascade"])
def any_gateway(request: pytest.FixtureRequest) -> ServedGateway:
    """The gateway of a graph that hears by itself, and that of a graph with a recogniser, with
    their fake control planes reset.
    """
    served: ServedGateway = request.getfixturevalue(request.param)
    served.client.reset()
    return served
