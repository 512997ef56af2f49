"""One request's work in this worker: its adapter and its edges. Knows no Redis; the loop sends what it makes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fleet.config import FleetConfig
from fleet.control.scripts import Ack
from fleet.core.hand_off import HandOff
from fleet.core.ids import EdgeName, Epoch, RequestId, StageName, Walk
from fleet.core.receipts import Receipts
from fleet.core.request import RequestSpec
from fleet.engine.base import EngineOutput
from fleet.graphs import Edge
from fleet.stages.base import LoggedOutput, TaskAdapter
from fleet.worker.claim import TaskLogs
from fleet.worker.hand_off import KVImport
from fleet.worker.inbound import InboundEdge
from fleet.worker.outbound import Draft, EdgeLog, OutboundEdge


@dataclass(slots=True, kw_only=True)
class Task:
    """Invariant: everything written for it bears `epoch`; once refused as stale, the task is dropped at once.

    `unsent` are chunks released and not yet appended, in order over all edges. `paused` mirrors what the engine was told.
    `alone`: no other task may run beside it. `adoption`: blocks computed elsewhere that are on their way, for which the engine
    waits. `moments`: how the task came here from another worker, until that is told. `logged` counts the chunks of each input
    edge when the task was opened. `given_up`: the engine has done its part here, and the next role goes on. `spared` counts the
    rows that its session's earlier turn had computed. `stirred`: something came or was made since it was last fed. `owes`: it
    consumed or made something since acknowledgements were last taken. Both only spare the loop looking at idle tasks.
    `receipts`: how its inputs came, for its story. `rested`: by input edge, the chunks taken when it was last told that nothing
    is left to do.
    """

    spec: RequestSpec
    stage: StageName
    epoch: Epoch
    adapter: TaskAdapter
    inbound: dict[EdgeName, InboundEdge]
    outbound: dict[EdgeName, OutboundEdge]
    producers: dict[EdgeName, StageName]
    strides: dict[EdgeName, int]
    unsent: list[tuple[OutboundEdge, Draft]] = field(default_factory=list[tuple[OutboundEdge, Draft]])
    acked: dict[EdgeName, int] = field(default_factory=dict[EdgeName, int])
    paused: bool = False
    alone: bool = False
    kv_import: KVImport | None = None
    timings: HandOff | None = None
    logged: dict[EdgeName, int] = field(default_factory=dict[EdgeName, int])
    handed_off: bool = False
    cached_rows: int = 0
    dirty: bool = True
    ack_due: bool = True
    receipts: Receipts = field(default_factory=Receipts)
    idle_consumed: dict[EdgeName, int] = field(default_factory=dict[EdgeName, int])

    @property
    def request(self) -> RequestId:
        return self.spec.id

    def produced(self, output: EngineOutput, num_answers: int = 1) -> None:
        """Turn an engine output into chunks ready to send; items for edges the request does not run are dropped.

        `num_answers`: under way in this worker.
        """
        self.dirty = self.ack_due = True
        for item in self.adapter.produce(output):
            edge = self.outbound.get(item.edge)
            if edge is not None:
                self.unsent += [(edge, draft) for draft in edge.offer(item, num_answers)]

    def credited(self, edge: EdgeName, consumed: int) -> None:
        if edge in self.outbound:
            self.outbound[edge].add_credit(consumed)
            self.dirty = True

    def may_move(self) -> bool:
        """Whether feeding it could change anything: False only where it surely would not."""
        return self.dirty or self.paused or any(edge.num_held for edge in self.inbound.values())

    def has_read_logs(self) -> bool:
        return all(self.inbound[edge].consumed >= count for edge, count in self.logged.items())

    def adopted(self, walks: Sequence[Walk]) -> None:
        """What was made in these walks is not made again."""
        for edge in self.outbound.values():
            edge.skip(walks)

    def all_ended(self) -> bool:
        return all(edge.ended for edge in self.outbound.values())

    def has_credit(self) -> bool:
        return all(edge.has_credit() for edge in self.outbound.values())

    def rest_due(self) -> dict[EdgeName, int]:
        """With its engine idle: the chunks taken of each input, if it waits for more and that is not told; else nothing."""
        taken = {name: edge.consumed for name, edge in self.inbound.items()}
        held = any(edge.num_held for edge in self.inbound.values())
        if self.paused or self.kv_import is not None or held or taken == self.idle_consumed:
            return {}
        self.idle_consumed = taken
        return taken

    def acks_due(self) -> list[Ack]:
        """Acknowledge in strides; the end of an edge, and of the task, at once."""
        due: list[Ack] = []
        self.ack_due = False
        closing = self.all_ended()
        for name, edge in self.inbound.items():
            behind = edge.consumed - self.acked.get(name, 0)
            if closing or (behind and (behind >= self.strides[name] or edge.ended)):
                self.acked[name] = edge.consumed
                due.append(
                    Ack(request=self.request, stage=self.stage, epoch=self.epoch, edge=name, consumed=edge.consumed,
                        producer=self.producers[name], closed=closing and not edge.ended)
                )  # fmt: skip
        return due


def open_task(
    spec: RequestSpec, stage: StageName, epoch: Epoch, adapter: TaskAdapter, config: FleetConfig,
    *, logs: TaskLogs, alone: bool = False,
) -> Task:  # fmt: skip
    """Lay out a task's edges as the graph and the configuration say, the outgoing ones where their logs end."""
    graph = config.graph_declaration()
    running = graph.edges_for(spec.outputs)
    first_walk = graph.stage(stage).walks[0]
    waits = config.transition_source_of(stage) == "conductor"
    inputs = [edge for edge in running if edge.target == stage]
    return Task(
        spec=spec,
        stage=stage,
        epoch=epoch,
        adapter=adapter,
        inbound={edge.name: InboundEdge(first_walk=first_walk, wait_for_walk=waits) for edge in inputs},
        outbound={edge.name: _outbound(edge, config, logs) for edge in running if edge.source == stage},
        producers={edge.name: edge.source for edge in inputs},
        strides={edge.name: config.ack_stride_of(edge) for edge in inputs},
        alone=alone,
        logged={edge: len(chunks) for edge, chunks in logs.inputs.items()},
    )


def _outbound(edge: Edge, config: FleetConfig, logs: TaskLogs) -> OutboundEdge:
    marks = config.transition_source_of(edge.target) == "producer"
    chunks = logs.made.get(edge.name, [])
    first = next(iter(edge.tensors))
    logged = EdgeLog(
        rows=[chunk.tensors[first].shape[0] if first in chunk.tensors else 0 for chunk in chunks],
        walks=[chunk.producer_walk or Walk("") for chunk in chunks],
        elsewhere={chunk.index for chunk in chunks if any(tensor.data is None for tensor in chunk.tensors.values())},
        final=bool(chunks) and chunks[-1].final,
        consumed=logs.consumed.get(edge.name, 0),
    )
    return OutboundEdge(edge, config.policy_of(edge), config.credits_of(edge), marks=marks, logged=logged)


def made_before(logs: TaskLogs) -> LoggedOutput:
    """What the logs of the own edges hold, as the adapter takes it."""
    parts: dict[tuple[EdgeName, Walk], dict[str, list[np.ndarray]]] = {}
    for edge, chunks in logs.made.items():
        for chunk in chunks:
            of_walk = parts.setdefault((edge, chunk.producer_walk or Walk("")), {})
            for name, tensor in chunk.tensors.items():
                if tensor.data is not None:
                    of_walk.setdefault(name, []).append(np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape))
    return {key: {name: np.concatenate(arrays) for name, arrays in found.items()} for key, found in parts.items() if found}
