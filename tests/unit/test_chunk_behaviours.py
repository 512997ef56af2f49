"""Behaviours of chunk streaming between stages, without processes. `tests/split_behaviours.md` has
a table of these tests.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from fleet.config import load_config
from fleet.config.credits import Credits
from fleet.core.chunk import Chunk, Location, TensorRef, WireTensor
from fleet.core.errors import ArenaFull, TransferError
from fleet.core.ids import EdgeName, Epoch, RequestId, Walk, WorkerId
from fleet.core.request import RequestSpec, Sampling
from fleet.engine.base import TOKEN, EngineInput, EngineOutput, EngineRequest
from fleet.graphs import ChunkPolicy
from fleet.graphs.qwen3_omni import QWEN3_OMNI, TALKER, THINKER
from fleet.models.qwen3_omni.code2wav import Code2Wav
from fleet.models.qwen3_omni.code2wav_left_context import LeftContextCode2Wav
from fleet.processing.tokenizer import Tokenizer
from fleet.stages.answer_tokens import AnswerTokens
from fleet.stages.base import EdgeItem
from fleet.stages.builders import build_options
from fleet.stages.fake import FakeTask
from fleet.stages.stop_strings import StopDetector
from fleet.telemetry.counts import PullTally
from fleet.transfer.base import Transfer
from fleet.worker.process.redis_link import RedisLink
from fleet.worker.task import receiver as module
from fleet.worker.task.claim import TaskLogs
from fleet.worker.task.inbound import InboundEdge
from fleet.worker.task.outbound import Draft, OutboundEdge
from fleet.worker.task.receiver import Received, Receiver
from fleet.worker.task.task import Task, TaskPhase, open_task
from tests.unit.test_codec_engine import A, drain, make

DECODE = Walk("decode")
TEXT, THOUGHT, CODES = EdgeName("text"), EdgeName("thought"), EdgeName("codes")
ONE, OTHER, PEER = RequestId("one"), RequestId("other"), WorkerId("thinker@there:1:a")


def codes_edge(*ramp: int) -> OutboundEdge:
    policy = ChunkPolicy(kind="ramp", ramp=ramp)
    return OutboundEdge(QWEN3_OMNI.edge(CODES), policy, Credits(chunks=64), writes_markers=True)


def frame(number: int, *, final: bool = False) -> EdgeItem:
    return EdgeItem(
        edge=CODES, walk=DECODE, arrays={"codes": np.full((1, 16), number, np.int32)}, final=final
    )


END = EdgeItem(edge=CODES, walk=DECODE, final=True)


def sizes(drafts: Sequence[Draft]) -> list[tuple[int, bool]]:
    return [(len(draft.arrays.get("codes", ())), draft.final) for draft in drafts]


def release(edge: OutboundEdge, *items: EdgeItem) -> list[Draft]:
    return [draft for item in items for draft in edge.offer(item)]


# Release of codes


def test_24_frames_of_a_chunk_of_25_wait_and_the_25th_releases_them() -> None:
    edge = codes_edge(25)
    assert not release(edge, *map(frame, range(24)))
    assert sizes(release(edge, frame(24))) == [(25, False)]


def test_end_flushes_the_frames_that_wait() -> None:
    edge = codes_edge(25)
    release(edge, *map(frame, range(24)))
    assert sizes(release(edge, END)) == [(24, True)]


def test_item_without_arrays_releases_nothing_and_counts_for_no_chunk() -> None:
    edge = codes_edge(2)
    nothing = EdgeItem(edge=CODES, walk=DECODE)
    assert not release(edge, nothing, nothing, frame(0), nothing)
    assert sizes(release(edge, frame(1))) == [(2, False)]


def test_frame_of_zeros_is_a_frame() -> None:
    """A codec frame of zeros is a frame like any other: nothing is discarded for its value."""
    assert sizes(release(codes_edge(1), frame(0))) == [(1, False)]


def test_tail_shorter_than_a_chunk_is_sent_without_padding() -> None:
    drafts = release(codes_edge(4), *map(frame, range(6)), END)
    assert sizes(drafts) == [(4, False), (2, True)]
    assert np.concatenate([draft.arrays["codes"][:, 0] for draft in drafts]).tolist() == list(
        range(6)
    )


def test_end_on_a_chunk_boundary_is_sent_alone() -> None:
    assert sizes(release(codes_edge(4), *map(frame, range(4)), END)) == [(4, False), (0, True)]


def test_first_chunk_of_4_is_followed_by_chunks_of_25() -> None:
    drafts = release(codes_edge(4, 25), *map(frame, range(60)), END)
    assert sizes(drafts) == [(4, False), (25, False), (25, False), (6, True)]


@dataclass(slots=True)
class RecordingCode2Wav:
    """Decoder that turns a frame into one sample, its first code. Records the frames of each
    call.
    """

    num_codebooks: int = 16
    codebook_size: int = 64
    config: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(samples_per_frame=1))
    passes: list[list[int]] = field(default_factory=list[list[int]])

    def open(self) -> None:
        return None

    def decode(
        self, states: Sequence[None], codes_BTQ: NDArray[np.int32]
    ) -> tuple[list[None], NDArray[np.float32]]:
        self.passes += codes_BTQ[..., 0].tolist()
        return [None] * len(states), codes_BTQ[..., 0].astype(np.float32)


def test_left_context_of_a_tail_is_kept_by_the_consumer_and_trimmed() -> None:
    """The consumer keeps the left context of a tail and trims it: only new frames are sent; the
    stateless decoder decodes a tail of 2 frames with 4 frames before it, the exact decoder without
    them.
    """
    double = RecordingCode2Wav()
    decoder = LeftContextCode2Wav(cast(Code2Wav, double), 4)
    codes_BTQ = np.stack([np.full((1, 16), number, np.int32) for number in range(6)], axis=1)
    states, _ = decoder.decode([decoder.open()], codes_BTQ[:, :4])
    _, wave_BT = decoder.decode(states, codes_BTQ[:, 4:])
    assert double.passes == [[0, 1, 2, 3], [0, 1, 2, 3, 4, 5]] and wave_BT.tolist() == [[4, 5]]


def test_chunk_without_frames_decodes_nothing_until_frames_or_the_end_arrive() -> None:
    engine, decoder = make(A)
    engine.feed(A, EngineInput(walk=DECODE))
    assert not engine.is_ready() and not decoder.passes
    engine.feed(A, EngineInput(walk=DECODE, arrays={"codes": np.ones((2, 1), np.int32)}))
    assert [len(output.arrays["wave"]) for output in drain(engine)] == [2]
    engine.feed(A, EngineInput(walk=DECODE, final=True))
    (end,) = drain(engine)
    assert end.final and not end.arrays


def test_state_of_one_request_ends_without_touching_another() -> None:
    other = RequestId("b")
    engine, _ = make(A, other)
    for request_id in (A, other):
        engine.feed(
            request_id, EngineInput(walk=DECODE, arrays={"codes": np.ones((1, 1), np.int32)})
        )
    for _ in range(2):
        engine.abort(A)
    engine.submit(EngineRequest(request_id=A, sampling=Sampling()))
    assert [output.request_id for output in drain(engine)] == [other], (
        "the new request of that name has no frames yet"
    )


# First tokens


def never_loaded() -> Tokenizer:
    raise AssertionError("without stop strings nothing is detokenized")


@dataclass(slots=True)
class StopAfter:
    """Stop-string detector that finds its string completed at a given token."""

    token: int
    is_met: bool = False

    def add(self, token: int) -> bool:
        self.is_met = token == self.token
        return self.is_met


def answer_tokens(detector: StopDetector | None = None) -> AnswerTokens:
    return AnswerTokens(
        client=TEXT, spoken=THOUGHT, stop_detector=detector or StopDetector((), never_loaded)
    )


def drawn(token: int, *, final: bool = False) -> EngineOutput:
    return EngineOutput(
        request_id=ONE, walk=DECODE, arrays={TOKEN: np.array([token], np.int32)}, final=final
    )


def items_by_edge(
    tokens: AnswerTokens, output: EngineOutput
) -> dict[EdgeName, tuple[list[int], bool]]:
    items = tokens.items(output, output.arrays[TOKEN])
    return {
        item.edge: ([int(token) for token in item.arrays.get("ids", ())], item.final)
        for item in items
    }


def test_token_reaches_client_and_talker_with_the_step_that_drew_it() -> None:
    tokens = answer_tokens()
    for token in (5, 6, 7):
        assert items_by_edge(tokens, drawn(token)) == {
            TEXT: ([token], False),
            THOUGHT: ([token], False),
        }


def test_end_token_is_never_fed_to_the_talker() -> None:
    assert items_by_edge(answer_tokens(), drawn(9, final=True)) == {
        TEXT: ([9], True),
        THOUGHT: ([], True),
    }


def test_token_that_completes_a_stop_string_is_never_fed_to_the_talker() -> None:
    tokens = answer_tokens(cast(StopDetector, StopAfter(6)))
    assert items_by_edge(tokens, drawn(5)) == {TEXT: ([5], False), THOUGHT: ([5], False)}
    assert items_by_edge(tokens, drawn(6)) == {TEXT: ([6], True), THOUGHT: ([], True)}


# Arrival of chunks: reads of remote tensors


REF = TensorRef(
    agent=PEER, address=0, length_bytes=8, device_id=0, generation=1, checksum=0, slot=0
)


@dataclass(slots=True)
class PullDouble:
    data: bytes | None = None
    error: TransferError | None = None
    cancelled: bool = False

    def poll(self) -> bytes | None:
        if self.error is not None:
            raise self.error
        return self.data

    def cancel(self) -> None:
        self.cancelled = True


@dataclass(slots=True)
class TransferDouble:
    """Transfer double: a read returns a pull whose outcome the test sets. `failing`: whether every
    new pull fails; `full`: whether no new pull finds room. `max_pulls`: number of pulls after which
    the transfer refuses further ones.
    """

    pulls: list[PullDouble] = field(default_factory=list[PullDouble])
    failing: bool = False
    max_pulls: int = 1000
    full: bool = False

    def pull(self, ref: TensorRef, peer_metadata: bytes, deadline_s: float) -> PullDouble:
        if self.full or len(self.pulls) >= self.max_pulls:
            raise ArenaFull("the arena has no room")
        error = TransferError("the read timed out") if self.failing else None
        self.pulls.append(PullDouble(error=error))
        return self.pulls[-1]

    def forget_peer(self, worker: WorkerId) -> None:
        """Do nothing, since the double holds no connection."""


@dataclass(slots=True)
class LinkDouble:
    """Double of the worker's Redis link. `listed`: whether the peer is a listed worker."""

    listed: bool = True

    def read_peer_metadata(self, worker: WorkerId) -> bytes | None:
        return b"metadata" if self.listed else None


