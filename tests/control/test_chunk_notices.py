"""A chunk is written once: the consumer's inbox only names a large chunk, which the consumer reads
from the edge's log.
"""

import re
from collections.abc import AsyncIterator, Iterator, Sequence

import msgspec
import pytest
import redis

from fleet.config import load_config
from fleet.control import client as gateway_client
from fleet.control import keys, scripts
from fleet.control.client import FleetClient
from fleet.control.connect import connect, first_text, run, text, texts
from fleet.control.notices import ChunkNotice, CreditNotice, Notice, RelocationNotice
from fleet.control.stream import ClientStream
from fleet.core.chunk import WIRE_VERSION, Chunk, Location, WireTensor, encode_chunk
from fleet.core.errors import FleetError
from fleet.core.ids import EdgeName, Epoch, RequestId, RoleName, StageName, WorkerId
from fleet.core.request import RequestSpec
from fleet.worker.process.redis_link import TRIM_AFTER, RedisLink
from tests.control_plane import (
    REQUEST,
    TEXT,
    WORKER,
    Control,
    appended,
    commands_run,
    join,
    place,
)
from tests.harness import gateway_at
from tests.support import stream_entries

PRODUCER, CONSUMER, EDGE = StageName("lm"), StageName("voice"), EdgeName("codes")
WORKERS = {PRODUCER: WorkerId("lm@test:1:a"), CONSUMER: WorkerId("voice@test:1:b")}
GATEWAY = WorkerId("gateway@test:1:c")
SMALL, LARGE = 16, 48_000


class Pair:
    """Two workers, and requests with one edge from the first worker to the second. The test writes
    and reads for both workers.
    """

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        control = Control(client)
        for worker, role in ((GATEWAY, ""), *((w, stage) for stage, w in WORKERS.items())):
            control.register(worker, role)
        self.epochs: dict[RequestId, Epoch] = {}

    def open(self, *requests: str) -> list[RequestId]:
        """Submit requests whose tasks the two workers own."""
        opened = [RequestId(request) for request in requests]
        for request in opened:
            spec = RequestSpec(id=request, graph="pair", prompt_ids=())
            call = scripts.submit(
                spec, None, bound=9, stages=tuple(WORKERS), edges=(EDGE,), gateway=GATEWAY
            )
            assert texts(run(self.client, call))[0] == "ok"
            for stage, worker in WORKERS.items():
                epoch = self.epoch(request, stage)
                claim = scripts.claim(worker, RoleName(stage), "0-1", request, stage, epoch)
                assert first_text(run(self.client, claim)) == "ok"
            self.epochs[request] = self.epoch(request, PRODUCER)
        return opened

    def epoch(self, request: RequestId, stage: StageName) -> Epoch:
        return Control(self.client).epoch(stage, request)

    def append(
        self, *chunks: tuple[RequestId, int, int], location: Location | None = None
    ) -> list[str]:
        """Append chunks, given as (request, index, number of bytes), in one call."""
        items = [
            appended(
                chunk_of(request, index, size, self.epochs[request]),
                stage=PRODUCER,
                consumer=CONSUMER,
                location=location,
            )
            for request, index, size in chunks
        ]
        return texts(run(self.client, scripts.append(items)))

    def inbox_bytes(self, worker: WorkerId) -> int:
        return sum(len(value) for _, fields in self.entries(worker) for value in fields.values())

    def entries(self, worker: WorkerId) -> list[tuple[bytes, dict[bytes, bytes]]]:
        return stream_entries(self.client, keys.inbox(worker))


def chunk_of(request: RequestId, index: int, size: int, epoch: Epoch) -> Chunk:
    data = bytes([index]) * size
    return Chunk(
        request=request,
        edge=EDGE,
        index=index,
        epoch=epoch,
        tensors={"data": WireTensor("uint8", (size,), data)},
    )


@pytest.fixture
def pair(client: redis.Redis) -> Pair:
    return Pair(client)


@pytest.fixture
def link(redis_url: str) -> Iterator[RedisLink]:
    with connect(redis_url, one_connection=True) as client:
        yield RedisLink(client, WORKERS[CONSUMER], RoleName(CONSUMER))


def received(link: RedisLink) -> list[Notice]:
    return link.exchange((), free_slots=0, block_ms=0).notices


def named(notices: Sequence[Notice]) -> list[tuple[RequestId, int, int]]:
    """Return (request, index, number of bytes) of each announced chunk, in the order of arrival."""
    found = [notice.chunk for notice in notices if isinstance(notice, ChunkNotice)]
    for chunk in found:
        assert chunk.tensors["data"].data == bytes([chunk.index]) * chunk.num_rows
    return [(chunk.request, chunk.index, chunk.num_rows) for chunk in found]


