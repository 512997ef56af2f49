"""Calls over WebRTC on a fleet of real processes: a spoken question is answered aloud, and every
sample of an answer is heard although workers, or the gateway of the call, are killed in the middle.

A gateway's encoder makes equal packets of equal samples. So what a listener hears is compared with
the samples of a WebSocket packet by packet, without a tolerance.
"""

import asyncio
import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import redis

from fleet.core.ids import RequestId, StageName
from fleet.graphs import DEFAULT_GRAPH, GRAPHS
from fleet.graphs.qwen3_omni import CODE2WAV, TALKER
from tests.e2e.fleets import (
    ProcessFleet,
    fleet_up,
    owner_of,
    process_of,
    wait_for_another_owner,
)
from tests.e2e.gateways import another_gateway
from tests.harness import in_step
from tests.support import Running, await_until
from tests.web.realtime.call_client import CallClient, called
from tests.web.realtime.socket_client import Addressed, Event, opened, transcript
from tests.web.realtime.speech_samples import silence, speech
from web.realtime.webrtc.outgoing import FRAME_BYTES, FRAME_SAMPLES
from web.realtime.webrtc.speech_out import SILENCE, TAIL_FRAMES, OpusEncoder

pytestmark = pytest.mark.one_file_in(5, "answers of processes")

QUESTION, ANSWER = "what is the opposite of hot", "the opposite of hot is cold"
COUNT = "count from one to thirty"
"""A question whose answer is five seconds of speech."""
SETTINGS = (
    "web.port=0",
    "web.max_leading_silence_ms=null",
    "numerics=invariant",
    "transfer.kind=nixl",
    *in_step(GRAPHS[DEFAULT_GRAPH]),
    "edges.codes.policy.kind=each",
)
"""A fleet that answers in speech, and whose stages are hardly ahead of what the gateway reads."""
FLEET = {"fleet": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayProcess:
    """A gateway of its own process."""

    running: Running
    url: str


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessFleet]:
    with fleet_up(tmp_path_factory.mktemp("fleet"), *SETTINGS) as fleet:
        yield fleet


@pytest.fixture
def second(fleet: ProcessFleet) -> Iterator[GatewayProcess]:
    """A second gateway of the fleet, which a test may kill."""
    with another_gateway(fleet) as (running, port):
        yield GatewayProcess(running=running, url=f"http://127.0.0.1:{port}")


