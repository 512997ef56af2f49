"""Output edge of a task: groups items into chunks by a chunk policy, cuts at transitions, counts
credit. Pure.

A new owner recomputes what the edge's log already holds: this part is not released a second time,
and chunk numbers continue after the log's.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from fleet.config.credits import Credits
from fleet.core.errors import ChunkOrderError
from fleet.core.ids import NO_WALK, Epoch, Walk
from fleet.engine.base import Arrays
from fleet.graphs import ChunkPolicy, Edge
from fleet.stages.base import EdgeItem
from fleet.worker.task.credit import EdgeCredit


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk before it is sent. `ordinal`: index of its first item among the items of
    `producer_walk`; `first_row`: index of its first tensor row in the edge.

    `logged_at`: epoch at which the chunk was appended to the log, if only its remote tensors may
    have a new location; None if the chunk itself is to be appended.
    """

    index: int
    arrays: Arrays
    producer_walk: Walk = NO_WALK
    ordinal: int = 0
    boundary: bool = False
    walk: Walk | None = None
    final: bool = False
    num_items: int = 0
    first_row: int = 0
    figures: dict[str, int] = {}
    logged_at: Epoch | None = None

    @property
    def is_logged(self) -> bool:
        return self.logged_at is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeLog:
    """Contents of an edge's log. `rows`, `sizes_bytes`, `walks`: number of tensor rows, size and
    producer's walk of each chunk. `final`: True if the last chunk is final.

    `remote`: epoch of the owner that appended a chunk, by chunk index, for chunks with tensors
    whose bytes are not in the log. `consumed`: number of chunks that the consumer has acknowledged.
    """

    rows: Sequence[int] = ()
    sizes_bytes: Sequence[int] = ()
    walks: Sequence[Walk] = ()
    remote: Mapping[int, Epoch] = field(default_factory=dict[int, Epoch])
    final: bool = False
    consumed: int = 0


@dataclass(slots=True, kw_only=True)
class _Replay:
    """Logged chunks that are still to be recomputed. `rows`: number of rows per chunk; `index`:
    index of the first chunk. `items`: the recomputed part of the first chunk, `num_rows` rows.
    """

    rows: deque[int]
    index: int = 0
    items: list[Arrays] = field(default_factory=list[Arrays])
    num_rows: int = 0


class _Group(msgspec.Struct, frozen=True):
    """Properties of the items that wait for the chunk policy to release them; all are of one
    consumer walk.
    """

    producer_walk: Walk
    ordinal: int
    consumer_walk: Walk | None
    boundary: bool


@dataclass(slots=True, kw_only=True)
class _Playback:
    """Estimate of how far a client has played the edge's items, if it plays them as they arrive and
    pauses when there are none.

    A new owner of an edge assumes that nothing is left to play, since it does not know the time
    since its predecessor's last chunk.
    `num_items`: number of items released after the first chunk.
    """

    began_s: float
    dry_at_s: float
    num_items: int = 0

    def add_released(self, now_s: float, num_items: int, item_s: float) -> None:
        self.num_items += num_items if now_s > self.began_s else 0
        self.dry_at_s = max(self.dry_at_s, now_s) + num_items * item_s

    def left_s(self, now_s: float, num_waiting: int) -> float:
        """Return the seconds of playback that will be buffered once one more item than
        `num_waiting` has been produced, at the mean pace so far.
        """
        num_produced = self.num_items + num_waiting
        return self.dry_at_s - now_s - (now_s - self.began_s) / num_produced


