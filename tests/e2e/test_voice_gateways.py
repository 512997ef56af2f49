"""A voice session whose gateway is killed during an answer resumes at another: no sample and no history is lost."""

import asyncio
import base64
import io
import json
import signal
import wave
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from fleet.graphs import DEFAULT_GRAPH, GRAPHS
from tests.support import Running, await_until, start_cli, wait_until
from tests.web.realtime.speech_samples import RATE_HZ, speech

GRAPH = GRAPHS[DEFAULT_GRAPH]
START_S = 90.0
FRAMES, STEP_MS = 75, 40
"""Six seconds of audio, generated in three."""
SETTINGS = (
    "engine=fake", "device=cpu", "transfer.kind=redis", "web.port=0", "web.max_leading_silence_ms=null",
    *(f"stages.{stage.name}.extra.step_ms={STEP_MS}" for stage in GRAPH.stages if stage.default_sampling),
    *(f"stages.{s.name}.sampling.max_tokens={24 if s.main else FRAMES}" for s in GRAPH.stages if s.default_sampling),
)  # fmt: skip
SAID = "what is the opposite of hot"


@dataclass(slots=True)
class RunningGateway:
    running: Running
    url: str


@pytest.fixture
def gateways(tmp_path: Path) -> Iterator[tuple[RunningGateway, RunningGateway]]:
    """Start two gateways beside that of `fleet up`, without a keeper."""
    env = {"FLEET_CONFIG": str(tmp_path / ".fleet" / "resolved.yaml")}
    with ExitStack() as stack:
        fleet = stack.enter_context(start_cli("up", *(w for s in SETTINGS for w in ("--set", s)), cwd=tmp_path))
        fleet.wait_for(r"fleet: ready at http://\S+\n", timeout_s=START_S)
        started = [stack.enter_context(start_cli("web", "--set", "web.port=0", cwd=tmp_path, env=env)) for _ in range(2)]
        ports = [running.wait_for(r"API http://localhost:(\d+)/v1", timeout_s=START_S)[1] for running in started]
        first, second = (RunningGateway(web, f"http://127.0.0.1:{port}") for web, port in zip(started, ports, strict=True))
        for gateway in (first, second):
            wait_until(lambda url=gateway.url: answers(url), f"{gateway.url} to serve", timeout_s=START_S)
        yield first, second


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


@dataclass(slots=True)
class RecordingClient:
    """A session that records its events and audio."""

    socket: ClientConnection
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    audio: bytearray = field(default_factory=bytearray)

    async def send(self, kind: str, **fields: object) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def next(self) -> dict[str, Any]:
        event: dict[str, Any] = json.loads(await asyncio.wait_for(self.socket.recv(), 60))
        assert event["type"] != "error", event
        self.events.append(event)
        if event["type"] == "response.output_audio.delta":
            self.audio += base64.b64decode(event["delta"])
        return event

    async def until(self, kind: str) -> dict[str, Any]:
        while (event := await self.next())["type"] != kind:
            pass
        return event

    async def to_the_end(self) -> None:
        """Receive what still arrives on a broken connection."""
        while True:
            try:
                await self.next()
            except ConnectionClosed:
                return

    async def item(self, item_id: str) -> dict[str, Any]:
        await self.send("conversation.item.retrieve", item_id=item_id)
        return (await self.until("conversation.item.retrieved"))["item"]


def address(gateway: RunningGateway, **query: object) -> str:
    query_string = "&".join(f"{name}={value}" for name, value in {"fleet": 1, **query}.items())
    return f"{gateway.url.replace('http', 'ws')}/v1/realtime?{query_string}"


async def test_voice_session_resumes_at_another_gateway_after_kill_9(gateways: tuple[RunningGateway, RunningGateway]) -> None:
    first, second = gateways
    async with connect(address(first), max_size=None) as socket, httpx.AsyncClient(base_url=second.url, timeout=30) as http:
        client = RecordingClient(socket)
        session = (await client.until("session.created"))["session"]["id"]
        await client.send("session.update", session={"type": "realtime", "audio": {"input": {"turn_detection": None}}})
        await client.send("input_audio_buffer.append", audio=base64.b64encode(speech(SAID)).decode())
        await client.send("input_audio_buffer.commit")
        spoken = (await client.until("conversation.item.added"))["item"]["id"]
        await client.send("response.create")
        response = (await client.until("response.created"))["response"]["id"]
        request = (await client.until("fleet.request"))["request_id"]
        while len(client.audio) < 2 * RATE_HZ:
            await client.next()

        async def recorded() -> bool:
            views = (await http.get("/v1/fleet/sessions")).json()["data"]
            return any(view["id"] == session and view["request_id"] == request for view in views)

        await await_until(recorded, "the running answer to be recorded")
        assert first.running.stop(signal.SIGKILL) == -signal.SIGKILL
        await client.to_the_end()
        had = len(client.audio) // 2
        assert had < FRAMES * 1920 * 3 // 4, "the answer was running"

        query = {"session": session, "response": response, "samples": had}
        async with connect(address(second, **query), max_size=None) as other:
            again = RecordingClient(other)
            resumed = await again.until("fleet.resumed")
            done = (await again.until("response.done"))["response"]
            whole = wave.open(io.BytesIO((await http.get(f"/v1/fleet/requests/{request}/audio")).content)).readframes(10**9)
            assert resumed["session_id"] == session and resumed["response_id"] == done["id"] == response
            assert len(again.audio) > 0 and bytes(client.audio + again.audio) == whole
            await take_another_turn(again, http, done, spoken)


async def take_another_turn(client: RecordingClient, http: httpx.AsyncClient, done: dict[str, Any], spoken: str) -> None:
    """The answer has the whole history: the spoken question, its answer, and the new question."""
    (answer,) = done["output"]
    words = answer["content"][0]["transcript"]
    assert (await client.item(answer["id"]))["content"][0]["transcript"] == words
    heard = base64.b64decode((await client.item(spoken))["content"][0]["audio"])
    assert abs(len(heard) - len(speech(SAID))) < 2 * RATE_HZ // 10
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "and of cold?"}]}
    await client.send("conversation.item.create", item=item)
    await client.send("response.create")
    request = (await client.until("fleet.request"))["request_id"]
    after = (await client.until("response.done"))["response"]
    assert len(client.audio) > 0 and after["output"]
    used = after["usage"]["input_token_details"]
    assert used["audio_tokens"] == done["usage"]["input_token_details"]["audio_tokens"] > 0
    assert used["text_tokens"] > done["usage"]["input_token_details"]["text_tokens"] + len("and of cold?".split())
    trace = (await http.get(f"/v1/fleet/requests/{request}")).text
    assert "and of cold?" in trace
