"""Requests beyond `limits.max_requests` at real gateways, over a real Redis and fake engines: they
wait, in the fair order of their clients' addresses.
"""

import asyncio
import base64
import re
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import httpx
import msgspec
import numpy as np
import pytest
from openai import AsyncOpenAI
from websockets.asyncio.client import connect

from fleet.config.api_keys import ENVIRONMENT, KeyLimits
from fleet.config.schema import Limits
from fleet.control.client import FleetClient
from fleet.control.waiting import ClientShare
from fleet.core.ids import EdgeName, RequestId
from tests.harness import ThreadFleet, fake_spec_of, gateway_at, ready, thread_fleet
from tests.noises import wav
from tests.support import await_until
from tests.web.conftest import ASK, Loaded
from tests.web.realtime.socket_client import SocketClient
from web.app import create_app
from web.gateway import audio_preparation
from web.gateway.shares import FairShares
from web.http.callers import ApiCaller
from web.serve import Server, uvicorn_config

STEP_MS, SLOTS = 5, 64
WORKERS = (f"stages.thinker.extra={{step_ms: {STEP_MS}}}", f"stages.thinker.max_batch={SLOTS}")
SHORT = {**ASK, "max_tokens": 5}


@dataclass(frozen=True, slots=True)
class QueueGateway:
    url: str
    client: FleetClient

    async def await_waiting(self, num: int) -> None:
        async def waiting() -> bool:
            return self.client.requests.num_waiting == num

        await await_until(waiting, f"{num} requests to wait", timeout_s=60)

    async def fill(self, num: int | None = None) -> list[RequestId]:
        """Submit `num` long requests, or as many as the fleet admits; return their ids."""
        config = self.client.config
        outputs = (EdgeName("text"),)
        specs = [
            msgspec.structs.replace(fake_spec_of(config, num_tokens=100_000), outputs=outputs)
            for _ in range(config.limits.max_requests if num is None else num)
        ]
        for spec in specs:
            await self.client.requests.submit_without_client(spec, None, None)
        return [spec.id for spec in specs]

    def http(self, address: str = "127.0.0.1") -> httpx.AsyncClient:
        """Return a client that connects from a loopback address."""
        transport = httpx.AsyncHTTPTransport(
            local_address=address, limits=httpx.Limits(max_connections=None)
        )
        return httpx.AsyncClient(transport=transport, base_url=self.url, timeout=120)


@pytest.fixture
def workers(redis_url: str) -> Iterator[ThreadFleet]:
    with thread_fleet(redis_url, *WORKERS) as fleet:
        yield fleet


OpenGateway = Callable[..., AbstractAsyncContextManager[QueueGateway]]


@pytest.fixture
def serving(loaded: Loaded, redis_url: str, workers: ThreadFleet) -> OpenGateway:
    """Function that serves a gateway of the fleet with the given limits."""
    assert workers.loops

    @asynccontextmanager
    async def serve(
        trusted_proxies: tuple[str, ...] = (), **limits: object
    ) -> AsyncIterator[QueueGateway]:
        given = loaded.config
        config = given.model_copy(
            update={
                "limits": given.limits.model_copy(update=limits),
                "web": given.web.model_copy(update={"trusted_proxies": trusted_proxies}),
                # A thousand requests in the process of their gateway may delay its renewals.
                "lease": given.lease.model_copy(update={"worker_ttl_s": 30.0}),
            }
        )
        async with gateway_at(redis_url, config) as client:
            await ready(client)
            await client.open_connections()
            app = create_app(config, client, loaded.frontend, None)
            with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
                server = Server(uvicorn_config(app, config), app)
                served = asyncio.create_task(server.serve([listener]))
                yield QueueGateway(f"http://127.0.0.1:{listener.getsockname()[1]}", client)
                server.stop()
                await served

    return serve


async def test_burst_of_the_openai_client_loses_no_request(serving: OpenGateway) -> None:
    """Three hundred requests at once, from the client as it is by default, at a bound of 40."""
    async with serving(max_requests=40) as gateway:
        async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none") as client:
            answers = await asyncio.gather(
                *(
                    client.chat.completions.create(
                        model="omni",
                        messages=[{"role": "user", "content": "hello"}],
                        max_tokens=20,
                    )
                    for _ in range(300)
                ),
                return_exceptions=True,
            )
    lost = [answer for answer in answers if isinstance(answer, BaseException)]
    assert not lost, f"{len(lost)} requests are lost: {lost[0]!r}"