def test_large_chunk_is_in_the_log_only_and_is_received(pair: Pair, link: RedisLink) -> None:
    (request,) = pair.open("r")
    pair.append((request, 0, LARGE))
    assert pair.inbox_bytes(WORKERS[CONSUMER]) < 100
    assert named(received(link)) == [(request, 0, LARGE)]


def test_small_chunk_is_received_without_a_read_of_its_log(pair: Pair, link: RedisLink) -> None:
    (request,) = pair.open("r")
    pair.append((request, 0, SMALL))
    pair.client.config_resetstat()
    assert named(received(link)) == [(request, 0, SMALL)]
    assert "xrange" not in commands_run(pair.client)


def test_chunks_of_one_call_are_one_entry_of_the_inbox_and_one_read_per_log(
    pair: Pair, link: RedisLink
) -> None:
    one, other = pair.open("one", "other")
    chunks = [
        (one, 0, LARGE),
        (other, 0, SMALL),
        (one, 1, LARGE),
        (other, 1, LARGE),
        (one, 2, LARGE),
    ]
    pair.append(*chunks)
    assert len(pair.entries(WORKERS[CONSUMER])) == 1
    pair.client.config_resetstat()
    assert sorted(named(received(link))) == sorted(chunks)
    assert commands_run(pair.client)["xrange"] == 2


def test_call_with_very_many_chunks_loses_none(pair: Pair, link: RedisLink) -> None:
    (request,) = pair.open("r")
    chunks = [(request, index, SMALL) for index in range(250)]
    pair.append(*chunks, location=place(WORKERS[PRODUCER]))
    notices = received(link)
    assert named(notices) == chunks
    assert all(
        notice.location == place(WORKERS[PRODUCER])
        for notice in notices
        if isinstance(notice, ChunkNotice)
    )


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_relocation_after_a_chunk_is_received_after_it(
    pair: Pair, link: RedisLink, size: int
) -> None:
    (request,) = pair.open("r")
    pair.append((request, 0, size), location=place(WORKERS[PRODUCER]))
    moved = scripts.Relocation(
        request=request,
        stage=PRODUCER,
        epoch=pair.epochs[request],
        edge=EDGE,
        consumer=CONSUMER,
        index=0,
        location=place(WORKERS[CONSUMER]),
    )
    assert text(run(pair.client, scripts.relocate(moved))) == "ok"
    pair.append((request, 1, size))
    notices = received(link)
    places = [
        (notice.chunk.index if isinstance(notice, ChunkNotice) else notice.index, notice.location)
        for notice in notices
        if isinstance(notice, ChunkNotice | RelocationNotice)
    ]
    at_first = places.index((0, place(WORKERS[PRODUCER])))
    assert (0, place(WORKERS[CONSUMER])) in places[at_first:] and (1, {}) in places


def test_chunk_lost_between_notice_and_read_arrives_once_it_is_appended_again(
    pair: Pair, link: RedisLink
) -> None:
    (request,) = pair.open("r")
    pair.append((request, 0, LARGE), (request, 1, LARGE))
    pair.client.xdel(keys.edge(request, EDGE), "2-0")
    assert named(received(link)) == [(request, 0, LARGE)]
    pair.client.delete(keys.edge(request, EDGE))
    pair.client.hset(keys.task(request, PRODUCER), f"produced:{EDGE}", 0)
    assert received(link) == []
    pair.append((request, 0, LARGE), (request, 1, LARGE))
    assert named(received(link)) == [(request, 0, LARGE), (request, 1, LARGE)]


def test_acknowledgements_of_one_call_are_one_entry_of_the_producers_inbox(
    pair: Pair, redis_url: str
) -> None:
    one, other = pair.open("one", "other")
    acks = [
        scripts.Ack(
            request=request,
            stage=CONSUMER,
            epoch=pair.epoch(request, CONSUMER),
            edge=EDGE,
            consumed=consumed,
            producer=PRODUCER,
            closed=consumed == 1,
        )
        for request, consumed in ((one, 3), (other, 1))
    ]
    assert texts(run(pair.client, scripts.ack(acks))) == ["ok", "ok"]
    assert len(pair.entries(WORKERS[PRODUCER])) == 1
    with connect(redis_url, one_connection=True) as client:
        first, second = received(RedisLink(client, WORKERS[PRODUCER], RoleName(PRODUCER)))
    assert first == CreditNotice(request=one, edge=EDGE, consumed=3)
    assert isinstance(second, CreditNotice) and second.request == other and second.consumed > 10**9


