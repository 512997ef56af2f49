"""From arrived chunks to arrays for the adapter: inline tensors are taken directly, remote ones
after a pull. Knows no engine.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from fleet.core.chunk import Location, TensorRef, WireTensor
from fleet.core.errors import ArenaFull, TransferError
from fleet.core.ids import EdgeName, RequestId, Walk, WorkerId
from fleet.engine.base import Arrays
from fleet.telemetry.counts import PullTally
from fleet.transfer.base import Pull, Transfer
from fleet.worker.process.redis_link import RedisLink
from fleet.worker.task.inbound import InboundEdge
from fleet.worker.task.task import Task

log = logging.getLogger(__name__)

RETRY_S = 0.2
REPORT_AGAIN_S = 1.0
Received = tuple[EdgeName, Walk, Arrays, bool]
_Key = tuple[RequestId, EdgeName]


@dataclass(slots=True)
class _Pulling:
    """Read of the remote tensors of an edge's next chunk: reads in progress, and bytes that have
    arrived.
    """

    pulls: dict[str, Pull]
    done: dict[str, bytes]
    began_s: float


@dataclass(frozen=True, slots=True)
class _Failing:
    """State of a chunk's reads that fail although their peer is still listed, or that find no room
    in the arena. `since_s`: time of the first failure, set anew whenever the arena has no room.
    `retry_s`: time of the next attempt.
    """

    since_s: float
    retry_s: float


@dataclass(frozen=True, slots=True)
class _Lost:
    """Tensors whose holder is gone: their location, and the time of the next report to their
    producer.
    """

    location: Location
    report_s: float


class _PeerGone(TransferError):
    """Error: the worker that holds the tensors is no longer listed, so they must be recomputed."""


class Receiver:
    """Reads the remote tensors of arrived chunks and delivers the chunks whole, in index order.
    Reads are polled, never waited for.

    Lost tensors, whose holder is gone, are reported repeatedly, since one report may reach a
    producer that dies; their chunk waits for a new location. A read from a peer that may only be
    slow, or whose death is not noticed yet, is retried for two deadlines. A read for which this
    worker's arena has no room waits for room: other reads and requests will end.
    """

    def __init__(
        self, transfer: Transfer, link: RedisLink, deadline_s: float, tally: PullTally
    ) -> None:
        self._transfer = transfer
        self._link = link
        self._deadline_s = deadline_s
        self._tally = tally
        self._pulling: dict[_Key, _Pulling] = {}
        self._failing: dict[_Key, _Failing] = {}
        self._lost: dict[_Key, _Lost] = {}
        self._to_report: list[tuple[Task, EdgeName]] = []
        self._metadata: dict[WorkerId, bytes] = {}

    def take_lost(self) -> list[tuple[Task, EdgeName]]:
        """Return the edges whose next chunk has lost its tensors, for which a report to the
        producer is due. A due report is returned once; further reports become due while the tensors
        stay lost.
        """
        lost, self._to_report = self._to_report, []
        return lost

    def advance(self, task: Task) -> Iterator[Received]:
        """Yield every complete chunk of a task's inputs, in index order per edge. Raises:
        TransferError once a read has failed for too long.
        """
        for name, edge in task.inbound.items():
            while (arrived := edge.peek()) is not None:
                remote = self._pull_remote(task, name, arrived[1])
                if remote is None:
                    break
                chunk, _, walk = edge.take()
                arrays = {
                    key: _array(tensor, remote.get(key)) for key, tensor in chunk.tensors.items()
                }
                yield name, walk, arrays, chunk.final

    def _pull_remote(
        self, task: Task, edge: EdgeName, location: Location
    ) -> dict[str, bytes] | None:
        """Return the bytes of a chunk's remote tensors by name; None while a read is in progress,
        failed or lost.
        """
        if not location:
            return {}
        key = (task.request, edge)
        if self._must_wait(key, location):
            return None
        try:
            return self._poll(task, key, location)
        except _PeerGone as error:
            self._note_failure(task, edge)
            if key not in self._lost:
                log.warning(
                    "request %s, edge %s: %s; they must be recomputed",
                    task.request,
                    edge,
                    error.message,
                )
            self._lost[key] = _Lost(location, time.monotonic() + REPORT_AGAIN_S)
            self._failing.pop(key, None)
            self._to_report.append((task, edge))
        except ArenaFull:
            self._failing[key] = _Failing(time.monotonic(), time.monotonic() + RETRY_S)
        except TransferError:
            self._note_failure(task, edge)
            if not self._schedule_retry(key, location):
                raise
        return None

    def _must_wait(self, key: _Key, location: Location) -> bool:
        """Return True while neither the next attempt of a failing read nor the next report of lost
        tensors is due.
        """
        failing, lost = self._failing.get(key), self._lost.get(key)
        if failing is not None and time.monotonic() < failing.retry_s:
            return True
        return lost is not None and lost.location == location and time.monotonic() < lost.report_s

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
        num_bytes, took_us = (
            sum(map(len, state.done.values())),
            round((time.monotonic() - state.began_s) * 1e6),
        )
        self._tally.ended(key[1], num_bytes, took_us)
        task.receipts.pulled(key[1], num_bytes, took_us)
        return state.done

    def _schedule_retry(self, key: _Key, location: Location) -> bool:
        """Schedule another attempt of a failed read; return False if its reads have failed for two
        deadlines.
        """
        now = time.monotonic()
        since = self._failing[key].since_s if key in self._failing else now
        if now - since > 2 * self._deadline_s:
            return False
        if key in self._pulling:
            _cancel(self._pulling.pop(key).pulls)
        for ref in _refs(location).values():
            self._metadata.pop(ref.agent, None)
        self._failing[key] = _Failing(since, now + RETRY_S)
        return True

    def _begin(self, location: Location) -> dict[str, Pull]:
        """Begin the reads of a chunk's remote tensors. If one is refused, the others are cancelled:
        their destinations would stay reserved until the deadline, and further ones with each retry.
        """
        pulls: dict[str, Pull] = {}
        try:
            for name, ref in _refs(location).items():
                pulls[name] = self._transfer.pull(ref, self.peer(ref.agent), self._deadline_s)
        except TransferError:
            _cancel(pulls)
            raise
        return pulls

    def peer(self, worker: WorkerId) -> bytes:
        """Return the transfer metadata needed to read from a worker. Raises: TransferError if the
        worker is gone.
        """
        if worker not in self._metadata:
            metadata = self._link.read_peer_metadata(worker)
            if metadata is None:
                self.forget_peer(worker)
                raise _PeerGone(f"worker {worker}, which holds the tensors, is gone")
            self._metadata[worker] = metadata
        return self._metadata[worker]

    def forget_peer(self, worker: WorkerId) -> None:
        """Forget a worker that is no longer listed: its metadata, and the connection to it."""
        self._metadata.pop(worker, None)
        self._transfer.forget_peer(worker)

    def can_advance(self, tasks: Iterable[Task]) -> bool:
        """Return True if a chunk of one of the tasks can be delivered without waiting for a
        read.
        """
        return any(_is_ready(edge) for task in tasks for edge in task.inbound.values())

    def pulling(self) -> bool:
        return bool(self._pulling)

    def in_flight(self) -> dict[str, int]:
        """Return the number of chunks whose tensors are being read, by edge."""
        return dict(Counter(edge for _, edge in self._pulling))

    def forget(self, request: RequestId) -> None:
        for key in {
            key
            for known in (self._pulling, self._failing, self._lost)
            for key in known
            if key[0] == request
        }:
            self._forget_key(key)
        self._to_report = [
            (task, edge) for task, edge in self._to_report if task.request != request
        ]

    def _forget_key(self, key: _Key) -> None:
        if key in self._pulling:
            _cancel(self._pulling.pop(key).pulls)
        self._failing.pop(key, None)
        self._lost.pop(key, None)


def _cancel(pulls: Mapping[str, Pull]) -> None:
    for pull in pulls.values():
        pull.cancel()


def _refs(location: Location) -> dict[str, TensorRef]:
    return {name: place for name, place in location.items() if isinstance(place, TensorRef)}


def _is_ready(edge: InboundEdge) -> bool:
    arrived = edge.peek()
    return arrived is not None and not arrived[1]


def _array(tensor: WireTensor, pulled: bytes | None) -> np.ndarray:
    data = tensor.data if tensor.data is not None else pulled
    assert data is not None, "a tensor with neither bytes nor a location"
    # A writable copy: engines wrap it without copying again.
    return np.frombuffer(bytearray(data), dtype=tensor.dtype).reshape(tensor.shape)
