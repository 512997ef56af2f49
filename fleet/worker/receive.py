"""From chunks in an inbound edge to arrays for the adapter: inline tensors at once, remote ones pulled first. Knows no engine."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from fleet.core.chunk import Chunk, Location, WireTensor
from fleet.core.errors import TransferError
from fleet.core.ids import EdgeName, RequestId, Walk, WorkerId
from fleet.engine.base import Arrays
from fleet.transfer.base import Pull, Transfer
from fleet.worker.inbound import InboundEdge
from fleet.worker.link import Link
from fleet.worker.task import Task

PULL_TRIES = 2
Received = tuple[EdgeName, Walk, Arrays, bool]


@dataclass(slots=True)
class _Pulling:
    """The remote tensors of the next chunk of an edge: reads under way, and bytes that are here."""

    pulls: dict[str, Pull]
    done: dict[str, bytes]
    tries: int = 1


class Receiver:
    """Pulls are polled, never waited for; a chunk is handed on whole, in index order."""

    def __init__(self, transfer: Transfer, link: Link, deadline_s: float) -> None:
        self._transfer, self._link, self._deadline_s = transfer, link, deadline_s
        self._pulling: dict[tuple[RequestId, EdgeName], _Pulling] = {}
        self._metadata: dict[WorkerId, bytes] = {}

    def advance(self, task: Task) -> Iterator[Received]:
        """Every chunk that is complete, in order per edge. Raises: TransferError once the tries are spent."""
        for name, edge in task.inbound.items():
            while (arrived := edge.peek()) is not None:
                remote = self._remote(task.request, name, *arrived)
                if remote is None:
                    break
                chunk, _, walk = edge.take()
                arrays = {key: _array(tensor, remote.get(key)) for key, tensor in chunk.tensors.items()}
                yield name, walk, arrays, chunk.final

    def _remote(self, request: RequestId, edge: EdgeName, chunk: Chunk, location: Location) -> dict[str, bytes] | None:
        """The pulled bytes by tensor name; None while a read is under way."""
        if not location:
            return {}
        key = (request, edge)
        state = self._pulling.get(key)
        if state is None:
            state = self._pulling[key] = _Pulling(self._begin(location), {})
        try:
            for name, pull in list(state.pulls.items()):
                data = pull.poll()
                if data is not None:
                    state.done[name] = data
                    del state.pulls[name]
        except TransferError:
            self._cancel(self._pulling.pop(key))
            if state.tries >= PULL_TRIES:
                raise
            for ref in location.values():
                self._metadata.pop(ref.agent, None)
            self._pulling[key] = _Pulling(self._begin(location), {}, state.tries + 1)
            return None
        if state.pulls:
            return None
        del self._pulling[key]
        return state.done

    def _begin(self, location: Location) -> dict[str, Pull]:
        return {
            name: self._transfer.pull(ref, self._peer(ref.agent), self._deadline_s) for name, ref in location.items()
        }

    def _peer(self, worker: WorkerId) -> bytes:
        if worker not in self._metadata:
            metadata = self._link.peer_metadata(worker)
            if metadata is None:
                self._transfer.forget_peer(worker)
                raise TransferError(f"worker {worker}, which holds the tensors, is gone")
            self._metadata[worker] = metadata
        return self._metadata[worker]

    def can_advance(self, tasks: Iterable[Task]) -> bool:
        """Whether some chunk could be handed on without waiting for a read."""
        return any(_ready(edge) for task in tasks for edge in task.inbound.values())

    def pulling(self) -> bool:
        return bool(self._pulling)

    def forget(self, request: RequestId) -> None:
        for key in [key for key in self._pulling if key[0] == request]:
            self._cancel(self._pulling.pop(key))

    def _cancel(self, pulling: _Pulling) -> None:
        for pull in pulling.pulls.values():
            pull.cancel()


def _ready(edge: InboundEdge) -> bool:
    arrived = edge.peek()
    return arrived is not None and not arrived[1]


def _array(tensor: WireTensor, pulled: bytes | None) -> np.ndarray:
    data = tensor.data if tensor.data is not None else pulled
    assert data is not None, "a tensor with neither bytes nor a location"
    # A writable copy: engines wrap it without copying again.
    return np.frombuffer(bytearray(data), dtype=tensor.dtype).reshape(tensor.shape)
