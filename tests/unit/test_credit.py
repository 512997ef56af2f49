"""Credit of an edge, and what it depends on: chunks and bytes that are not acknowledged, inputs
that an engine has read, tensors that are published already, and room in a reader's arena.
"""

from collections.abc import Sequence

import numpy as np
import pytest

from fleet.config import load_config
from fleet.config.credits import Credits
from fleet.control.client_edge import ClientEdge
from fleet.control.scripts import Append, Relocation
from fleet.core.chunk import Chunk, TensorRef, WireTensor
from fleet.core.errors import ArenaFull, TransferError
from fleet.core.ids import EdgeName, Epoch, RequestId, StageName, Walk, WorkerId
from fleet.core.request import RequestSpec, Sampling
from fleet.engine.base import Engine, EngineInput, EngineOutput, EngineRequest
from fleet.engine.fake import FakeEngine
from fleet.engine.unread import UnreadPieces
from fleet.graphs import DEFAULT_GRAPH, EACH, get_graph
from fleet.stages.base import NO_OUTPUT, EdgeItem, LoggedOutput, TaskAdapter
from fleet.transfer.arena import Arena
from fleet.transfer.inline import InlineTransfer
from fleet.worker.task.credit import EdgeCredit
from fleet.worker.task.inbound import Reading
from fleet.worker.task.outbound import EdgeLog, OutboundEdge
from fleet.worker.task.sender import Sender
from fleet.worker.task.task import Task

GRAPH = get_graph(DEFAULT_GRAPH)
CODES, AUDIO, THOUGHT = EdgeName("codes"), EdgeName("audio"), EdgeName("thought")
REQUEST, DECODE = RequestId("one"), Walk("decode")


@pytest.mark.parametrize(
    ("credits", "sizes", "acked", "enough"),
    [
        (Credits(chunks=4), [1] * 4, 0, 2),
        (Credits(chunks=1), [9], 0, 1),
        (Credits(num_bytes=10), [4, 4, 4], 0, 2),
        (Credits(num_bytes=10), [50], 0, 1),
        (Credits(chunks=2, num_bytes=100), [1, 1, 1], 1, 2),
        (Credits(chunks=100, num_bytes=8), [2, 2, 2, 2], 0, 2),
    ],
)
def test_used_up_credit_returns_when_half_is_free(
    credits: Credits, sizes: Sequence[int], acked: int, enough: int
) -> None:
    credit = EdgeCredit(credits, sizes, acked)
    assert credit.is_used_up() and credit.enough() == enough > acked
    credit.acknowledge(enough)
    assert not credit.is_used_up()


@pytest.mark.parametrize("acked", [0, 3, 7, 2**60])
def test_unbounded_credit_is_never_used_up(acked: int) -> None:
    credit = EdgeCredit(Credits(), [10_000] * 5, acked)
    assert not credit.is_used_up()


def test_consumer_acknowledges_before_half_of_any_credit_is_unread() -> None:
    """What a consumer may have read and not acknowledged is less than half of the credit, or a
    parked producer would wait for good.
    """
    for chunks in range(1, 600):
        assert Credits(chunks=chunks).ack_stride - 1 <= chunks // 2
    for num_bytes in (1, 2, 3, 7, 1000, 4 * 1024 * 1024):
        stride = Credits(num_bytes=num_bytes).ack_stride_bytes
        assert stride is not None and stride <= num_bytes // 2


def test_client_edges_are_bounded_in_bytes_and_others_in_chunks() -> None:
    config = load_config(None, ("limits.max_unread_bytes=1000", "edges.text.credits=9"))
    graph = get_graph(DEFAULT_GRAPH)
    of = {edge.name: config.credits_of(edge) for edge in graph.answer_edges}
    assert of[EdgeName("audio")] == Credits(num_bytes=1000)
    assert of[EdgeName("text")] == Credits(chunks=9, num_bytes=1000)
    assert of[EdgeName("codes")] == Credits(chunks=64)


def test_edge_with_its_last_chunk_in_the_log_needs_no_credit() -> None:
    edge = get_graph(DEFAULT_GRAPH).edge(EdgeName("codes"))
    log = EdgeLog(rows=[], final=True)
    ended = OutboundEdge(edge, EACH, Credits(chunks=1), writes_markers=True, logged=log)
    ended.credit.add_chunk(1)
    assert ended.has_credit()


def chunk_of(index: int, num_samples: int, *, final: bool = False) -> Chunk:
    pcm = WireTensor(dtype="int16", shape=(num_samples,), data=bytes(2 * num_samples))
    first_row = index * num_samples
    return Chunk(
        request=REQUEST,
        edge=AUDIO,
        index=index,
        epoch=Epoch(1),
        tensors={"pcm": pcm},
        first_row=first_row,
        final=final,
    )


def test_client_edge_acknowledges_a_quarter_of_its_bytes_at_the_latest() -> None:
    edge = ClientEdge(AUDIO, StageName("code2wav"), Credits(num_bytes=4000))
    due: list[bool] = []
    for index in range(6):
        edge.consume(chunk_of(index, 200))
        due.append(edge.is_ack_due())
        if due[-1]:
            edge.acked = edge.begin_ack()
    assert due == [False, False, True] * 2
    edge.consume(chunk_of(6, 200, final=True))
    assert edge.is_ack_due()


