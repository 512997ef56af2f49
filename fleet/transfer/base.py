"""Interface of a transfer between two workers: one publishes a tensor's bytes, the other pulls
them. Two implementations, `nixl` and `inline`, pass the same tests.
"""

from collections.abc import Sequence
from typing import Protocol

from fleet.core.chunk import TensorRef, WireTensor
from fleet.core.ids import RequestId, WorkerId
from fleet.core.pages import Memory, Span


class Pull(Protocol):
    """A read of one tensor in progress. Poll it; the engine's loop never waits for it."""

    def poll(self) -> bytes | None:
        """Return the tensor's bytes, verified, once they have arrived, else None. Raises:
        TransferError at the deadline or if the bytes are not the published ones.
        """
        ...

    def cancel(self) -> None:
        """Abandon the read: its destination is freed as soon as that is safe. Idempotent.

        A read that is neither polled nor cancelled is abandoned at its deadline.
        """
        ...


class BlockRead(Protocol):
    """A read of KV blocks in progress. Poll it; the engine's loop never waits for it.

    The bytes are not verified, since blocks have neither generation nor checksum: the lender keeps
    them unchanged until the reader confirms, and the reader uses them only if they were still lent
    then.
    """

    @property
    def settled(self) -> bool:
        """True once nothing can write to the destination any more; until then the destination must
        not be used for anything else.
        """
        ...

    def poll(self) -> bool:
        """Return True once every block has arrived. Raises: TransferError on deadline, or when the
        peer is gone.
        """
        ...

    def cancel(self) -> None:
        """Abandon the read. Idempotent. A read that is not polled is abandoned at its deadline."""
        ...


class Transfer(Protocol):
    """A worker's end of the transfer of tensors to and from its peers. Not thread-safe.

    Memory: `publish` copies a tensor into a slot of an arena, which is registered once at the
    start. `release` frees the slots of a request.
    """

    def register(self, memory: Memory) -> bool:
        """Allow peers to read blocks from this memory, and reads of blocks to write into it; return
        False if this transfer cannot.

        Call before `metadata` and before any pull.
        """
        ...

    @property
    def shares_memory(self) -> bool:
        """True if `register` has registered memory."""
        ...

    def metadata(self) -> bytes:
        """Return the metadata that peers need to read from this worker, stored in the worker's
        Redis hash. Never loaded as a pickle.
        """
        ...

    def publish(
        self, request: RequestId, dtype: str, shape: tuple[int, ...], data: bytes | memoryview
    ) -> WireTensor:
        """Make a tensor available to peers; return its reference, or the tensor itself where the
        transfer sends it inline. Raises: ArenaFull when the arena has no room at present;
        TransferError when the tensor is larger than the arena, or the request exceeds its cap.
        """
        ...

    def pull(self, ref: TensorRef, peer_metadata: bytes, deadline_s: float) -> Pull:
        """Begin to read a tensor from a peer's arena, with a deadline `deadline_s` seconds from
        now.

        Raises: ArenaFull when no destination is free; TransferError when the peer is gone.
        """
        ...

    def connect(self, peer: WorkerId, peer_metadata: bytes) -> None:
        """Connect to a peer ahead of the first read. May take 0.2 s. Raises: TransferError."""
        ...

    def read_blocks(
        self, peer: WorkerId, peer_metadata: bytes, spans: Sequence[Span], deadline_s: float
    ) -> BlockRead:
        """Begin to read blocks of a peer's registered memory into local memory, with a deadline
        `deadline_s` seconds from now.

        Raises: TransferError when the peer is gone.
        """
        ...

    def release(self, request: RequestId) -> None:
        """Free every slot of the request. Idempotent."""
        ...

    def peers(self) -> list[WorkerId]:
        """Return the peers to which there is a connection; call `forget_peer` for a peer that is
        gone for good.
        """
        ...

    def stalled_peers(self) -> list[WorkerId]:
        """Return the peers whose abandoned reads still occupy a destination."""
        ...

    def forget_peer(self, peer: WorkerId) -> None:
        """End the connection to a peer that is gone for good, in the background. Its reads fail;
        their destinations are freed once nothing can write to them any more. No further read from
        the peer begins.
        """
        ...

    def used_slots(self) -> int:
        """Return the number of slots in use; 0 when nothing is published or being read."""
        ...

    def used_bytes(self) -> int:
        """Return the bytes of the arena in use."""
        ...

    @property
    def registered_address(self) -> int:
        """Address of the first byte that peers may read; 0 if peers may read nothing."""
        ...

    @property
    def registered_bytes(self) -> int:
        """Size of the memory that peers may read or that is read into."""
        ...

    @property
    def backend(self) -> str:
        """Name of the transport (for example `redis`), for display."""
        ...

    def close(self) -> bool:
        """Close every connection. Return False, after some seconds, if a connection cannot be
        closed: memory into which this connection reads must not be used for anything else before
        the process ends.
        """
        ...