class ClientAnswer(NamedTuple):
    """Answer to a request. `retry_s`: time after which to send the request again, if any."""

    client: str
    status: int
    retry_s: int | None


@dataclass(slots=True)
class Clients:
    """Requests of several addresses, each on a connection of its own, and their answers in
    order.
    """

    answered: list[ClientAnswer] = field(default_factory=list[ClientAnswer])
    asking: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])

    def ask(self, gateway: QueueGateway, address: str, num: int = 1) -> list[asyncio.Task[None]]:
        """Begin to ask `num` requests from a loopback address."""
        begun = [asyncio.create_task(self._ask(gateway, address)) for _ in range(num)]
        self.asking += begun
        return begun

    def statuses(self, client: str) -> Counter[int]:
        return Counter(each.status for each in self.answered if each.client == client)

    async def leave(self) -> None:
        for task in self.asking:
            task.cancel()
        await asyncio.gather(*self.asking, return_exceptions=True)

    async def _ask(self, gateway: QueueGateway, address: str) -> None:
        """Send a request without a library for HTTP, which would take longer than the gateway."""
        host, _, port = gateway.url.removeprefix("http://").partition(":")
        body = msgspec.json.encode({**ASK, "max_tokens": 20})
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        reader, writer = await asyncio.open_connection(host, int(port), local_addr=(address, 0))
        with closing(writer):
            writer.write(head.encode() + body)
            answer = (await reader.read()).decode()
        retry = re.search(r"^retry-after: (\d+)", answer, re.IGNORECASE | re.MULTILINE)
        status = int(answer.split(" ", 2)[1])
        self.answered.append(ClientAnswer(address, status, int(retry[1]) if retry else None))


MANY, OTHERS = "127.0.0.2", [f"127.0.1.{number}" for number in range(1, 21)]
UNCLAIMED = 16
"""Tasks that may wait for the workers of a role before further requests wait at gateways."""
PORTION = 100
"""Requests of the one client that are sent at once, while none of them can be answered."""


async def num_served_before_others(gateways: Sequence[QueueGateway], num: int, filled: int) -> int:
    """Send `num` requests of one client, then one of each of twenty others, and let them have the
    places or slots, until then `filled`; return the number of the one client's answers that came
    before the last one of the others.
    """
    first, last = gateways[0], gateways[-1]
    clients, live = Clients(), await first.fill(filled)
    for begun in range(0, num, PORTION):
        clients.ask(first, MANY, min(PORTION, num))
        await first.await_waiting(begun + min(PORTION, num))
    few = [task for address in OTHERS for task in clients.ask(last, address)]
    await last.await_waiting(len(OTHERS) + (num if first is last else 0))
    await asyncio.gather(*(first.client.requests.abort(request) for request in live))
    await asyncio.gather(*few)
    num_before = clients.statuses(MANY)[200]
    assert all(clients.statuses(address)[200] == 1 for address in OTHERS), clients.answered
    await clients.leave()

    async def is_over() -> bool:
        return await first.client.telemetry.num_live() + first.client.requests.num_waiting == 0

    await await_until(is_over, "the one client's requests to be aborted")
    return num_before


@pytest.mark.one_in(4, "a thousand beside twenty")
@pytest.mark.parametrize(
    ("num_gateways", "max_requests", "filled"),
    [(1, 20, 20), (2, 20, 20), (1, 2000, SLOTS + UNCLAIMED)],
    ids=["places", "places of two gateways", "slots"],
)
async def test_thousand_requests_of_one_address_hold_up_others_as_twenty_do(
    serving: OpenGateway, num_gateways: int, max_requests: int, filled: int
) -> None:
    """Each of twenty clients is served as if the one beside them had sent twenty requests, whether
    places are scarce or slots of workers.
    """
    async with AsyncExitStack() as stack:
        gateways = [
            await stack.enter_async_context(
                serving(max_requests=max_requests, max_wait_s=120.0, max_waiting=2000)
            )
            for _ in range(num_gateways)
        ]
        with_twenty = await num_served_before_others(gateways, 20, filled)
        with_thousand = await num_served_before_others(gateways, 1000, filled)
    print(f"answers before the last of the others: {with_thousand}, with twenty {with_twenty}")
    assert with_thousand <= with_twenty + UNCLAIMED


