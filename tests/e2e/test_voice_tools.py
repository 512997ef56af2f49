"""A tool by voice on a fleet of processes: a spoken question, a function call, its result and a
spoken answer, although the language model's worker is killed between call and result, and the
gateway within the answer.
"""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import soxr
from playwright.sync_api import Page
from websockets.asyncio.client import connect

from fleet.models.cascade_tiny import write_tiny_checkpoint
from tests.clients.environments import AGENTS, run_client
from tests.clients.running import write_question
from tests.e2e.gateways import another_gateway
from tests.e2e.talking import VoiceFleet, talking_fleet
from tests.e2e.test_voice_gateways import address, audio_of
from tests.support import await_until, wait_until
from tests.tool_template import function, write_tool_template
from tests.web.realtime.socket_client import Event, SocketClient, transcript
from tests.web.realtime.speech_samples import RATE_HZ, question
from tests.web.voice.browsers import MIC_RATE_HZ, Browsers, js, visiting

pytestmark = [pytest.mark.one_file_in(5, "answers of processes"), pytest.mark.timeout(900)]

NAME, OUTPUT = "get_weather", "25 degrees"
ARGUMENTS = "response.function_call_arguments"
TOOL = function(NAME, city={"enum": ["Paris", "Rome"]}, days={"enum": [1, 2, 3]})["function"]
ASKED: dict[str, Any] = {
    "type": "realtime",
    "tools": [{"type": "function", **TOOL}],
    "tool_choice": {"type": "function", "name": NAME},
    "audio": {"input": {"turn_detection": {"type": "server_vad"}}},
}
"""Settings with which a random model calls the function after each spoken question."""
SETTINGS = (
    "graph=cascade",
    "device=cpu",
    "transfer.kind=redis",
    "stages.lm.sampling.max_tokens=80",
)
START_S, PATIENCE_S = 480.0, 240.0
"""Limits of the start, and of a wait in which a worker or a gateway is replaced."""
ENDED = ("completed", "incomplete")
"""States of an answer that was not cut; a random one mostly ends at its token limit."""
HEARD_S = 0.5
"""Seconds of the answer that a client has when its gateway is killed."""


PAGE = """
async (asked) => {
  const microphone = await navigator.mediaDevices.getUserMedia({ audio: true });
  const events = window.events = [];
  const find = (type) => events.find((event) => event.type === type);
  const send = (event) => window.channel.send(JSON.stringify(event));
  const result = () => send({ type: "conversation.item.create", item: window.item });

  async function onDone({ output: [item] }) {
    if (item.type !== "function_call") return;
    const output = await window.getWeather(item.arguments);
    window.item = { type: "function_call_output", call_id: item.call_id, output };
    result();
    send({ type: "response.create", response: { tool_choice: "none" } });
  }

  async function dial(query) {
    const call = window.call = new RTCPeerConnection();
    call.ontrack = ({ streams }) => {
      const audio = window.audio = new Audio();
      audio.srcObject = streams[0];
      audio.play();
    };
    call.onconnectionstatechange = async () => {
      if (call !== window.call || call.connectionState !== "failed") return;
      call.close();
      const response = events.findLast(({ type }) => type === "response.created").response.id;
      await dial(`&session=${find("session.created").session.id}&response=${response}`);
      result();
    };
    call.addTrack(microphone.getTracks()[0]);
    const channel = window.channel = call.createDataChannel("oai-events");
    channel.onmessage = ({ data }) => {
      const event = JSON.parse(data);
      events.push(event);
      if (event.type === "response.done") onDone(event.response);
    };
    const opened = new Promise((resolve) => { channel.onopen = resolve; });
    await call.setLocalDescription(await call.createOffer());
    const form = new FormData();
    form.set("sdp", call.localDescription.sdp);
    if (!query) form.set("session", JSON.stringify(asked));
    const url = `/v1/realtime/calls?fleet=1${query}`;
    const answer = await fetch(url, { method: "POST", body: form });
    await call.setRemoteDescription({ type: "answer", sdp: await answer.text() });
    await opened;
  }

  await dial("");
}
"""
"""A page that calls as OpenAI's example does, answers function calls, and calls again after the
loss of a connection, with the last result.
"""
HEARD = """
async () => {
  const reports = [...(await window.call.getStats()).values()];
  return reports.find(({ type }) => type === "inbound-rtp")?.totalAudioEnergy ?? 0;
}
"""
NO_ICON = ("404 (Not Found)",)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VoiceFleet]:
    folder = tmp_path_factory.mktemp("fleet")
    checkpoint = write_tiny_checkpoint(folder / "tiny")
    write_tool_template(checkpoint / "lm")
    with talking_fleet(folder, f"checkpoint={checkpoint}", *SETTINGS, start_s=START_S) as fleet:
        yield fleet


