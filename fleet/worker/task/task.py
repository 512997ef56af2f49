"""Work of one request in this worker: its adapter, its edges and its phase. Knows no Redis; the
loop sends what the task produces.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from fleet.config import FleetConfig
from fleet.control.scripts import Ack, CreditWait
from fleet.core.hand_off import HandOff
from fleet.core.ids import NO_WALK, EdgeName, Epoch, RequestId, StageName, Walk
from fleet.core.request import RequestSpec
from fleet.engine.base import EngineOutput
from fleet.graphs import Edge
from fleet.stages.base import NO_OUTPUT, LoggedOutput, TaskAdapter
from fleet.telemetry.counts import BatchTally, Receipts
from fleet.worker.task.claim import TaskLogs
from fleet.worker.task.hand_off import KVImport
from fleet.worker.task.inbound import InboundEdge, Reading
from fleet.worker.task.outbound import Draft, EdgeLog, OutboundEdge


class TaskPhase(Enum):
    """Phase of a task in this worker. The engine computes the task's request in `RUNNING` only."""

    IMPORTING = "importing"
    """Keys and values that another worker computed are being pulled."""
    RUNNING = "running"
    OUT_OF_CREDIT = "out of credit"
    HANDED_OFF = "handed off"
    """The engine has finished the walks of this role; the task ends in this worker once Redis has
    recorded the hand-off.
    """


TRANSITIONS: dict[TaskPhase, frozenset[TaskPhase]] = {
    TaskPhase.IMPORTING: frozenset({TaskPhase.RUNNING, TaskPhase.OUT_OF_CREDIT}),
    TaskPhase.RUNNING: frozenset(
        {TaskPhase.IMPORTING, TaskPhase.OUT_OF_CREDIT, TaskPhase.HANDED_OFF}
    ),
    TaskPhase.OUT_OF_CREDIT: frozenset({TaskPhase.RUNNING}),
    TaskPhase.HANDED_OFF: frozenset(),
}


