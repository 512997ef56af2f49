"""From chunks in an inbound edge to arrays for the adapter: inline tensors at once, remote ones pulled first. Knows no engine."""

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from fleet.core.chunk import Location, TensorRef, WireTensor
from fleet.core.errors import TransferError
from fleet.core.ids import EdgeName, RequestId, Walk, WorkerId
from fleet.core.pulls import PullTally
from fleet.engine.base import Arrays
from fleet.transfer.base import Pull, Transfer
from fleet.worker.inbound import InboundEdge
from fleet.worker.redis_link import RedisLink
from fleet.worker.task import Task

log = logging.getLogger(__name__)

RETRY_S = 0.2
REPORT_AGAIN_S = 1.0
Received = tuple[EdgeName, Walk, Arrays, bool]
_Key = tuple[RequestId, EdgeName]


@dataclass(slots=True)
class _Pulling:
    """The remote tensors of the next chunk of an edge: reads under way, and bytes that are here."""

    pulls: dict[str, Pull]
    done: dict[str, bytes]
    began_s: float


@dataclass(frozen=True, slots=True)
class _Failing:
    """Reads from a peer that is still listed: since when they fail, and when the next one may be tried."""

    since_s: float
    again_s: float


@dataclass(frozen=True, slots=True)
class _Gone:
    """Tensors whose holder is gone, and when that is reported again."""

    location: Location
    again_s: float


class _PeerGone(TransferError):
    """The worker that holds the tensors is no longer listed: they must be made again."""


