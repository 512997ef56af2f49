"""How far the producer of an edge may be ahead of its consumer. Pure; knows no edge."""

from dataclasses import dataclass

MAX_ACK_STRIDE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Credits:
    """Largest amount that a producer may have sent and its consumer not yet acknowledged: number of
    chunks, and their bytes. None: no bound.

    A consumer acknowledges at the latest when it has read a quarter of either bound, so that read
    chunks do not block the producer. A task without credit continues once half of both bounds is
    free.
    """

    chunks: int | None = None
    num_bytes: int | None = None

    @property
    def ack_stride(self) -> int:
        """Number of chunks after which a consumer acknowledges."""
        return max(1, min(MAX_ACK_STRIDE, (self.chunks or 4 * MAX_ACK_STRIDE) // 4))

    @property
    def ack_stride_bytes(self) -> int | None:
        """Number of bytes after which a consumer acknowledges; None if bytes are not bounded."""
        return self.num_bytes // 4 if self.num_bytes is not None else None
