"""The contract of a transfer: publish a tensor's bytes, pull them elsewhere. NIXL and the inline twin pass the same tests."""

from typing import Protocol

from fleet.core.chunk import TensorRef, WireTensor
from fleet.core.ids import RequestId, WorkerId


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


class Transfer(Protocol):
    """One worker's end. Not thread-safe.

    Memory: `publish` copies into a slot of an arena registered once at start. The slots of a request are freed by `release`.
    """

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

    def release(self, request: RequestId) -> None:
        """Free every slot of the request. Idempotent."""
        ...

    def forget_peer(self, peer: WorkerId) -> None:
        """The peer is gone for good: drop its agent and free the destinations quarantined on its account."""
        ...

    def used_slots(self) -> int:
        """Slots held now; 0 when nothing is in flight."""
        ...

    def close(self) -> None: ...