@dataclass(slots=True, kw_only=True)
class Task:
    """Work of one request in this worker, at one epoch.

    Invariants: every write for a task carries `epoch`; a task whose write was refused as stale is
    dropped. `kv_import` is set in phase `IMPORTING` only; the phase is left at the first feed after
    the import has ended.

    `producers`, `strides`: the stage that produces each input edge, and the number of its chunks
    per acknowledgement. `unsent`: chunks released and not yet appended, in order over all edges.
    `acked`: number of chunks acknowledged, by input edge. `reading`: what the engine has read.
    `alone`: True if no other task may run beside it. `timings`: the times of a hand-off from
    another worker, None once their write is queued. `logged`: the number of chunks in each input's
    log when the task was opened. `written`: output of earlier owners, emptied once the engine has
    the request (`is_started`). `cached_rows`: number of positions reused from an earlier turn of
    the session.
    `dirty`: True if feeding the task may change something. `ack_due`: True if acknowledgements may
    be due. The flags `dirty` and `ack_due` only save looking at idle tasks.
    `idle_consumed`: number of chunks consumed, by input edge, when the task was last reported idle.
    """

    spec: RequestSpec
    stage: StageName
    epoch: Epoch
    adapter: TaskAdapter
    inbound: dict[EdgeName, InboundEdge]
    outbound: dict[EdgeName, OutboundEdge]
    producers: dict[EdgeName, StageName]
    strides: dict[EdgeName, int]
    phase: TaskPhase = TaskPhase.RUNNING
    unsent: list[tuple[OutboundEdge, Draft]] = field(
        default_factory=list[tuple[OutboundEdge, Draft]]
    )
    acked: dict[EdgeName, int] = field(default_factory=dict[EdgeName, int])
    reading: Reading = field(default_factory=Reading)
    alone: bool = False
    kv_import: KVImport | None = None
    timings: HandOff | None = None
    logged: dict[EdgeName, int] = field(default_factory=dict[EdgeName, int])
    written: LoggedOutput = field(default_factory=lambda: NO_OUTPUT)
    is_started: bool = False
    cached_rows: int = 0
    dirty: bool = True
    ack_due: bool = True
    receipts: Receipts = field(default_factory=Receipts)
    batches: BatchTally = field(default_factory=BatchTally)
    idle_consumed: dict[EdgeName, int] = field(default_factory=dict[EdgeName, int])

    @property
    def request(self) -> RequestId:
        return self.spec.id

    @property
    def paused(self) -> bool:
        return self.phase in (TaskPhase.IMPORTING, TaskPhase.OUT_OF_CREDIT)

    def enter(self, phase: TaskPhase) -> None:
        assert phase in TRANSITIONS[self.phase], (
            f"request {self.request}: {self.phase} cannot become {phase}"
        )
        self.phase = phase

    def begin_import(self, kv_import: KVImport) -> None:
        self.enter(TaskPhase.IMPORTING)
        self.kv_import = kv_import

    def end_import(self) -> KVImport | None:
        kv_import, self.kv_import = self.kv_import, None
        return kv_import

    def next_phase(self) -> TaskPhase:
        """Return the phase to enter after a feed: the present one during an import or after a
        hand-off, else `RUNNING` or `OUT_OF_CREDIT`.
        """
        if self.kv_import is not None or self.phase is TaskPhase.HANDED_OFF:
            return self.phase
        return TaskPhase.RUNNING if self.has_credit() else TaskPhase.OUT_OF_CREDIT

    def add_output(self, output: EngineOutput, num_answers: int = 1) -> None:
        """Turn an engine output into chunks ready to send; items for edges that the request does
        not run are discarded. An output without arrays, after which the request is handed off,
        releases all waiting items.

        `num_answers`: number of tasks in progress in this worker.
        """
        all_held = bool(output.arrays) and not output.final
        if not output.arrays and not output.final:
            for edge in self.outbound.values():
                self.unsent += [(edge, draft) for draft in edge.release_waiting()]
        for item in self.adapter.produce(output):
            edge = self.outbound.get(item.edge)
            if edge is not None:
                self.unsent += [(edge, draft) for draft in edge.offer(item, num_answers)]
                all_held = all_held and edge.is_held
        if not all_held:
            self.dirty = self.ack_due = True

    def release_held(self, num_answers: int = 1) -> None:
        """Release chunks that are held for their edge's rate and are due; if `num_answers` (number
        of tasks in progress in this worker) is 1, release all held chunks.
        """
        for edge in self.outbound.values():
            if edge.is_held:
                self.unsent += [(edge, draft) for draft in edge.release_held(num_answers)]
                self.dirty = True

    def add_credit(self, edge: EdgeName, consumed: int) -> None:
        if edge in self.outbound:
            self.outbound[edge].credit.acknowledge(consumed)
            self.dirty = True

    def may_move(self) -> bool:
        """Return False only if feeding the task certainly changes nothing."""
        return self.dirty or self.paused or any(edge.num_held for edge in self.inbound.values())

    def has_read_logs(self) -> bool:
        return all(self.inbound[edge].consumed >= count for edge, count in self.logged.items())

    def skip_walks(self, walks: Sequence[Walk]) -> None:
        """Do not wait for the engine to produce the output of these walks, since the output is in
        the logs and will not be recomputed.
        """
        for edge in self.outbound.values():
            edge.skip(walks)

    def is_over(self) -> bool:
        """Return True once the adapter has stopped the answer (at a stop string) and every output
        edge has ended.
        """
        return self.adapter.is_stopped() and self.all_ended()

    def all_ended(self) -> bool:
        return all(edge.ended for edge in self.outbound.values())

    def has_credit(self) -> bool:
        return all(edge.has_credit() for edge in self.outbound.values())

    def take_idle_report(self) -> dict[EdgeName, int]:
        """Return the number of chunks consumed, by input edge, and count the task as reported.
        Return an empty mapping if the task does not wait for input, or these numbers were returned
        before. Call only while the engine is idle.
        """
        consumed = {name: edge.consumed for name, edge in self.inbound.items()}
        has_chunks = any(edge.num_held for edge in self.inbound.values())
        if self.paused or has_chunks or consumed == self.idle_consumed:
            return {}
        self.idle_consumed = consumed
        return consumed

    def add_fed(self, edge: EdgeName, num_pieces: int) -> None:
        """Record that the next chunk of an input edge was fed to the engine, as `num_pieces`."""
        self.reading.add(edge, self.inbound[edge].consumed, num_pieces)
        self.ack_due = True

    def take_acks(self, num_unread: int) -> list[Ack]:
        """Return the acknowledgements that are due: after every stride of chunks, and at once at
        the end of an edge or of the task. `num_unread`: number of the pieces fed last that the
        engine has yet to read. The engine reads only while the outputs have credit, so that a slow
        reader of the answer holds back every stage before it.
        """
        due: list[Ack] = []
        self.ack_due = False
        closing = self.all_ended()
        self.reading.follow(num_unread)
        for name, edge in self.inbound.items():
            read = edge.consumed if closing else self.reading.chunks.get(name, 0)
            behind = read - self.acked.get(name, 0)
            is_end = edge.ended and read == edge.consumed
            if not closing and not (behind and (behind >= self.strides[name] or is_end)):
                continue
            self.acked[name] = read
            ack = Ack(
                request=self.request,
                stage=self.stage,
                epoch=self.epoch,
                edge=name,
                consumed=read,
                producer=self.producers[name],
                closed=closing and not edge.ended,
            )
            due.append(ack)
        return due

    def is_starved(self, num_unread: int) -> bool:
        """Return True if only further input lets the task go on. `num_unread`: number of fed pieces
        that the engine has yet to read.
        """
        edges = self.inbound.values()
        return (
            self.phase is TaskPhase.RUNNING
            and not (num_unread or self.unsent)
            and not any(edge.num_held for edge in edges)
            and any(not edge.ended for edge in edges)
        )

    def progress(self) -> tuple[int, ...]:
        """Return the number of chunks consumed from each input edge, then the number produced on
        each output edge. An equal result later means that the task has made no progress.
        """
        consumed = (edge.consumed for edge in self.inbound.values())
        return (*consumed, *(edge.produced for edge in self.outbound.values()))

    def credit_waits(self) -> list[CreditWait]:
        """Return the output edges without credit, each with the number of acknowledged chunks,
        counted from the edge's first chunk, at which the task may continue.
        """
        return [
            CreditWait(name, edge.edge.target, edge.credit.enough())
            for name, edge in self.outbound.items()
            if not edge.has_credit()
        ]


