"""The gateway's end of an edge: each row is returned once, even after Redis lost chunks and they
were recomputed in other sizes.
"""

import asyncio
from collections.abc import Sequence
from typing import cast

import fakeredis
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from fleet.config import load_config
from fleet.control import keys
from fleet.control.connect import text
from fleet.control.endings import EndingsOwed
from fleet.control.membership import Membership
from fleet.control.stream import ClientStream
from fleet.core.chunk import Chunk, WireTensor, encode_chunk
from fleet.core.errors import ChunkOrderError, RedisUnreachable
from fleet.core.ids import CLIENT, EdgeName, Epoch, StageName
from tests.harness import fake_spec_of

CONFIG = load_config(None, ("engine=fake", "device=cpu", "graph=text"))
NUM_ROWS = 120


class Log:
    """The log of one edge in Redis, as producers write it and as a Redis restart may leave it, and
    the client stream that follows it.
    """

    def __init__(self, num_rows: int = NUM_ROWS) -> None:
        self.client = cast(
            Redis, fakeredis.FakeAsyncRedis(server=fakeredis.FakeServer(version=(6, 2)))
        )
        self.spec = fake_spec_of(CONFIG)
        endings = EndingsOwed(self.client, Membership(self.client, self.client, CONFIG))
        self.stream = ClientStream(self.spec, None, CONFIG, self.client, endings)
        self.edge: EdgeName = self.spec.outputs[0]
        self.source: StageName = CONFIG.graph_declaration().edge(self.edge).source
        self.rows, self.chunks = np.arange(num_rows, dtype="<i4"), list[Chunk]()
        self.received_rows: list[int] = []
        self.stream.held_by(self.stream.gateway, Epoch(1))

    async def begin(self) -> None:
        await self.client.sadd(keys.LIVE, self.spec.id)
        await self.client.hset(keys.request(self.spec.id), "state", "running")
        await self.client.hset(
            keys.task(self.spec.id, CLIENT), mapping={"epoch": 1, "state": "running"}
        )
        await self.grant()

    async def grant(self) -> None:
        """Grant the task to a new owner, which continues where the log ends."""
        self.epoch = await self.client.hincrby(keys.task(self.spec.id, self.source), "epoch", 1)

    async def append(self, size: int, *, noticed: bool = True) -> None:
        """Append a chunk of the next rows, at most `size`; the chunk with the last row is final."""
        first = sum(chunk.num_rows for chunk in self.chunks)
        part = self.rows[first : first + size]
        chunk = Chunk(
            request=self.spec.id,
            edge=self.edge,
            index=len(self.chunks),
            epoch=Epoch(self.epoch),
            first_row=first,
            tensors={"ids": WireTensor("int32", part.shape, part.tobytes())},
            final=first + size >= len(self.rows),
        )
        if self.ended():
            return
        self.chunks.append(chunk)
        await self.client.xadd(
            keys.edge(self.spec.id, self.edge), {"h": encode_chunk(chunk)}, f"{len(self.chunks)}-0"
        )
        if noticed:
            self.stream.put(chunk)

    def ended(self) -> bool:
        return bool(self.chunks) and self.chunks[-1].final

    async def cut(self, num_kept: int) -> None:
        """Truncate the log to at most `num_kept` chunks, as a Redis restart may, and grant the task
        to a new owner.
        """
        self.chunks = self.chunks[:num_kept]
        await self.client.delete(keys.edge(self.spec.id, self.edge))
        for position, chunk in enumerate(self.chunks):
            await self.client.xadd(
                keys.edge(self.spec.id, self.edge), {"h": encode_chunk(chunk)}, f"{position + 1}-0"
            )
        await self.client.hset(
            keys.task(self.spec.id, CLIENT),
            f"consumed:{self.edge}",
            min(len(self.chunks), num_kept),
        )
        await self.grant()

    async def client_state(self) -> tuple[str, int]:
        """Return the state of the client's task in Redis, and the number of chunks it has
        acknowledged.
        """
        key = keys.task(self.spec.id, CLIENT)
        state, consumed = [
            await self.client.hget(key, field) for field in ("state", f"consumed:{self.edge}")
        ]
        return text(state), int(text(consumed))

    async def receive(self, most: int | None = None) -> bool:
        """Receive at most `most` of the available chunks; return True after the answer's last
        chunk.
        """
        while most is None or most > 0:
            pending = asyncio.ensure_future(anext(self.stream))
            await asyncio.wait([pending], timeout=None if await self._has_more(pending) else 0)
            if not pending.done():
                pending.cancel()
                return False
            try:
                self._record(pending.result())
            except StopAsyncIteration:
                return True
            most = None if most is None else most - 1
        return False

    async def _has_more(self, pending: "asyncio.Future[Chunk]") -> bool:
        """Let the stream run until it has a chunk (return True) or waits for one that is not
        available.
        """
        stream = self.stream
        while not pending.done():
            is_ready = stream._ready or stream._wake.is_set()  # pyright: ignore[reportPrivateUsage]
            if not is_ready and stream._open():  # pyright: ignore[reportPrivateUsage]
                return False
            await asyncio.sleep(0)
        return True

    def _record(self, chunk: Chunk) -> None:
        self.received_rows += [
            int(row) for t in chunk.tensors.values() for row in np.frombuffer(t.data or b"", "<i4")
        ]


