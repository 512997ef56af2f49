"""Input edge of a task: chunks in index order, each once. Pure; knows no Redis and no tensors."""

from collections import deque

from fleet.core.chunk import Chunk, Location
from fleet.core.ids import EdgeName, Walk

Arrived = tuple[Chunk, Location]


class InboundEdge:
    """Input edge of a task. A chunk is identified by its index, its first arrival counts, and all
    of a chunk belongs to one walk.

    `wait_for_walk`: True if the conductor decides transitions: a boundary chunk is then held until
    its walk is assigned.
    Invariants: chunks leave in index order without a gap; `consumed` only grows; nothing leaves
    after the final chunk.
    """

    def __init__(self, *, first_walk: Walk, wait_for_walk: bool) -> None:
        self.walk = first_walk
        self.consumed = 0
        self.ended = False
        self._wait_for_walk = wait_for_walk
        self._held: dict[int, Arrived] = {}
        self._walks: dict[int, Walk] = {}

    def put(self, chunk: Chunk, location: Location) -> None:
        """Add a chunk, whose remote tensors are at `location`. A chunk that is already held or
        consumed is ignored.
        """
        if chunk.index >= self.consumed and chunk.index not in self._held:
            self._held[chunk.index] = (chunk, location)

    def relocate(self, index: int, location: Location) -> None:
        """Set a new location for the tensors of a held chunk, after another worker has recomputed
        the tensors. A chunk that is not held is ignored.
        """
        if index in self._held:
            self._held[index] = (self._held[index][0], location)

    def assign_walk(self, from_index: int, walk: Walk) -> None:
        """Record the conductor's decision that `walk` begins at chunk `from_index`. The first
        decision for an index stands.
        """
        self._walks.setdefault(from_index, walk)

    @property
    def num_held(self) -> int:
        """Number of chunks that have arrived and are not consumed."""
        return len(self._held)

    def peek(self) -> Arrived | None:
        """Return the next chunk if it has arrived and its walk is known."""
        arrived = self._held.get(self.consumed)
        if arrived is None or self.ended:
            return None
        chunk = arrived[0]
        if chunk.boundary and self._wait_for_walk and chunk.index not in self._walks:
            return None
        return arrived

    def take(self) -> tuple[Chunk, Location, Walk]:
        """Consume the chunk that `peek` returned; enter the next walk if the chunk begins a
        transition.
        """
        arrived = self.peek()
        assert arrived is not None, "take() without a chunk to take"
        chunk, location = arrived
        del self._held[self.consumed]
        if chunk.boundary:
            self.walk = self._walks.pop(chunk.index, chunk.walk or self.walk)
        self.consumed += 1
        self.ended = chunk.final
        return chunk, location, self.walk


class Reading:
    """How far a task's engine has read the chunks that were fed to it. `chunks`: number of chunks
    read, by input edge.
    """

    def __init__(self) -> None:
        self.chunks: dict[EdgeName, int] = {}
        self._num_pieces = 0
        self._fed: deque[tuple[EdgeName, int, int]] = deque()
        """Per chunk that is not read: its edge, and the chunks and pieces up to its end."""

    def add(self, edge: EdgeName, num_chunks: int, num_pieces: int) -> None:
        """Record that a chunk of `edge` was fed to the engine as `num_pieces` inputs. `num_chunks`:
        number of the edge's chunks consumed so far, with this chunk.
        """
        self._num_pieces += num_pieces
        self._fed.append((edge, num_chunks, self._num_pieces))

    def follow(self, num_unread: int) -> None:
        """Update `chunks` to what the engine has read. `num_unread`: number of the pieces fed last
        that the engine has yet to read.
        """
        while self._fed and self._fed[0][2] <= self._num_pieces - num_unread:
            edge, self.chunks[edge], _ = self._fed.popleft()