def open_task(
    spec: RequestSpec,
    stage: StageName,
    epoch: Epoch,
    adapter: TaskAdapter,
    config: FleetConfig,
    *,
    logs: TaskLogs,
    alone: bool = False,
) -> Task:
    """Create a task with its edges as graph and configuration declare them; its outputs continue
    where their logs end. `alone`: True if no other task may run beside it.
    """
    graph = config.graph_declaration()
    running = graph.edges_of(spec)
    first_walk = graph.stage(stage).walks[0]
    waits = config.transition_source_of(stage) == "conductor"
    inputs = [edge for edge in running if edge.target == stage]
    task = Task(
        spec=spec,
        stage=stage,
        epoch=epoch,
        adapter=adapter,
        inbound={
            edge.name: InboundEdge(first_walk=first_walk, wait_for_walk=waits) for edge in inputs
        },
        outbound={
            edge.name: _open_outbound(edge, config, logs)
            for edge in running
            if edge.source == stage
        },
        producers={edge.name: edge.source for edge in inputs},
        strides={edge.name: config.credits_of(edge).ack_stride for edge in inputs},
        alone=alone,
        written=logged_output(logs),
        logged={edge.name: len(logs.inputs.get(edge.name, ())) for edge in inputs},
    )
    for edge in task.inbound:
        for chunk, location in logs.inputs.get(edge, ()):
            task.inbound[edge].put(chunk, location)
    return task


def _open_outbound(edge: Edge, config: FleetConfig, logs: TaskLogs) -> OutboundEdge:
    writes_markers = config.transition_source_of(edge.target) == "producer"
    chunks = logs.outputs.get(edge.name, [])
    first = next(iter(edge.tensors))
    logged = EdgeLog(
        rows=[chunk.tensors[first].shape[0] if first in chunk.tensors else 0 for chunk in chunks],
        sizes_bytes=[chunk.num_bytes for chunk in chunks],
        walks=[chunk.producer_walk or NO_WALK for chunk in chunks],
        remote={
            chunk.index: chunk.epoch
            for chunk in chunks
            if any(tensor.data is None for tensor in chunk.tensors.values())
        },
        final=bool(chunks) and chunks[-1].final,
        consumed=logs.consumed.get(edge.name, 0),
    )
    policy, credits = config.policy_of(edge), config.credits_of(edge)
    return OutboundEdge(edge, policy, credits, writes_markers=writes_markers, logged=logged)


def logged_output(logs: TaskLogs) -> LoggedOutput:
    """Return the output of earlier owners from a task's logs: the inline tensors, joined by edge
    and walk.
    """
    parts: dict[tuple[EdgeName, Walk], dict[str, list[np.ndarray]]] = {}
    for edge, chunk in ((edge, chunk) for edge, chunks in logs.outputs.items() for chunk in chunks):
        of_walk = parts.setdefault((edge, chunk.producer_walk or NO_WALK), {})
        for name, tensor in chunk.tensors.items():
            if tensor.data is not None:
                of_walk.setdefault(name, []).append(
                    np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape)
                )
    return {
        key: {name: np.concatenate(arrays) for name, arrays in found.items()}
        for key, found in parts.items()
        if found
    }