def test_pieces_are_unread_until_their_last_row_is_read() -> None:
    pieces = UnreadPieces()
    for num_rows in (3, 0, 2):
        pieces.add(num_rows)
    assert [pieces.count(waiting) for waiting in (5, 3, 2, 1, 0)] == [3, 3, 1, 1, 0]


def test_chunks_are_read_once_all_their_pieces_are() -> None:
    reading = Reading()
    reading.add(CODES, 1, 2)
    reading.add(CODES, 2, 0)
    reading.add(AUDIO, 1, 1)
    reading.follow(2)
    assert not reading.chunks
    reading.follow(1)
    assert reading.chunks == {CODES: 2}
    reading.follow(0)
    assert reading.chunks == {CODES: 2, AUDIO: 1}


@pytest.mark.parametrize("is_codec", [False, True])
def test_paused_engine_reads_nothing(is_codec: bool) -> None:
    engine: Engine = FakeEngine(max_batch=2, autoregressive=not is_codec)
    engine.submit(EngineRequest(request_id=REQUEST, sampling=Sampling(max_tokens=9)))
    rows = np.arange(2, dtype=np.int32)
    for _ in range(3):
        engine.feed(REQUEST, EngineInput(walk=DECODE, arrays={"ids": rows}))
    engine.pause(REQUEST, paused=True)
    engine.step()
    assert engine.num_unread(REQUEST) == 3
    engine.pause(REQUEST, paused=False)
    engine.step()
    assert engine.num_unread(REQUEST) == (0 if is_codec else 3)
    engine.step()
    assert engine.num_unread(REQUEST) == (0 if is_codec else 2)
    assert engine.num_unread(RequestId("unknown")) == 0


# Tensors


class CountingTransfer(InlineTransfer):
    """A transfer that publishes into no memory, and counts what it publishes."""

    def __init__(self) -> None:
        super().__init__(WorkerId("w"), 1 << 20, 1 << 20)
        self.num_published = 0

    def publish(
        self, request: RequestId, dtype: str, shape: tuple[int, ...], data: bytes | memoryview
    ) -> WireTensor:
        self.num_published += 1
        ref = TensorRef(WorkerId("w"), 0, len(data), 0, self.num_published, 0, 0)
        return WireTensor(dtype=dtype, shape=shape, ref=ref)


class NoAdapter(TaskAdapter):
    """Adapter of a task that a test drives by its edges alone."""

    def open(self, logged: LoggedOutput = NO_OUTPUT) -> tuple[EngineRequest, Sequence[EngineInput]]:
        raise AssertionError("no engine opens this task")

    def produce(self, output: EngineOutput) -> Sequence[EdgeItem]:
        raise AssertionError("no engine computes this task")


def thinker_task(epoch: int, log: EdgeLog) -> tuple[Task, OutboundEdge]:
    edge = OutboundEdge(
        GRAPH.edge(THOUGHT), EACH, Credits(chunks=64), writes_markers=True, logged=log
    )
    spec = RequestSpec(id=REQUEST, graph=GRAPH.name, prompt_ids=(1,), outputs=(AUDIO,))
    task = Task(
        spec=spec,
        stage=edge.edge.source,
        epoch=Epoch(epoch),
        adapter=NoAdapter(),
        inbound={},
        outbound={THOUGHT: edge},
        producers={},
        strides={},
    )
    rows = np.ones((4, 512), np.float32)
    positions = np.arange(4, dtype=np.int32)
    arrays = {"ids": positions, "rows": rows, "row_positions": positions}
    item = EdgeItem(edge=THOUGHT, walk=Walk("prefill"), arrays=arrays)
    task.unsent += [(edge, draft) for draft in edge.offer(item)]
    return task, edge


@pytest.mark.parametrize(("appended_at", "num_published"), [(1, 1), (5, 2)])
def test_tensors_that_this_worker_appended_are_not_published_again(
    appended_at: int, num_published: int
) -> None:
    """A task that returns to a worker publishes its logged tensors again only if another owner
    appended them.
    """
    transfer = CountingTransfer()
    sender = Sender(transfer, WorkerId("w"))
    appends, relocations = list[Append](), list[Relocation]()
    first, _ = thinker_task(1, EdgeLog())
    sender.collect(first, appends, relocations)
    assert len(appends) == transfer.num_published == 1 and not relocations

    log = EdgeLog(rows=[4], walks=[Walk("prefill")], remote={0: Epoch(appended_at)})
    again, _ = thinker_task(7, log)
    sender.collect(again, appends, relocations)
    assert len(appends) == 1 and transfer.num_published == num_published
    (relocation,) = relocations
    assert (relocation.location == appends[0].location) is (num_published == 1)


def test_arena_without_room_at_present_differs_from_one_that_is_too_small() -> None:
    arena = Arena(capacity_bytes=1024, request_cap_bytes=1024)
    slot = arena.allocate(640)
    with pytest.raises(ArenaFull):
        arena.allocate(640)
    with pytest.raises(TransferError) as refusal:
        arena.allocate(4096)
    assert not isinstance(refusal.value, ArenaFull)
    arena.free(slot)
    assert arena.allocate(640)