@pytest.mark.one_in(4, "a thousand beside twenty")
async def test_requests_beyond_the_queue_are_refused_of_the_one_client_alone(
    serving: OpenGateway,
) -> None:
    """Of a thousand requests as many wait as the queue holds; the others are refused, each with a
    time of its own, and twenty clients find room nevertheless.
    """
    clients = Clients()
    async with serving(max_requests=20, max_wait_s=120.0, max_waiting=PORTION) as gateway:
        live = await gateway.fill()

        async def refused(num: int) -> bool:
            return clients.statuses(MANY)[429] == num

        for num_before in range(0, 1000, PORTION):
            clients.ask(gateway, MANY, PORTION)
            await gateway.await_waiting(PORTION)
            await await_until(partial(refused, num_before), f"{num_before} requests to be refused")
        for address in OTHERS:
            clients.ask(gateway, address)
        await await_until(partial(refused, 920), "room for the others")
        times_s = [each.retry_s or 0 for each in clients.answered]
        assert gateway.client.requests.num_waiting == PORTION
        await asyncio.gather(*(gateway.client.requests.abort(request) for request in live))
        await asyncio.gather(*clients.asking)
    assert clients.statuses(MANY) == {429: 920, 200: 80}
    assert all(clients.statuses(address) == {200: 1} for address in OTHERS)
    assert 1 <= times_s[0] < times_s[-1] == max(times_s) <= 60


async def test_client_that_disconnects_while_it_waits_leaves_the_queue(
    serving: OpenGateway,
) -> None:
    async with serving(max_requests=2) as gateway, gateway.http() as http:
        live = await gateway.fill()
        waiting = asyncio.create_task(http.post("/v1/chat/completions", json=SHORT))
        left = asyncio.create_task(http.post("/v1/chat/completions", json=SHORT))
        await gateway.await_waiting(2)
        left.cancel()
        await gateway.await_waiting(1)
        await gateway.client.requests.abort(live[0])
        assert (await waiting).status_code == 200
        await gateway.client.requests.abort(live[1])


async def test_stream_begins_once_it_is_admitted(serving: OpenGateway) -> None:
    async with serving(max_requests=1) as gateway, gateway.http() as http:
        live = await gateway.fill()
        asking = asyncio.create_task(
            http.post("/v1/chat/completions", json={**SHORT, "stream": True})
        )
        await gateway.await_waiting(1)
        await gateway.client.requests.abort(live[0])
        answer = await asking
        assert answer.status_code == 200 and answer.text.rstrip().endswith("[DONE]")