def kill_model(fleet: VoiceFleet) -> str:
    """Kill the only worker of the language model; return its id."""
    worker = fleet.worker("lm")
    os.kill(worker["pid"], signal.SIGKILL)
    return worker["id"]


def model_of(fleet: VoiceFleet, request: str) -> str:
    """Return the id of the worker whose language model finished its part of a request."""
    tasks = fleet.get(f"/v1/fleet/requests/{request}")["tasks"]
    return next(task["owner"] for task in tasks if task["stage"] == "lm")


def conversation_of(fleet: VoiceFleet, request: str) -> tuple[list[str], list[str]]:
    """Return the call ids of the calls and of the results in a request's conversation."""
    body = json.loads(fleet.get(f"/v1/fleet/requests/{request}")["body"])
    calls = [call["id"] for message in body["messages"] for call in message.get("tool_calls", [])]
    results = [message for message in body["messages"] if message["role"] == "tool"]
    assert all(message["content"].endswith(OUTPUT) for message in results)
    return calls, [message["tool_call_id"] for message in results]


def last_request(client: SocketClient) -> str:
    """Return the id of the request of the latest response."""
    return next(
        event["request_id"] for event in client.events[::-1] if event["type"] == "fleet.request"
    )


async def ask_for_call(client: SocketClient) -> Event:
    """Speak the question; return the call that answers it."""
    await client.append(question())
    (call,) = (await client.completed())["output"]
    assert (call["type"], call["name"]) == ("function_call", NAME)
    assert json.loads(call["arguments"]).keys() == {"city", "days"}
    return call


async def send_result(client: SocketClient, call: Event) -> None:
    item = {"type": "function_call_output", "call_id": call["call_id"], "output": OUTPUT}
    await client.send("conversation.item.create", item=item)


async def ask_for_answer(client: SocketClient) -> tuple[str, str]:
    """Request a response without a call; return its id and the id of its request."""
    await client.send("response.create", response={"tool_choice": "none"})
    response = (await client.until("response.created"))["response"]["id"]
    return response, (await client.until("fleet.request"))["request_id"]


def text_of(client: SocketClient) -> str:
    """Return the transcript of all answers that the client has received."""
    kind = "response.output_audio_transcript.delta"
    return "".join(event["delta"] for event in client.events if event["type"] == kind)


async def first_event(client: SocketClient, kind: str) -> Event:
    """Return the first event of this type, now or once it arrives."""
    while kind not in client.kinds():
        await client.next()
    return client.events[client.kinds().index(kind)]


def results_in(*clients: SocketClient) -> list[str]:
    """Return the ids of the calls whose results became items of the conversation."""
    events = [event for client in clients for event in client.events]
    items = [event["item"] for event in events if event["type"] == "conversation.item.added"]
    return [item["call_id"] for item in items if item["type"] == "function_call_output"]