class Receiver:
    """Pulls are polled, never waited for; a chunk is handed on whole, in index order.

    `lost` are chunks whose tensors are gone with their holder, as (task, edge), to be reported again and again: one report may
    meet a conductor or a producer that dies. Each chunk waits until it is told where its tensors are now. A read of a peer that
    may only be slow, or not yet found dead, is tried again for two deadlines.
    """

    def __init__(self, transfer: Transfer, link: RedisLink, deadline_s: float, tally: PullTally) -> None:
        self._transfer, self._link, self._deadline_s, self._tally = transfer, link, deadline_s, tally
        self._pulling: dict[_Key, _Pulling] = {}
        self._failing: dict[_Key, _Failing] = {}
        self._gone: dict[_Key, _Gone] = {}
        self._metadata: dict[WorkerId, bytes] = {}
        self.lost: list[tuple[Task, EdgeName]] = []

    def advance(self, task: Task) -> Iterator[Received]:
        """Every chunk that is complete, in order per edge. Raises: TransferError once a read has failed for too long."""
        for name, edge in task.inbound.items():
            while (arrived := edge.peek()) is not None:
                remote = self._remote(task, name, arrived[1])
                if remote is None:
                    break
                chunk, _, walk = edge.take()
                arrays = {key: _array(tensor, remote.get(key)) for key, tensor in chunk.tensors.items()}
                yield name, walk, arrays, chunk.final

    def _remote(self, task: Task, edge: EdgeName, location: Location) -> dict[str, bytes] | None:
        """The pulled bytes by tensor name; None while a read is under way, or has to wait."""
        if not location:
            return {}
        key = (task.request, edge)
        if self._must_wait(key) or self._still_gone(key, location):
            return None
        try:
            return self._poll(task, key, location)
        except _PeerGone as error:
            self._note_failure(task, edge)
            if key not in self._gone:
                log.warning("request %s, edge %s: %s; they must be made again", task.request, edge, error.message)
            self._gone[key] = _Gone(location, time.monotonic() + REPORT_AGAIN_S)
            self._failing.pop(key, None)
            self.lost.append((task, edge))
        except TransferError:
            self._note_failure(task, edge)
            if not self._may_try_later(key, location):
                raise
        return None

    def _note_failure(self, task: Task, edge: EdgeName) -> None:
        self._tally.failed(edge)
        task.receipts.failed(edge)

    def _poll(self, task: Task, key: _Key, location: Location) -> dict[str, bytes] | None:
        state = self._pulling.get(key)
        if state is None:
            began_s = time.monotonic()
            here = {name: place for name, place in location.items() if isinstance(place, bytes)}
            state = self._pulling[key] = _Pulling(self._begin(location), here, began_s)
        for name, pull in list(state.pulls.items()):
            data = pull.poll()
            if data is not None:
                state.done[name] = data
                del state.pulls[name]
        if state.pulls:
            return None
        self._forget_key(key)
        num_bytes, took_us = sum(map(len, state.done.values())), round((time.monotonic() - state.began_s) * 1e6)
        self._tally.ended(key[1], num_bytes, took_us)
        task.receipts.pulled(key[1], num_bytes, took_us)
        return state.done

    def _still_gone(self, key: _Key, location: Location) -> bool:
        """Whether these very tensors are known to be lost; now and then they are looked for, and reported, once more."""
        gone = self._gone.get(key)
        return gone is not None and gone.location == location and time.monotonic() < gone.again_s

    def _must_wait(self, key: _Key) -> bool:
        failing = self._failing.get(key)
        return failing is not None and time.monotonic() < failing.again_s

    def _may_try_later(self, key: _Key, location: Location) -> bool:
        """Arrange another try, unless the reads have failed for two deadlines."""
        now = time.monotonic()
        since = self._failing[key].since_s if key in self._failing else now
        if now - since > 2 * self._deadline_s:
            return False
        if key in self._pulling:
            self._cancel(self._pulling.pop(key))
        for ref in _refs(location).values():
            self._metadata.pop(ref.agent, None)
        self._failing[key] = _Failing(since, now + RETRY_S)
        return True

    def _begin(self, location: Location) -> dict[str, Pull]:
        refs = _refs(location)
        return {name: self._transfer.pull(ref, self.peer(ref.agent), self._deadline_s) for name, ref in refs.items()}

    def peer(self, worker: WorkerId) -> bytes:
        """What is needed to read from a worker. Raises: TransferError if it is gone."""
        if worker not in self._metadata:
            metadata = self._link.read_peer_metadata(worker)
            if metadata is None:
                self._transfer.forget_peer(worker)
                raise _PeerGone(f"worker {worker}, which holds the tensors, is gone")
            self._metadata[worker] = metadata
        return self._metadata[worker]

    def can_advance(self, tasks: Iterable[Task]) -> bool:
        """Whether some chunk could be handed on without waiting for a read."""
        return any(_ready(edge) for task in tasks for edge in task.inbound.values())

    def pulling(self) -> bool:
        return bool(self._pulling)

    def in_flight(self) -> dict[str, int]:
        """Chunks whose tensors are being read, by edge."""
        return dict(Counter(edge for _, edge in self._pulling))

    def forget(self, request: RequestId) -> None:
        for key in {key for known in (self._pulling, self._failing, self._gone) for key in known if key[0] == request}:
            self._forget_key(key)
        self.lost = [(task, edge) for task, edge in self.lost if task.request != request]

    def _forget_key(self, key: _Key) -> None:
        if key in self._pulling:
            self._cancel(self._pulling.pop(key))
        self._failing.pop(key, None)
        self._gone.pop(key, None)

    def _cancel(self, pulling: _Pulling) -> None:
        for pull in pulling.pulls.values():
            pull.cancel()


def _refs(location: Location) -> dict[str, TensorRef]:
    return {name: place for name, place in location.items() if isinstance(place, TensorRef)}


def _ready(edge: InboundEdge) -> bool:
    arrived = edge.peek()
    return arrived is not None and not arrived[1]


def _array(tensor: WireTensor, pulled: bytes | None) -> np.ndarray:
    data = tensor.data if tensor.data is not None else pulled
    assert data is not None, "a tensor with neither bytes nor a location"
    # A writable copy: engines wrap it without copying again.
    return np.frombuffer(bytearray(data), dtype=tensor.dtype).reshape(tensor.shape)