def test_inbox_is_trimmed_after_many_entries_or_when_the_worker_is_idle(
    pair: Pair, link: RedisLink
) -> None:
    (request,) = pair.open("r")
    for index in range(TRIM_AFTER):
        pair.append((request, index, SMALL))
        assert named(received(link)) == [(request, index, SMALL)]
    assert len(pair.entries(WORKERS[CONSUMER])) == TRIM_AFTER
    pair.append((request, TRIM_AFTER, SMALL))
    assert named(received(link)) == [(request, TRIM_AFTER, SMALL)]
    assert len(pair.entries(WORKERS[CONSUMER])) == 1
    assert received(link) == received(link) == []
    assert pair.entries(WORKERS[CONSUMER]) == []


def test_every_common_definition_is_used_and_scripts_have_only_those_they_use() -> None:
    sources = {name: scripts.source(name) for name in scripts.SCRIPTS}
    assert (
        "local function close(" in sources["abort"]
        and "local function close(" not in sources["relocate"]
    )
    for script, lua in sources.items():
        defined = [
            line.split("local function ")[1].split("(")[0]
            for line in lua.splitlines()
            if "local function " in line
        ]
        unused = [name for name in defined if len(re.findall(rf"\b{name}\b", lua)) < 2]
        assert not unused, f"{script}: {unused}"


@pytest.fixture
async def gateway(
    redis_url: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[FleetClient]:
    """A gateway that looks for lost notices only once an hour. The test acts as the worker of its
    requests.
    """
    monkeypatch.setattr(gateway_client, "SLOW_POLL_S", 3600.0)
    assert join(client, WORKER) == ["ok"]
    async with gateway_at(
        redis_url, load_config(None, ("engine=fake", "device=cpu", "graph=text"))
    ) as gateway:
        yield gateway


async def opened(gateway: FleetClient, client: redis.Redis) -> tuple[ClientStream, Epoch]:
    """Submit a request; return its answer stream, and the epoch at which the test owns the task."""
    spec = RequestSpec(id=REQUEST, graph="text", prompt_ids=(1,), outputs=(TEXT,))
    stream = await gateway.requests.submit(spec, None)
    return stream, Control(client).lead().own()


def append_text(client: redis.Redis, epoch: Epoch, *chunks: tuple[int, int]) -> None:
    """Append chunks, given as (index, number of bytes), in one call."""
    items = [
        appended(
            msgspec.structs.replace(
                chunk_of(REQUEST, index, size, epoch), edge=TEXT, first_row=index * size
            )
        )
        for index, size in chunks
    ]
    assert set(texts(run(client, scripts.append(items)))) == {"ok"}


async def test_gateway_receives_large_and_small_chunks_of_one_call(
    gateway: FleetClient, client: redis.Redis
) -> None:
    stream, epoch = await opened(gateway, client)
    append_text(client, epoch, (0, LARGE), (1, LARGE), (2, LARGE))
    assert [(await anext(stream)).num_rows for _ in range(3)] == [LARGE] * 3
    entries = stream_entries(client, keys.inbox(gateway.id))
    assert sum(len(value) for _, fields in entries for value in fields.values()) < 300


async def test_gateway_receives_the_chunks_before_the_end_of_a_failed_request(
    gateway: FleetClient, client: redis.Redis
) -> None:
    stream, epoch = await opened(gateway, client)
    append_text(client, epoch, (0, LARGE))
    Control(client).fail("it broke", epoch)
    assert (await anext(stream)).num_rows == LARGE
    with pytest.raises(FleetError, match="it broke"):
        await anext(stream)


async def test_gateway_waits_for_a_chunk_lost_between_notice_and_read(
    gateway: FleetClient, client: redis.Redis
) -> None:
    """Redis loses the end of a log after the gateway received the notice of a chunk: the gateway
    waits, and reads the chunk once the worker has appended it again.
    """
    stream, epoch = await opened(gateway, client)
    client.xadd(keys.inbox(gateway.id), {"k": "n", "p0": f"{REQUEST}|{TEXT}|0"})
    append_text(client, epoch, (0, LARGE))
    assert (await anext(stream)).index == 0


async def test_unreadable_chunk_does_not_delay_others_of_its_entry(
    gateway: FleetClient, client: redis.Redis
) -> None:
    stream, epoch = await opened(gateway, client)
    unreadable = encode_chunk(
        msgspec.structs.replace(chunk_of(REQUEST, 5, 1, epoch), version=WIRE_VERSION + 1)
    )
    readable = encode_chunk(msgspec.structs.replace(chunk_of(REQUEST, 0, 1, epoch), edge=TEXT))
    client.xadd(keys.inbox(gateway.id), {"k": "n", "h0": unreadable, "h2": readable})
    assert (await anext(stream)).index == 0
