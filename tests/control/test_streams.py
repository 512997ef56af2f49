"""Edges without processes: chunks are identified by index, the first copy of a chunk counts, and no
chunk spans two walks.
"""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.config.credits import Credits
from fleet.core.chunk import Chunk
from fleet.core.ids import EdgeName, Epoch, RequestId, StageName, Walk
from fleet.graphs import ALL, EACH, ChunkPolicy, Edge, Transition
from fleet.stages.base import EdgeItem
from fleet.worker.task.inbound import InboundEdge
from fleet.worker.task.outbound import Draft, EdgeLog, OutboundEdge

PREFILL, LAST, DECODE = Walk("prefill"), Walk("last_prefill"), Walk("decode")
EDGE = Edge(
    name=EdgeName("thought"),
    source=StageName("a"),
    target=StageName("b"),
    transitions=(
        Transition(producer_walk=PREFILL, nth=0, to=PREFILL),
        Transition(producer_walk=DECODE, nth=0, to=LAST),
        Transition(producer_walk=DECODE, nth=1, to=DECODE),
    ),
)
POLICIES = st.one_of(
    st.just(EACH),
    st.just(ALL),
    st.lists(st.integers(1, 9), min_size=1, max_size=4).map(
        lambda ramp: ChunkPolicy(kind="ramp", ramp=tuple(ramp))
    ),
)


def expected_walk(position: int, num_prefill: int) -> Walk:
    return PREFILL if position < num_prefill else LAST if position == num_prefill else DECODE


def chunks_of(
    policy: ChunkPolicy, num_prefill: int, num_decode: int, *, marks: bool = True
) -> list[Draft]:
    edge = OutboundEdge(EDGE, policy, Credits(chunks=64), writes_markers=marks)
    drafts: list[Draft] = []
    for position in range(num_prefill + num_decode):
        walk = PREFILL if position < num_prefill else DECODE
        drafts += edge.offer(
            EdgeItem(edge=EDGE.name, walk=walk, arrays={"ids": np.array([position])})
        )
    drafts += edge.offer(EdgeItem(edge=EDGE.name, walk=DECODE, final=True))
    return drafts


@pytest.mark.parametrize(
    ("step_ms", "sizes"),
    [(5, [2, 4, 8, 16]), (40, [2, 1, 2, 4, 8]), (80, [2, *[1] * 28]), (200, [2, *[1] * 28])],
    ids=["far faster than speech", "twice as fast", "no faster", "slower"],
)
def test_ramped_chunks_grow_with_the_producers_lead(step_ms: int, sizes: list[int]) -> None:
    """Ramped chunks grow with the producer's lead. The listener plays items of 80 ms from the first
    chunk on; no chunk is held back while the buffered audio runs out.
    """
    now_ms = 0
    edge = OutboundEdge(
        replace(EDGE, item_ms=80, transitions=()),
        ChunkPolicy(kind="ramp", ramp=(2, 4, 8, 16), low_buffer_s=0.1),
        Credits(chunks=64),
        writes_markers=True,
        clock=lambda: now_ms / 1000,
    )
    released: list[int] = []
    for position in range(30):
        now_ms += step_ms
        item = EdgeItem(edge=EDGE.name, walk=DECODE, arrays={"ids": np.array([position])})
        released += [draft.num_items for draft in edge.offer(item)]
    assert released == sizes


@pytest.mark.parametrize(("num_answers", "first"), [(1, 2), (2, 4), (3, 6), (50, 6)])
def test_first_chunk_grows_with_load_up_to_a_bound(num_answers: int, first: int) -> None:
    items = [
        EdgeItem(edge=EDGE.name, walk=DECODE, arrays={"ids": np.array([position])})
        for position in range(12)
    ]
    edge = OutboundEdge(
        replace(EDGE, transitions=()),
        ChunkPolicy(kind="ramp", ramp=(2, 4), busy_first_chunk_factor=3),
        Credits(chunks=64),
        writes_markers=True,
    )
    sizes = [draft.num_items for item in items for draft in edge.offer(item, num_answers)]
    assert sizes[:2] == [first, 4]