class OutboundEdge:
    """Output edge of a task. Invariants: chunk indices are consecutive; a chunk holds items of one
    consumer walk; nothing follows the final chunk.

    `writes_markers`: True if the producer writes the transition markers (`transition_source:
    producer`).
    Units: `clock` in seconds.
    `produced`: number of chunks, with the chunks that were in the log at the start.
    `consumer_queued`: True if, when last read from Redis, the consumer's task was granted and not
    claimed by a worker. `credit`: chunks sent and acknowledged, against the edge's credits.
    `is_held`: True if a chunk is complete and waits only for the policy's rate.
    """

    def __init__(
        self,
        edge: Edge,
        policy: ChunkPolicy,
        credits: Credits,
        *,
        writes_markers: bool,
        logged: EdgeLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.edge = edge
        self._policy = policy
        self._item_bytes = {name: np.dtype(dtype).itemsize for name, dtype in edge.tensors.items()}
        self.writes_markers = writes_markers
        logged = logged or EdgeLog()
        self.produced, self._num_rows = len(logged.rows), sum(logged.rows)
        self.credit = EdgeCredit(
            credits, logged.sizes_bytes or (0,) * len(logged.rows), logged.consumed
        )
        self.ended = False
        self.consumer_queued = False
        self._logged_final = logged.final
        self._replay = _Replay(rows=deque(logged.rows))
        self._logged_walks, self._logged_remote = logged.walks, logged.remote
        self._skipped: frozenset[Walk] = frozenset()
        self._ordinals: dict[Walk, int] = {}
        self._last_walk: Walk | None = None
        self._group: _Group | None = None
        self._items: list[Arrays] = []
        self._figures: dict[str, int] = {}
        self._clock = clock
        self._playback = self._begin_playback(clock()) if logged.rows else None
        self._released_s: float | None = None
        self.is_held = False

    def offer(self, item: EdgeItem, num_answers: int = 1) -> list[Draft]:
        """Add one item; return the chunks that it releases, in order. `num_answers`: number of
        tasks in progress in this worker.
        """
        assert not self.ended, f"an item after the end of edge {self.edge.name}"
        if item.walk in self._skipped and not item.final:
            return []
        drafts, rest = self._replay_item(item) if self._replay.rows else ([], item.arrays)
        if self._logged_final:
            self.ended = item.final
            return [*drafts, self._logged_end()] if item.final else drafts
        if rest:
            drafts += self._enter_group(item)
            self._items.append(rest)
            self._figures |= item.figures
            size = self._policy.size(self.produced, num_answers)
            if size is not None and (len(self._items) >= size or self._runs_low()):
                self.is_held = not item.final and not self._is_due(num_answers)
                if not self.is_held:
                    drafts.append(self._release(final=item.final))
        if item.final and not (drafts and drafts[-1].final):
            drafts.append(self._release(final=True, walk=item.walk))
        self.ended = item.final
        return drafts

    def release_waiting(self) -> list[Draft]:
        """Release all waiting items as a chunk, since this worker will produce no further items."""
        return [self._release(final=False)] if self._items else []

    def release_held(self, num_answers: int = 1) -> list[Draft]:
        """Release the chunk that is held for the policy's rate, if it is due. `num_answers`: number
        of tasks in progress in this worker.
        """
        return [self._release(final=False)] if self.is_held and self._is_due(num_answers) else []

    def skip(self, walks: Sequence[Walk]) -> None:
        """Expect no items of these walks, which are the first walks of the edge, and do not wait
        until their logged chunks are recomputed.
        """
        self._skipped = frozenset(walks)
        while self._replay.rows and self._logged_walks[self._replay.index] in self._skipped:
            self._replay.rows.popleft()
            self._replay.index += 1

    def _replay_item(self, item: EdgeItem) -> tuple[list[Draft], Arrays]:
        """Match an item's rows with logged chunks. Return logged chunks whose remote tensors were
        recomputed, and the rows that are not in the log.
        """
        drafts: list[Draft] = []
        rest, replay = item.arrays, self._replay
        if rest:
            self._enter_group(item)
        while rest and replay.rows:
            part, rest = self._split(rest, replay.rows[0] - replay.num_rows)
            replay.items.append(part)
            replay.num_rows += self.num_rows(part)
            if replay.num_rows == replay.rows[0]:
                drafts += self._end_replayed_chunk(_join(replay.items))
        if rest:
            # The rest begins a chunk, and so its own group; the item was counted already.
            self._ordinals[item.walk] -= 1
        return drafts, rest

    def _end_replayed_chunk(self, arrays: Arrays) -> list[Draft]:
        replay = self._replay
        index = replay.index
        replay.rows.popleft()
        replay.index = index + 1
        replay.items = []
        replay.num_rows = 0
        while replay.rows and replay.rows[0] == 0:  # an empty final chunk
            replay.rows.popleft()
        remote = {name: array for name, array in arrays.items() if name in self.edge.remote}
        return (
            [Draft(index=index, arrays=remote, logged_at=self._logged_remote[index])]
            if remote and index in self._logged_remote
            else []
        )

    def _logged_end(self) -> Draft:
        """Return the final chunk again although the log holds it, since its append may also have to
        end the task.
        """
        return Draft(index=self.produced - 1, arrays={}, final=True)

    def num_rows(self, arrays: Arrays) -> int:
        """Return the number of rows of the edge's first tensor in `arrays`, by which the log is
        counted.
        """
        first = next((name for name in self.edge.tensors if name in arrays), None)
        return len(arrays[first]) if first is not None else 0

    def _num_bytes(self, arrays: Arrays) -> int:
        """Return the size of arrays as they are sent, in the edge's dtypes."""
        num_bytes = 0
        for name, array in arrays.items():
            num_bytes += array.size * (self._item_bytes.get(name) or array.itemsize)
        return num_bytes

    def _split(self, arrays: Arrays, num_rows: int) -> tuple[Arrays, Arrays]:
        if self.num_rows(arrays) <= num_rows:
            return arrays, {}
        if len(arrays) > 1:
            raise ChunkOrderError(
                f"edge {self.edge.name}: it was cut otherwise before; do all workers have one "
                "version?"
            )
        return {k: v[:num_rows] for k, v in arrays.items()}, {
            k: v[num_rows:] for k, v in arrays.items()
        }

    def _enter_group(self, item: EdgeItem) -> list[Draft]:
        """Start a new group if the item changes the consumer's walk; return the chunk of the
        previous group's items, if any wait.
        """
        ordinal = self._ordinals.get(item.walk, 0)
        self._ordinals[item.walk] = ordinal + 1
        target = self.edge.consumer_walk(item.walk, ordinal)
        boundary = target is not None and target != self._last_walk
        drafts = [self._release(final=False)] if boundary and self._items else []
        if boundary:
            self._last_walk = target
        if boundary or not self._items:
            self._group = _Group(item.walk, ordinal, target, boundary)
        return drafts

    def _begin_playback(self, now_s: float) -> _Playback | None:
        timed = self._policy.low_buffer_s and self.edge.item_ms
        return _Playback(began_s=now_s, dry_at_s=now_s) if timed else None

    def _runs_low(self) -> bool:
        """Return True if a client that has played since the first chunk would run out of buffer
        while one more item is produced.
        """
        return (
            self._playback is not None
            and self._playback.left_s(self._clock(), len(self._items)) < self._policy.low_buffer_s
        )

    def _is_due(self, num_answers: int) -> bool:
        """Return True if the policy's rate allows a chunk now: the clock has passed a multiple of
        the interval since the last chunk. All tasks share these multiples, so one write has all
        their chunks.
        """
        interval_s = self._policy.interval_s(num_answers)
        return (
            not interval_s
            or self._released_s is None
            or self._clock() // interval_s > self._released_s // interval_s
        )

    def _release(self, *, final: bool, walk: Walk | None = None) -> Draft:
        group = self._group if self._items else None
        draft = Draft(
            index=self.produced,
            arrays=_join(self._items),
            producer_walk=group.producer_walk if group else walk or NO_WALK,
            ordinal=group.ordinal if group else 0,
            boundary=group.boundary if group else False,
            walk=group.consumer_walk if group and group.boundary and self.writes_markers else None,
            final=final,
            num_items=len(self._items),
            first_row=self._num_rows,
            figures=self._figures,
        )
        self._num_rows += self.num_rows(draft.arrays)
        now_s = self._released_s = self._clock()
        self._playback = self._playback or self._begin_playback(now_s)
        if self._playback is not None:
            self._playback.add_released(now_s, len(self._items), self.edge.item_ms / 1000)
        self._items = []
        self._figures = {}
        self.is_held = False
        self.produced += 1
        self.credit.add_chunk(self._num_bytes(draft.arrays))
        return draft

    def is_ahead(self) -> bool:
        """Return True if the consumer has left as much unacknowledged as the edge's credits
        allow.
        """
        has_more = not self.ended and not self._logged_final
        return has_more and not self._replay.rows and self.credit.is_used_up()

    def has_credit(self) -> bool:
        """Return True if the task may produce. Acknowledgements are not needed during replay, since
        a new consumer may wait for tensors of chunks that count as consumed, nor while the consumer
        is queued for a slot: an answer's text does not wait until its speech has one.
        """
        return self.consumer_queued or not self.is_ahead()


def _join(items: list[Arrays]) -> Arrays:
    if len(items) == 1:
        return items[0]
    names = {name for arrays in items for name in arrays}
    return {
        name: np.concatenate([arrays[name] for arrays in items if name in arrays])
        for name in sorted(names)
    }
