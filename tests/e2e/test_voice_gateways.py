"""A voice session whose gateway is killed during an answer resumes at another gateway: no audio
sample and no history is lost.
"""

import base64
import io
import signal
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from fleet.graphs import DEFAULT_GRAPH, GRAPHS
from tests.e2e.fleets import FAKE, fleet_up
from tests.e2e.gateways import another_gateway
from tests.support import Running, await_until
from tests.web.realtime.socket_client import SocketClient
from tests.web.realtime.speech_samples import RATE_HZ, speech

pytestmark = pytest.mark.one_file_in(5, "answers of processes")

GRAPH = GRAPHS[DEFAULT_GRAPH]
FRAMES, STEP_MS = 75, 40
"""Number of codec frames of an answer (six seconds of audio) and time in ms to generate each (three
seconds in all).
"""
SETTINGS = (
    *FAKE,
    "web.max_leading_silence_ms=null",
    *(
        f"stages.{stage.name}.extra.step_ms={STEP_MS}"
        for stage in GRAPH.stages
        if stage.default_sampling
    ),
    *(
        f"stages.{s.name}.sampling.max_tokens={24 if s.main else FRAMES}"
        for s in GRAPH.stages
        if s.default_sampling
    ),
)
QUESTION = "what is the opposite of hot"


@pytest.fixture
def gateways(tmp_path: Path) -> Iterator[tuple[Running, int, int]]:
    """Start two gateways in addition to the one of `fleet up`; yield the first of them and both
    ports.
    """
    with (
        fleet_up(tmp_path, *SETTINGS) as fleet,
        another_gateway(fleet) as (first, port),
        another_gateway(fleet) as (_, other),
    ):
        yield first, port, other


def address(port: int, **query: object) -> str:
    query_string = "&".join(f"{name}={value}" for name, value in {"fleet": 1, **query}.items())
    return f"ws://127.0.0.1:{port}/v1/realtime?{query_string}"


def audio_of(client: SocketClient) -> bytes:
    """Return the audio that the client has received."""
    return b"".join(
        base64.b64decode(event["delta"])
        for event in client.events
        if event["type"] == "response.output_audio.delta"
    )


async def item_of(client: SocketClient, item_id: str) -> dict[str, Any]:
    await client.send("conversation.item.retrieve", item_id=item_id)
    return (await client.until("conversation.item.retrieved"))["item"]


async def test_voice_session_resumes_at_another_gateway_after_kill_9(
    gateways: tuple[Running, int, int],
) -> None:
    first, port, second_port = gateways
    async with (
        connect(address(port), max_size=None) as socket,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{second_port}", timeout=30) as http,
    ):
        client = SocketClient(socket)
        session = (await client.until("session.created"))["session"]["id"]
        await client.send(
            "session.update",
            session={"type": "realtime", "audio": {"input": {"turn_detection": None}}},
        )
        await client.send(
            "input_audio_buffer.append", audio=base64.b64encode(speech(QUESTION)).decode()
        )
        await client.send("input_audio_buffer.commit")
        spoken = (await client.until("conversation.item.added"))["item"]["id"]
        await client.send("response.create")
        response = (await client.until("response.created"))["response"]["id"]
        request = (await client.until("fleet.request"))["request_id"]
        while len(audio_of(client)) < 2 * RATE_HZ:
            await client.next()

        async def recorded() -> bool:
            views = (await http.get("/v1/fleet/sessions")).json()["data"]
            return any(view["id"] == session and view["request_id"] == request for view in views)

        await await_until(recorded, "the running answer to be recorded")
        assert first.stop(signal.SIGKILL) == -signal.SIGKILL
        with pytest.raises(ConnectionClosed):
            while True:
                await client.next()
        had = len(audio_of(client)) // 2
        assert had < FRAMES * 1920 * 3 // 4, "the answer was running"

        query = {"session": session, "response": response, "samples": had}
        async with connect(address(second_port, **query), max_size=None) as other:
            again = SocketClient(other)
            resumed = await again.until("fleet.resumed")
            done = (await again.until("response.done"))["response"]
            whole = wave.open(
                io.BytesIO((await http.get(f"/v1/fleet/requests/{request}/audio")).content)
            ).readframes(10**9)
            assert (
                resumed["session_id"] == session
                and resumed["response_id"] == done["id"] == response
            )
            assert audio_of(again) and audio_of(client) + audio_of(again) == whole
            await take_another_turn(again, http, done, spoken)
    assert "error" not in [*client.kinds(), *again.kinds()]


async def take_another_turn(
    client: SocketClient, http: httpx.AsyncClient, done: dict[str, Any], spoken: str
) -> None:
    """Ask a new question, and check that its request has the whole history: the spoken question,
    its answer, and the new question.
    """
    (answer,) = done["output"]
    assert (await item_of(client, answer["id"]))["content"][0]["transcript"] == answer["content"][
        0
    ]["transcript"]
    question = base64.b64decode((await item_of(client, spoken))["content"][0]["audio"])
    assert abs(len(question) - len(speech(QUESTION))) < 2 * RATE_HZ // 10
    before = len(audio_of(client))
    await client.ask("and of cold?")
    request = (await client.until("fleet.request"))["request_id"]
    after = (await client.until("response.done"))["response"]
    assert len(audio_of(client)) > before and after["output"]
    used = after["usage"]["input_token_details"]
    assert used["audio_tokens"] == done["usage"]["input_token_details"]["audio_tokens"] > 0
    assert used["text_tokens"] > done["usage"]["input_token_details"]["text_tokens"] + len(
        "and of cold?".split()
    )
    trace = (await http.get(f"/v1/fleet/requests/{request}")).text
    assert "and of cold?" in trace