class Answers:
    """Answers of one worker on an edge with a limit of 1,000 chunks a second; an answer yields one
    token per `step_ms`.
    """

    def __init__(self, num_answers: int) -> None:
        self.now_ms = 0.0
        edge = replace(EDGE, transitions=(), tensors={"ids": "int32"})
        policy = ChunkPolicy(kind="each", max_chunks_per_s=1000)
        self._edges = [
            OutboundEdge(
                edge,
                policy,
                Credits(chunks=512),
                writes_markers=True,
                clock=lambda: self.now_ms / 1000,
            )
            for _ in range(num_answers)
        ]

    def step(self, number: int, step_ms: float, *, final: bool = False) -> list[list[int]]:
        """Let every answer produce a token; return the tokens of each released chunk."""
        self.now_ms += step_ms
        item = EdgeItem(
            edge=EDGE.name, walk=DECODE, arrays={"ids": np.array([number], np.int32)}, final=final
        )
        drafts = [draft for edge in self._edges for draft in edge.offer(item, len(self._edges))]
        return [draft.arrays["ids"].tolist() for draft in drafts]


def test_single_answer_and_slow_steps_release_each_token_alone() -> None:
    alone, slow = Answers(1), Answers(8)
    assert [alone.step(number, 1.1) for number in range(20)] == [[[number]] for number in range(20)]
    assert [slow.step(number, 8.1) for number in range(20)] == [
        [[number]] * 8 for number in range(20)
    ]


def test_tokens_of_many_answers_are_joined_up_to_a_rate_and_released_together() -> None:
    answers = Answers(32)
    released = [answers.step(number, 3.2) for number in range(100)]
    assert released[0] == [[0]] * 32, "the first token of an answer is never delayed"
    assert {len(chunks) for chunks in released} == {0, 32}, "all answers release at the same times"
    assert sum(map(len, released)) <= 1.1 * answers.now_ms + 64
    held = released[-10:]
    assert max(len(chunk) for chunks in held for chunk in chunks) <= 11


def test_end_of_an_answer_releases_tokens_held_for_the_rate() -> None:
    answers = Answers(4)
    tokens = [
        chunks[0] for number in range(6) if (chunks := answers.step(number, 0.5, final=number == 5))
    ]
    assert sum(tokens, []) == list(range(6)) and len(tokens) < 6


def test_recovered_edge_sends_its_first_chunk_early() -> None:
    """After a recovery, logged chunks are not sent again, and the next item is sent immediately,
    since the recovery was a long enough pause.
    """
    now_ms = 0
    timed = replace(EDGE, item_ms=80, transitions=(), tensors={"ids": "int32"})
    edge = OutboundEdge(
        timed,
        ChunkPolicy(kind="ramp", ramp=(2, 4, 8, 16), low_buffer_s=0.1),
        Credits(chunks=64),
        writes_markers=True,
        logged=EdgeLog(rows=[2, 4], walks=[DECODE, DECODE]),
        clock=lambda: now_ms / 1000,
    )
    released: list[tuple[int, int]] = []
    for position in range(40):
        now_ms += 5
        item = EdgeItem(edge=EDGE.name, walk=DECODE, arrays={"ids": np.array([position])})
        released += [(position, draft.num_items) for draft in edge.offer(item)]
    assert released[0] == (6, 1) and released[-1][1] == 16


def to_chunk(draft: Draft) -> Chunk:
    return Chunk(
        request=RequestId("r"),
        edge=EDGE.name,
        index=draft.index,
        epoch=Epoch(1),
        walk=draft.walk,
        producer_walk=draft.producer_walk,
        boundary=draft.boundary,
        final=draft.final,
    )


@given(POLICIES, st.integers(0, 5), st.integers(0, 40))
def test_items_are_sent_once_in_order_without_straddling_a_walk(
    policy: ChunkPolicy, prefill: int, decode: int
) -> None:
    drafts = chunks_of(policy, prefill, decode)
    sent = [int(i) for draft in drafts for i in draft.arrays.get("ids", ())]
    assert sent == list(range(prefill + decode))
    assert [draft.index for draft in drafts] == list(range(len(drafts)))
    assert [draft.final for draft in drafts] == [False] * (len(drafts) - 1) + [True]
    for draft in drafts:
        walks = {expected_walk(int(i), prefill) for i in draft.arrays.get("ids", ())}
        assert len(walks) <= 1


