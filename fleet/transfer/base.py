"""The contract of a transfer: publish a tensor's bytes, pull them elsewhere. NIXL and the inline twin pass the same tests."""

from collections.abc import Sequence
from typing import Protocol

from fleet.core.chunk import TensorRef, WireTensor
from fleet.core.ids import RequestId, WorkerId
from fleet.core.pages import Memory, Span


class Pull(Protocol):
    """A read under way. Poll it; never wait on it in the engine's loop."""

    def poll(self) -> bytes | None:
        """The verified bytes once they are here, else None. Raises: TransferError on deadline, checksum or generation."""
        ...

    def cancel(self) -> None:
        """The bytes are not wanted any more: free their destination as soon as that is safe. Idempotent.

        A read that is neither polled nor cancelled is given up at its deadline.
        """
        ...


class BlockRead(Protocol):
    """A read of blocks under way. Poll it; never wait on it in the engine's loop.

    What arrives is not checked, for blocks bear neither generation nor checksum: whoever lends them keeps them unchanged until
    the reader has said that it is done, and the reader uses them only if they were still lent then.
    """

    @property
    def settled(self) -> bool:
        """Whether nothing is written to the destination any more: until then it may be used for nothing else."""
        ...

    def poll(self) -> bool:
        """Whether every block is in its place. Raises: TransferError on deadline, or when the peer is gone."""
        ...

    def cancel(self) -> None:
        """The blocks are not wanted any more. Idempotent. A read that is not polled is given up at its deadline."""
        ...


class Transfer(Protocol):
    """One worker's end. Not thread-safe.

    Memory: `publish` copies into a slot of an arena registered once at start. The slots of a request are freed by `release`.
    """

    def register(self, memory: Memory) -> bool:
        """Let peers read blocks from this memory, and read theirs into it. Whether that is possible here.

        Comes before `metadata`, and before anything is pulled.
        """
        ...

    @property
    def shares_memory(self) -> bool:
        """Whether some was registered."""
        ...

    def metadata(self) -> bytes:
        """What peers need in order to pull from here; kept in the worker's Redis hash. Never a pickle that we load."""
        ...

    def publish(self, request: RequestId, dtype: str, shape: tuple[int, ...], data: bytes | memoryview) -> WireTensor:
        """Make a tensor pullable. Raises: TransferError when the arena (or the request's cap) is full."""
        ...

    def pull(self, ref: TensorRef, peer_metadata: bytes, deadline_s: float) -> Pull:
        """Begin reading a tensor from a peer's arena, to be given up `deadline_s` seconds from now.

        Raises: TransferError when the peer is gone or no destination is free.
        """
        ...

    def connect(self, peer: WorkerId, peer_metadata: bytes) -> None:
        """Prepare for reads from a peer, which would else be done at the first. Takes a while. Raises: TransferError."""
        ...

    def read_blocks(self, peer: WorkerId, peer_metadata: bytes, spans: Sequence[Span], deadline_s: float) -> BlockRead:
        """Begin reading blocks from a peer's registered memory into ours, to be given up `deadline_s` seconds from now.

        Raises: TransferError when the peer is gone.
        """
        ...

    def release(self, request: RequestId) -> None:
        """Free every slot of the request. Idempotent."""
        ...

    def stalled_peers(self) -> list[WorkerId]:
        """Peers that hold up the destination of a read that was given up: one that is gone for good is to be forgotten."""
        ...

    def forget_peer(self, peer: WorkerId) -> None:
        """The peer is gone for good: drop its agent and free the destinations quarantined on its account."""
        ...

    def used_slots(self) -> int:
        """Slots held now; 0 when nothing is in flight."""
        ...

    def used_bytes(self) -> int:
        """Of the arena, held now."""
        ...

    @property
    def registered_bytes(self) -> int:
        """Memory that peers may read, or that theirs is read into."""
        ...

    @property
    def backend(self) -> str:
        """What carries the bytes, for people to read."""
        ...

    def close(self) -> None: ...