async def test_request_with_audio_waits_before_it_is_decoded(
    serving: OpenGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[bool] = []
    decode_parts = audio_preparation.decode_parts

    def record(*args: Any, **options: Any) -> object:
        decoded.append(True)
        return decode_parts(*args, **options)

    monkeypatch.setattr(audio_preparation, "decode_parts", record)
    sound = (np.sin(np.arange(16_000) / 10) / 2).astype(np.float32)
    data = base64.b64encode(wav(sound, 16_000)).decode()
    content = [{"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}]
    body = {**SHORT, "messages": [{"role": "user", "content": content}]}
    async with serving(max_requests=1) as gateway, gateway.http() as http:
        live = await gateway.fill()
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=body))
        await gateway.await_waiting(1)
        assert not decoded
        await gateway.client.requests.abort(live[0])
        answer = await asking
        assert answer.status_code == 200 and decoded, answer.text


async def test_full_queue_is_answered_with_a_time_to_retry(serving: OpenGateway) -> None:
    async with serving(max_requests=1, max_waiting=1) as gateway, gateway.http() as http:
        live = await gateway.fill()
        waiting = asyncio.create_task(http.post("/v1/chat/completions", json=SHORT))
        await gateway.await_waiting(1)
        refused = await http.post("/v1/chat/completions", json=SHORT)
        assert refused.status_code == 429
        seconds = refused.headers["retry-after"]
        assert 1 <= int(seconds) <= 60
        assert f"try again in {seconds} s" in refused.json()["error"]["message"]
        await gateway.client.requests.abort(live[0])
        assert (await waiting).status_code == 200


async def test_no_wait_is_refused_at_once(serving: OpenGateway) -> None:
    async with serving(max_requests=1, max_wait_s=0.0) as gateway, gateway.http() as http:
        live = await gateway.fill()
        refused = await http.post("/v1/chat/completions", json=SHORT)
        assert refused.status_code == 429 and gateway.client.requests.num_waiting == 0
        await gateway.client.requests.abort(live[0])


async def test_turn_of_a_conversation_waits(serving: OpenGateway) -> None:
    """A response of a voice session waits too, before the other requests of its client."""
    async with serving(max_requests=1) as gateway, gateway.http() as http:
        live = await gateway.fill()
        other = asyncio.create_task(http.post("/v1/chat/completions", json=SHORT))
        await gateway.await_waiting(1)
        async with connect(gateway.url.replace("http", "ws") + "/v1/realtime") as opened:
            client = SocketClient(opened)
            await client.ask("hello", output_modalities=["text"], max_output_tokens=5)
            await gateway.await_waiting(2)
            await gateway.client.requests.abort(live[0])
            done = (await client.until("response.done"))["response"]
        assert done["status"] in ("completed", "incomplete"), done
        assert (await other).status_code == 200


@pytest.mark.parametrize(("proxies", "named"), [(("127.0.0.1",), "203.0.113.7"), ((), "127.0.0.1")])
async def test_client_is_the_address_that_a_trusted_proxy_names(
    serving: OpenGateway, proxies: tuple[str, ...], named: str
) -> None:
    async with (
        serving(max_requests=1, trusted_proxies=proxies) as gateway,
        gateway.http() as http,
    ):
        live = await gateway.fill()
        headers = {"x-forwarded-for": "203.0.113.7"}
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=SHORT, headers=headers))
        await gateway.await_waiting(1)

        async def listed() -> bool:
            waiting = await gateway.client.telemetry.waiting_clients()
            return [(each.client, each.num_waiting) for each in waiting] == [(named, 1)]

        await await_until(listed, "the waiting client to be listed")
        page = await http.get("/queues")
        assert named in page.text and "Waiting for a place" in page.text
        await gateway.client.requests.abort(live[0])
        assert (await asking).status_code == 200


def test_addresses_have_the_weights_of_their_networks() -> None:
    limits = Limits(share_weights={"10.0.0.0/8": 2.0, "10.1.0.0/16": 4.0, "2001:db8::/32": 3.0})
    shares = FairShares(limits)
    assert shares.client_at("10.1.2.3") == ClientShare("10.1.2.3", 4.0)
    assert shares.client_at("10.2.2.3") == ClientShare("10.2.2.3", 2.0)
    assert shares.client_at("192.0.2.1").key == "192.0.2.1"
    assert shares.client_at("2001:db8:1:2::/64").key == "2001:db8:1:2::/64*3"
    assert shares.client_at("an unknown address").weight == 1


def test_key_of_the_file_is_one_client_at_all_addresses() -> None:
    shares, caller = FairShares(Limits()), ApiCaller(name="phone", limits=KeyLimits(max_requests=1))
    asked = [shares.applicant(address, caller) for address in ("10.0.0.1", "10.0.0.2")]
    assert {(each.client.key, each.key, each.limits) for each in asked} == {
        ("key:phone", "phone", caller.limits)
    }
    in_session = shares.applicant("10.0.0.1", caller.in_session())
    assert (in_session.client.key, in_session.key) == ("key:phone", "")
    own = shares.applicant("10.0.0.1", ApiCaller(name=ENVIRONMENT))
    assert (own.client.key, own.key) == ("10.0.0.1", ENVIRONMENT)


def test_unfair_queue_knows_one_client() -> None:
    shares = FairShares(Limits(fair_shares=False))
    assert shares.client_at("10.0.0.1") == shares.client_at("10.0.0.2")
