"""Costly bodies and events: each is refused, in bounded memory, by a limit that its error names."""

import json
from collections.abc import Iterator

import httpx
import pytest
from websockets.sync.client import connect

from tests.web.bombs import BODIES, CHAT, EVENTS, MIB, Bomb, audio_chat
from tests.web.gateway_target import GatewayTarget, gateway_target

pytestmark = pytest.mark.one_file_in(3, "gateways under load")

MAX_GROWTH_BYTES = 100 * MIB
"""Limit of memory growth in bytes, in addition to the body, which is in memory twice while it is
joined.
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayTarget]:
    with gateway_target(tmp_path_factory.mktemp("target")) as target:
        yield target


@pytest.mark.parametrize("bomb", BODIES, ids=str)
def test_costly_body_is_refused_in_bounded_memory(target: GatewayTarget, bomb: Bomb) -> None:
    body, start = bomb.make(), target.mark()
    answer = target.post(bomb.path, body, bomb.media_type)
    assert answer.status_code == bomb.status, answer.text
    message = answer.json()["error"]["message"]
    assert bomb.message in message and len(message) < 1_000
    assert target.growth(start) < 2 * len(body) + MAX_GROWTH_BYTES


@pytest.mark.parametrize("bomb", EVENTS, ids=str)
def test_costly_event_is_refused_in_bounded_memory_without_disconnect(
    target: GatewayTarget, bomb: Bomb
) -> None:
    with connect(target.url.replace("http", "ws") + "/v1/realtime") as socket:
        assert json.loads(socket.recv())["type"] == "session.created"
        event, start = bomb.make(), target.mark()
        socket.send(event, text=True)
        error = json.loads(socket.recv())["error"]
        assert bomb.message in error["message"] and len(error["message"]) < 1_000
        assert error["code"] == ("input_too_large" if bomb.status == 413 else "invalid_value")
        assert target.growth(start) < 4 * len(event) + MAX_GROWTH_BYTES
        socket.send('{"type": "input_audio_buffer.clear"}')
        assert json.loads(socket.recv())["type"] == "input_audio_buffer.cleared"


def test_long_recording_is_accepted(target: GatewayTarget) -> None:
    body = audio_chat(11_000_000)
    answer = httpx.post(target.url + CHAT, content=body, timeout=30)
    assert answer.status_code == 200, answer.text
