"""Fixtures: clients connected to the gateway's two voice sockets."""

from collections.abc import AsyncIterator

import pytest

from tests.web.conftest import ServedGateway
from tests.web.realtime.socket_client import SocketClient, opened


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


@pytest.fixture(params=["shared_gateway", "shared_cascade"])
def any_gateway(request: pytest.FixtureRequest) -> ServedGateway:
    """The gateway of a graph that hears by itself, and that of a graph with a recogniser, with
    their fake control planes reset.
    """
    served: ServedGateway = request.getfixturevalue(request.param)
    served.client.reset()
    return served