@dataclass(slots=True)
class Arrivals:
    """A receiver of chunks, its doubles, and a clock that the test sets."""

    transfer: TransferDouble
    link: LinkDouble
    receiver: Receiver
    now_s: float = 100.0

    def advance(self, task: Task) -> list[Received]:
        return list(self.receiver.advance(task))


DEADLINE_S = 5.0


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> Arrivals:
    transfer, link = TransferDouble(), LinkDouble()
    receiver = Receiver(cast(Transfer, transfer), cast(RedisLink, link), DEADLINE_S, PullTally())
    opened = Arrivals(transfer, link, receiver)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: opened.now_s))
    return opened


def open_talker(
    request: RequestId, *, remote: bool = True, names: Sequence[str] = ("rows",)
) -> Task:
    """Open a Talker's task whose first chunk has arrived. `remote`: whether the chunk's tensors,
    with these `names`, are in the peer's memory.
    """
    config = load_config(None, ("engine=fake", "device=cpu"))
    spec = RequestSpec(
        id=request, graph="qwen3_omni", prompt_ids=(1,), outputs=(EdgeName("audio"),)
    )
    tensor = WireTensor(dtype="float32", shape=(1, 2), data=None if remote else bytes(8))
    tensors = dict.fromkeys(names, tensor)
    chunk = Chunk(request=request, edge=THOUGHT, index=0, epoch=Epoch(1), tensors=tensors)
    location: Location = dict.fromkeys(names, REF) if remote else {}
    logs = TaskLogs(
        inputs={THOUGHT: [(chunk, location)]}, outputs={}, consumed={}, blob=None, offer=None
    )
    adapter = FakeTask(spec, build_options(config, TALKER, Path()))
    return open_task(spec, TALKER, Epoch(1), adapter, config, logs=logs)