SIZES = st.integers(1, 25)
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("append"), SIZES),
        st.tuples(st.just("append unnoticed"), SIZES),
        st.tuples(st.just("receive"), st.integers(1, 3)),
        st.tuples(st.just("cut"), st.integers(0, 8)),
        st.tuples(st.just("grant"), st.just(0)),
        st.tuples(st.just("catch up"), st.just(0)),
    ),
    max_size=25,
)


async def replay_moves(moves: Sequence[tuple[str, int]], last: int) -> Log:
    log = Log()
    await log.begin()
    for move, number in moves:
        if move.startswith("append"):
            await log.append(number, noticed=move == "append")
        elif move == "receive":
            await log.receive(number)
        elif move == "cut":
            await log.cut(number)
        elif move == "grant":
            await log.grant()
        else:
            await log.stream.catch_up()
    while not log.ended():
        await log.append(last, noticed=False)
    for _ in range(2):
        await log.receive()
        await log.stream.catch_up()
    assert await log.receive(), "the answer never ends"
    assert (await log.client_state())[0] == "finished"
    return log


@given(MOVES, SIZES)
def test_client_edge_returns_each_row_once_and_in_order(
    moves: list[tuple[str, int]], last: int
) -> None:
    """A client edge returns every row once and in order, whatever the sequence of appends (with or
    without a notice), truncations, and recomputations with other chunk boundaries.
    """
    log = asyncio.run(replay_moves(moves, last))
    assert log.received_rows == list(range(NUM_ROWS))


@pytest.mark.parametrize("noticed", [True, False])
@pytest.mark.parametrize("recut_size", [1, 7, 25, 120])
@pytest.mark.parametrize(
    ("num_received", "num_kept"),
    [(5, 3), (2, 1)],
    ids=["all chunks received", "some chunks received"],
)
async def test_client_edge_skips_received_rows_in_recut_chunks(
    num_received: int, num_kept: int, recut_size: int, noticed: bool
) -> None:
    log = Log()
    await log.begin()
    for size in (2, 4, 8, 16, 25):
        await log.append(size)
    await log.receive(num_received)
    assert log.received_rows == list(range(sum((2, 4, 8, 16, 25)[:num_received])))
    await log.cut(num_kept)
    while not log.ended():
        await log.append(recut_size, noticed=noticed)
    await log.stream.catch_up()
    assert await log.receive()
    assert log.received_rows == list(range(NUM_ROWS))
    assert await log.client_state() == ("finished", len(log.chunks))


async def test_recomputed_answer_shorter_than_received_rows_fails() -> None:
    log = Log()
    await log.begin()
    await log.append(20)
    await log.append(20)
    await log.receive(2)
    await log.cut(1)
    log.rows = log.rows[:30]
    await log.append(10)
    await log.stream.catch_up()
    with pytest.raises(RedisUnreachable, match="came out shorter; try again"):
        await log.receive()
    assert log.received_rows == list(range(40))


async def test_log_with_a_gap_in_its_rows_fails() -> None:
    log = Log()
    await log.begin()
    await log.append(5, noticed=False)
    log.chunks[0] = msgspec.structs.replace(log.chunks[0], tensors={})
    await log.append(5, noticed=False)
    await log.stream.catch_up()
    with pytest.raises(ChunkOrderError, match="does not follow on itself"):
        await log.receive()
    assert not log.received_rows