@given(POLICIES, st.integers(0, 4), st.integers(0, 20), st.booleans(), st.randoms())
def test_consumer_receives_each_chunk_once_in_order_in_its_walk(
    policy: ChunkPolicy, prefill: int, decode: int, producer_drives: bool, rng: random.Random
) -> None:
    """The consumer receives each chunk once, in order and in its walk, for any order of arrival,
    with repetitions, and with walks driven by the producer or the conductor.
    """
    drafts = chunks_of(policy, prefill, decode, marks=producer_drives)
    arrivals = [to_chunk(draft) for draft in drafts] * 2
    rng.shuffle(arrivals)
    reports = [(d.index, d.producer_walk, d.ordinal) for d in drafts if d.boundary] * 2
    rng.shuffle(reports)
    edge = InboundEdge(first_walk=PREFILL, wait_for_walk=not producer_drives)
    received: list[tuple[int, Walk]] = []

    def drain() -> None:
        while edge.peek() is not None:
            chunk, _, walk = edge.take()
            received.append((chunk.index, walk))

    for position in range(max(len(arrivals), len(reports))):
        if position < len(arrivals):
            edge.put(arrivals[position], {})
            drain()
        if not producer_drives and position < len(reports):
            index, walk, ordinal = reports[position]
            target = EDGE.consumer_walk(walk, ordinal)
            assert target is not None
            edge.assign_walk(index, target)
            drain()
    assert [index for index, _ in received] == list(range(len(drafts)))
    assert edge.ended
    for draft, (_, walk) in zip(drafts, received, strict=True):
        for item in draft.arrays.get("ids", ()):
            assert walk == expected_walk(int(item), prefill)


def test_conductor_driven_consumer_waits_for_its_walk() -> None:
    edge = InboundEdge(first_walk=PREFILL, wait_for_walk=True)
    for draft in chunks_of(EACH, 1, 1, marks=False):
        edge.put(to_chunk(draft), {})
    assert edge.peek() is None
    edge.assign_walk(0, PREFILL)
    assert edge.take()[2] == PREFILL
    assert edge.peek() is None
    edge.assign_walk(1, LAST)
    assert edge.take()[2] == LAST


def test_final_chunk_before_earlier_chunks_does_not_end_the_edge() -> None:
    edge = InboundEdge(first_walk=PREFILL, wait_for_walk=False)
    first, *_, last = [to_chunk(draft) for draft in chunks_of(EACH, 1, 2)]
    edge.put(last, {})
    edge.put(first, {})
    edge.take()
    assert edge.peek() is None
    assert not edge.ended


def test_credit_is_the_bound_less_unconsumed_chunks() -> None:
    edge = OutboundEdge(EDGE, EACH, Credits(chunks=2), writes_markers=True)
    for position in range(2):
        assert edge.has_credit()
        edge.offer(EdgeItem(edge=EDGE.name, walk=DECODE, arrays={"ids": np.array([position])}))
    assert not edge.has_credit()
    edge.credit.acknowledge(1)
    assert edge.has_credit()
    edge.credit.acknowledge(0)
    assert edge.has_credit()


def test_logged_chunks_are_recomputed_without_credit() -> None:
    """Logged chunks are recomputed without credit: if the consumer is lost too, its successor waits
    for tensors of chunks that count as consumed or under way.
    """
    edge = OutboundEdge(
        replace(EDGE, tensors={"rows": "float32"}, remote=("rows",)),
        EACH,
        Credits(chunks=2),
        writes_markers=True,
        logged=EdgeLog(
            rows=[1, 1, 1],
            walks=[PREFILL, DECODE, DECODE],
            remote={0: Epoch(1), 2: Epoch(1)},
            consumed=1,
        ),
    )
    walks = [PREFILL, DECODE, DECODE]
    for index, walk in enumerate(walks):
        assert edge.has_credit()
        drafts = edge.offer(
            EdgeItem(edge=EDGE.name, walk=walk, arrays={"rows": np.ones((1, 2), np.float32)})
        )
        expected = [] if index == 1 else [(index, True)]
        assert [(draft.index, draft.is_logged) for draft in drafts] == expected, (
            "the log contains the data of chunk 1"
        )
    assert not edge.has_credit()
    edge.credit.acknowledge(2)
    assert edge.has_credit()