def test_chunk_is_delivered_once_its_read_has_landed(arrivals: Arrivals) -> None:
    task = open_talker(ONE)
    assert (
        not arrivals.advance(task)
        and arrivals.receiver.pulling()
        and task.inbound[THOUGHT].consumed == 0
    )
    arrivals.transfer.pulls[0].data = np.array([1, 2], np.float32).tobytes()
    ((edge, _, arrays, final),) = arrivals.advance(task)
    assert (edge, arrays["rows"].tolist(), final) == (THOUGHT, [[1, 2]], False)
    assert not arrivals.receiver.pulling() and task.inbound[THOUGHT].consumed == 1


def test_read_without_room_waits_for_room_however_long(arrivals: Arrivals) -> None:
    task, arrivals.transfer.full = open_talker(ONE), True
    for _ in range(4):
        assert not arrivals.advance(task)
        arrivals.now_s += DEADLINE_S
    arrivals.transfer.full = False
    assert not arrivals.advance(task) and arrivals.receiver.pulling()
    arrivals.transfer.pulls[0].data = bytes(8)
    assert len(arrivals.advance(task)) == 1


def test_ready_chunk_is_delivered_while_another_request_waits(arrivals: Arrivals) -> None:
    waiting, ready = open_talker(ONE), open_talker(OTHER, remote=False)
    assert arrivals.receiver.can_advance([waiting, ready]) and not arrivals.receiver.can_advance(
        [waiting]
    )
    assert not arrivals.advance(waiting) and len(arrivals.advance(ready)) == 1