def num_frames(pcm: bytes) -> int:
    return -(-len(pcm) // FRAME_BYTES)


def num_heard(packets: Sequence[bytes], pcm: bytes) -> int:
    """Return how many frames of `pcm` a listener has heard, from its first sample on and without a
    gap. Frames that came late are preceded by silence, which takes nothing from them.

    Raises: AssertionError if anything else was heard.
    """
    begin = next((at for at, packet in enumerate(packets) if packet != SILENCE), len(packets))
    heard, silent = packets[begin:], set[int]()
    for at, packet in enumerate(heard):
        silent |= set(range(at - TAIL_FRAMES, at + 1)) if packet == SILENCE else set()
    # A silence of one or two frames shows only in the packet, so each is found by another round.
    while (num := _num_before_silence(heard, pcm, silent)) is None:
        pass
    return num


def _num_before_silence(packets: Sequence[bytes], pcm: bytes, silent: set[int]) -> int | None:
    """Return how many frames of `pcm` are in the packets. `silent`: indices of packets of silence.

    If another packet is found to be silence, its index is added, and None returned.
    """
    encoder, position = OpusEncoder(), 0
    for at, packet in enumerate(packets):
        is_silent = at in silent or position >= len(pcm)
        frame = pcm[position : position + FRAME_BYTES].ljust(FRAME_BYTES, b"\0")
        if encoder.encode(None if is_silent else frame) != packet:
            assert not is_silent, f"packet {at} has other samples than those from {position // 2}"
            silent.add(at)
            return None
        position += 0 if is_silent else FRAME_BYTES
    return num_frames(pcm[:position])


async def until_all_heard(client: CallClient, pcm: bytes) -> None:
    """Wait until a listener has heard exactly the samples of `pcm`."""

    async def is_heard() -> bool:
        return num_heard(client.packets, pcm) == num_frames(pcm)

    await await_until(is_heard, "the last sample to be heard", 30)


async def spoken_over_websocket(gateway: Addressed) -> bytes:
    """Return the samples of the answer to `COUNT` that a WebSocket gets."""
    async with opened(gateway, "/v1/realtime") as page:
        await page.ask(COUNT)
        await page.completed()
    events = (event for event in page.events if event["type"] == "response.output_audio.delta")
    return b"".join(base64.b64decode(event["delta"]) for event in events)


async def begin(client: CallClient) -> tuple[str, RequestId]:
    """Ask `COUNT`; return the ids of the response and its request once the answer is heard."""
    client.ask(COUNT)
    request = RequestId((await client.until("fleet.request"))["request_id"])
    started = await client.until("output_audio_buffer.started")
    return started["response_id"], request


def kill_owner(control: redis.Redis, request: RequestId, stage: StageName) -> None:
    """Kill the worker that is at work on a request, and wait for its successor."""
    owner, _ = owner_of(control, request, stage)
    assert owner, f"{stage} was still at work"
    process_of(owner).kill()
    wait_for_another_owner(control, request, stage, owner)


async def check_completed(client: CallClient, response_id: str) -> Event:
    response = await client.played()
    assert (response["id"], response["status"]) == (response_id, "completed")
    return response


async def test_spoken_question_is_answered_aloud(fleet: ProcessFleet) -> None:
    async with called(fleet, query=FLEET) as client:
        client.microphone.say(silence(300) + speech(QUESTION) + silence(900))
        request = (await client.until("fleet.request"))["request_id"]
        response = await client.played()
        assert transcript(response["output"][0]) == ANSWER
        await until_all_heard(client, fleet.api.answer_audio(request)[44:])


@pytest.mark.parametrize("stage", [TALKER, CODE2WAV])
async def test_answer_is_heard_completely_though_a_worker_is_killed(
    fleet: ProcessFleet, control: redis.Redis, stage: StageName
) -> None:
    whole = await spoken_over_websocket(fleet)
    async with called(fleet, query=FLEET) as client:
        response_id, request = await begin(client)
        # In a thread, since packets that nobody reads for seconds are lost.
        await asyncio.to_thread(kill_owner, control, request, stage)
        await check_completed(client, response_id)
        await until_all_heard(client, whole)


async def until_stored(fleet: ProcessFleet, session: str, request: RequestId) -> None:
    """Wait until other gateways know which answer is under way in a session."""

    async def is_stored() -> bool:
        views = (await asyncio.to_thread(fleet.get, "/v1/fleet/sessions"))["data"]
        return any(view["id"] == session and view["request_id"] == request for view in views)

    await await_until(is_stored, "the running answer to be stored")


async def test_rest_of_an_answer_is_heard_at_another_gateway_after_kill_9(
    fleet: ProcessFleet, second: GatewayProcess
) -> None:
    whole = await spoken_over_websocket(fleet)
    async with called(second, query=FLEET) as client:
        response_id, request = await begin(client)
        session = client.session["id"]
        await until_stored(fleet, session, request)
        await client.until_heard(1.0)
        second.running.process.kill()
        num = num_heard(client.packets, whole)
        assert 0 < num < num_frames(whole), "the answer was under way"
        query = {"session": session, "response": response_id}
        async with called(fleet, query={**query, "samples": str(num * FRAME_SAMPLES)}) as again:
            assert again.session["id"] == session
            await check_completed(again, response_id)
            await until_all_heard(again, whole[num * FRAME_BYTES :])