async def test_spoken_call_and_answer_survive_worker_and_gateway(fleet: VoiceFleet) -> None:
    """The worker dies between call and result, and the gateway within the answer. The next gateway
    refuses the result that is sent again, sends the rest of the answer, and takes the next turn.
    """
    with another_gateway(fleet) as (gateway, port):
        async with connect(address(port), max_size=None) as socket:
            client = SocketClient(socket)
            await client.until("session.created")
            errors, _ = await client.update(**ASKED)
            assert not errors
            call = await ask_for_call(client)
            killed = kill_model(fleet)
            assert model_of(fleet, last_request(client)) == killed, "it made the call"
            await send_result(client, call)
            response, request = await ask_for_answer(client)
            while len(audio_of(client)) < 2 * HEARD_S * RATE_HZ:
                await client.next()

            async def is_recorded() -> bool:
                views = fleet.get("/v1/fleet/sessions")["data"]
                return any(view["request_id"] == request for view in views)

            await await_until(is_recorded, "the answer under way to be recorded")
            gateway.stop(signal.SIGKILL)
            await client.drop()
    had = {"samples": len(audio_of(client)) // 2, "chars": len(text_of(client))}
    query = {"session": client.session, "response": response, **had}
    async with connect(address(fleet.api.port, **query), max_size=None) as socket:
        again = SocketClient(socket)
        await again.until("session.created")
        await send_result(again, call)
        answer = (await first_event(again, "response.done"))["response"]
        error = (await first_event(again, "error"))["error"]
        assert error["param"] == "item.call_id" and "already" in error["message"]
        assert answer["id"] == response and answer["status"] in ENDED, answer
        assert model_of(fleet, request) not in ("", killed)
        assert audio_of(client) + audio_of(again) == fleet.audio(request).tobytes()
        said = text_of(client) + text_of(again)
        assert said.strip() == transcript(answer["output"][0]).strip()
        heard = len(audio_of(again))
        assert heard, "the gateway was killed within the answer"

        other = await ask_for_call(again)
        await send_result(again, other)
        _, request = await ask_for_answer(again)
        assert (await again.done())["status"] in ENDED
        assert audio_of(again)[heard:] == fleet.audio(request).tobytes()
        both = [call["call_id"], other["call_id"]]
        assert results_in(client, again) == both and conversation_of(fleet, request) == (both, both)
        assert again.kinds().count("error") == 1 and "error" not in client.kinds()


def test_agents_sdk_speaks_the_answer_after_the_worker_died_in_its_tool(
    fleet: VoiceFleet, tmp_path: Path
) -> None:
    path, killed = write_question(tmp_path / "question.wav"), fleet.worker("lm")
    arguments = (fleet.url, fleet.api.model(), str(path), str(killed["pid"]), OUTPUT)
    heard = json.loads(run_client("agents_tool.script", AGENTS, *arguments))
    (given,) = heard["called"]
    assert given.keys() == {"city", "days"} and heard["results"] == [OUTPUT]
    requests = [request["id"] for request in fleet.get("/v1/fleet/requests")["data"]]
    answer = next(request for request in requests if conversation_of(fleet, request)[1])
    calls, results = conversation_of(fleet, answer)
    assert calls == results and len(calls) == 1
    assert model_of(fleet, answer) not in ("", killed["id"])
    assert heard["samples"] == len(fleet.audio(answer)) > 0


def events_of(page: Page, kind: str) -> list[Event]:
    return [event for event in cast("list[Event]", js(page, "events")) if event["type"] == kind]


def wait_for(page: Page, kind: str, num: int = 1) -> Event:
    """Wait until the page has received `num` events of a type; return the last of them."""
    wait_until(lambda: len(events_of(page, kind)) >= num, f"{num} events {kind}", PATIENCE_S)
    return events_of(page, kind)[num - 1]


def test_page_hears_the_whole_answer_after_worker_and_gateway_died(
    fleet: VoiceFleet, tmp_path: Path
) -> None:
    killed: list[str] = []

    def get_weather(arguments: str) -> str:
        assert json.loads(arguments).keys() == {"city", "days"}
        killed.append(kill_model(fleet))
        return OUTPUT

    asked = soxr.resample(np.frombuffer(question(), "<i2"), RATE_HZ, MIC_RATE_HZ)
    with (
        another_gateway(fleet) as (gateway, port),
        fleet.switch.leading_to(port),
        Browsers.started(tmp_path) as browsers,
        visiting(
            browsers.with_microphone("asks", asked, "--allow-loopback-in-peer-connection"),
            f"{fleet.switch.url}/v1/models",
            NO_ICON,
        ) as page,
    ):
        page.expose_function("getWeather", get_weather)
        page.evaluate(PAGE, ASKED)
        wait_for(page, "output_audio_buffer.started")
        wait_until(lambda: page.evaluate(HEARD) > 0.01, "the answer to be heard", PATIENCE_S)
        response = events_of(page, "response.created")[-1]["response"]["id"]
        request = events_of(page, "fleet.request")[-1]["request_id"]
        fleet.switch.lead_home()
        gateway.stop(signal.SIGKILL)
        wait_for(page, "session.created", 2)
        error = wait_for(page, "error")["error"]
        assert error["param"] == "item.call_id" and "already" in error["message"]
        answer = wait_for(page, "response.done", 2)["response"]
        assert answer["id"] == response and answer["status"] in ENDED, answer
        wait_for(page, "output_audio_buffer.stopped")
        assert page.evaluate(HEARD) > 0.01, "the rest of the answer is heard"
        (call,) = [event["call_id"] for event in events_of(page, f"{ARGUMENTS}.done")]
        items = [event["item"] for event in events_of(page, "conversation.item.added")]
        assert [item["call_id"] for item in items if item["type"] == "function_call_output"] == [
            call
        ]
        assert conversation_of(fleet, request) == ([call], [call])
        assert killed != [model_of(fleet, request)] and len(killed) == 1
        assert len(events_of(page, "error")) == 1