def test_forgotten_request_leaves_no_reads_and_no_timers(arrivals: Arrivals) -> None:
    arrivals.transfer.failing = True
    arrivals.advance(open_talker(ONE))
    for _ in range(2):
        arrivals.receiver.forget(ONE)
    assert (
        arrivals.transfer.pulls[0].cancelled
        and not arrivals.receiver.pulling()
        and not arrivals.receiver.in_flight()
    )
    arrivals.advance(open_talker(ONE))
    assert len(arrivals.transfer.pulls) == 2, "no pause is left from the failed read"


def test_chunk_of_which_one_read_is_refused_leaves_no_other_read(arrivals: Arrivals) -> None:
    arrivals.transfer.max_pulls = 1
    assert not arrivals.advance(open_talker(ONE, names=("rows", "more")))
    assert [pull.cancelled for pull in arrivals.transfer.pulls] == [True]
    assert not arrivals.receiver.pulling()


def test_forgotten_request_leaves_no_report_of_lost_tensors(arrivals: Arrivals) -> None:
    arrivals.link.listed = False
    arrivals.advance(open_talker(ONE))
    arrivals.advance(open_talker(OTHER))
    arrivals.receiver.forget(ONE)
    assert [task.request for task, _ in arrivals.receiver.take_lost()] == [OTHER]


def test_forgetting_a_request_leaves_the_reads_of_others(arrivals: Arrivals) -> None:
    tasks = [open_talker(ONE), open_talker(OTHER)]
    for task in tasks:
        arrivals.advance(task)
    arrivals.receiver.forget(ONE)
    assert [pull.cancelled for pull in arrivals.transfer.pulls] == [True, False]
    arrivals.transfer.pulls[1].data = bytes(8)
    assert len(arrivals.advance(tasks[1])) == 1


def test_reused_request_id_reads_again_from_the_beginning(arrivals: Arrivals) -> None:
    arrivals.advance(open_talker(ONE))
    arrivals.receiver.forget(ONE)
    arrivals.transfer.pulls[0].data = bytes(8)
    assert not arrivals.advance(open_talker(ONE)), "bytes of the former request are not delivered"
    assert len(arrivals.transfer.pulls) == 2


