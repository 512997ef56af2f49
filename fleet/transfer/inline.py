"""Transfer without NIXL: a tensor's bytes are sent in its chunk header, through Redis, and counted
as if in an arena.
"""

from collections.abc import Sequence

from fleet.core.chunk import TensorRef, WireTensor
from fleet.core.errors import TransferError
from fleet.core.ids import RequestId, WorkerId
from fleet.core.pages import Memory, Span
from fleet.transfer.arena import Arena
from fleet.transfer.base import BlockRead, Pull
from fleet.transfer.memory import flat_bytes

REDIS = "redis"
"""Value of `Transfer.backend` for this transport."""


class InlineTransfer:
    """Implements `base.Transfer` without pulls. Applies the size limits of an arena, so that both
    implementations refuse the same tensors.
    """

    def __init__(self, agent: WorkerId, arena_bytes: int, request_cap_bytes: int) -> None:
        self.agent = agent
        self.arena = Arena(capacity_bytes=arena_bytes, request_cap_bytes=request_cap_bytes)

    def register(self, memory: Memory) -> bool:
        return False

    @property
    def shares_memory(self) -> bool:
        return False

    def metadata(self) -> bytes:
        return b""

    def publish(
        self, request: RequestId, dtype: str, shape: tuple[int, ...], data: bytes | memoryview
    ) -> WireTensor:
        source = flat_bytes(dtype, shape, data)
        self.arena.allocate(source.nbytes, request)
        return WireTensor(dtype=dtype, shape=shape, data=bytes(source))

    def pull(self, ref: TensorRef, peer_metadata: bytes, deadline_s: float) -> Pull:
        raise TransferError(
            f"{ref.agent} published a tensor by NIXL, which {self.agent} does not run; set "
            "transfer.kind alike for every worker"
        )

    def connect(self, peer: WorkerId, peer_metadata: bytes) -> None:
        """Do nothing, since this transfer never reads from peers."""

    def read_blocks(
        self, peer: WorkerId, peer_metadata: bytes, spans: Sequence[Span], deadline_s: float
    ) -> BlockRead:
        raise TransferError(
            f"{peer} lends blocks by NIXL, which {self.agent} does not run; set transfer.kind "
            "alike for every worker"
        )

    def release(self, request: RequestId) -> None:
        self.arena.free_request(request)

    def peers(self) -> list[WorkerId]:
        return []

    def stalled_peers(self) -> list[WorkerId]:
        return []

    def forget_peer(self, peer: WorkerId) -> None:
        """Do nothing: peers hold no resources here."""

    def used_slots(self) -> int:
        return self.arena.used_slots

    def used_bytes(self) -> int:
        return self.arena.used_bytes

    @property
    def registered_address(self) -> int:
        return 0

    @property
    def registered_bytes(self) -> int:
        return 0

    @property
    def backend(self) -> str:
        return REDIS

    def close(self) -> bool:
        """Do nothing: nothing is open."""
        return True