def test_failing_read_waits_before_its_next_attempt_and_a_success_ends_that(
    arrivals: Arrivals,
) -> None:
    task = open_talker(ONE)
    arrivals.transfer.failing = True
    assert not arrivals.advance(task) and not arrivals.advance(task)
    assert len(arrivals.transfer.pulls) == 1, "the next attempt is not due"
    arrivals.now_s += module.RETRY_S
    arrivals.transfer.failing = False
    arrivals.advance(task)
    arrivals.transfer.pulls[-1].data = bytes(8)
    assert len(arrivals.advance(task)) == 1 and len(arrivals.transfer.pulls) == 2
    arrivals.now_s += 3 * DEADLINE_S
    again = open_talker(ONE)
    arrivals.transfer.failing = True
    assert not arrivals.advance(again), "the time since an earlier failure does not count"


def test_read_that_fails_for_two_deadlines_fails_its_request_only(arrivals: Arrivals) -> None:
    failing, other = open_talker(ONE), open_talker(OTHER)
    arrivals.advance(other)
    arrivals.transfer.failing = True
    arrivals.advance(failing)
    arrivals.now_s += 2 * DEADLINE_S + module.RETRY_S
    with pytest.raises(TransferError, match="timed out"):
        arrivals.advance(failing)
    arrivals.receiver.forget(ONE)
    arrivals.transfer.pulls[0].data = bytes(8)
    assert len(arrivals.advance(other)) == 1 and not arrivals.receiver.pulling()


def test_lost_tensors_are_reported_once_an_interval_until_they_are_elsewhere(
    arrivals: Arrivals,
) -> None:
    task = open_talker(ONE)
    arrivals.link.listed = False

    def reported() -> list[tuple[Task, EdgeName]]:
        arrivals.advance(task)
        return arrivals.receiver.take_lost()

    assert reported() == [(task, THOUGHT)] and not reported()
    arrivals.now_s += module.REPORT_AGAIN_S
    assert reported() == [(task, THOUGHT)]
    task.inbound[THOUGHT].relocate(0, {"rows": bytes(8)})
    assert len(arrivals.advance(task)) == 1 and not arrivals.receiver.take_lost()


# Tasks


def test_first_stage_waits_for_no_chunk() -> None:
    config = load_config(None, ("engine=fake", "device=cpu"))
    spec = RequestSpec(id=ONE, graph="qwen3_omni", prompt_ids=(1,), outputs=(TEXT,))
    logs = TaskLogs(inputs={}, outputs={}, consumed={}, blob=None, offer=None)
    adapter = FakeTask(spec, build_options(config, THINKER, Path()))
    task = open_task(spec, THINKER, Epoch(1), adapter, config, logs=logs)
    assert not task.inbound and task.has_read_logs() and not task.paused


def test_task_without_credit_waits_and_returns_to_its_phase_with_credit() -> None:
    task = open_talker(ONE, remote=False)
    (edge,) = task.outbound.values()
    while task.has_credit():
        task.unsent += [(edge, draft) for draft in edge.offer(frame(0))]
    task.enter(task.next_phase())
    assert task.phase is TaskPhase.OUT_OF_CREDIT and task.paused and task.unsent, (
        "what was released is still to be sent"
    )
    task.add_credit(CODES, edge.produced)
    task.enter(task.next_phase())
    assert task.phase is TaskPhase.RUNNING and not task.paused and task.unsent


def test_consumed_chunk_is_not_consumed_twice() -> None:
    edge = InboundEdge(first_walk=DECODE, wait_for_walk=False)
    chunk = Chunk(request=ONE, edge=CODES, index=0, epoch=Epoch(1))
    edge.put(chunk, {})
    edge.put(chunk, {})
    edge.take()
    edge.put(Chunk(request=ONE, edge=CODES, index=0, epoch=Epoch(2), final=True), {})
    assert edge.peek() is None and edge.consumed == 1 and not edge.ended
