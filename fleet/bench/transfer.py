"""Transfer benchmark: tensor reads between two processes, from a few rows to those of a long prompt."""

import msgspec

SIZES_BYTES = (4 * 1024, 64 * 1024, 1024 * 1024, 16 * 1024 * 1024)


class TransferSpeed(msgspec.Struct, frozen=True, kw_only=True):
    num_bytes: int
    p50_us: float
    gb_per_s: float


class TransferResult(msgspec.Struct, frozen=True, kw_only=True):
    reads: tuple[TransferSpeed, ...]


def measure_transfer() -> TransferResult:
    """Raises: ConfigError where NIXL does not start, TransferError if a read fails."""
    from fleet.transfer.measure import measure_reads

    speeds = measure_reads(SIZES_BYTES)
    return TransferResult(
        reads=tuple(TransferSpeed(num_bytes=speed.num_bytes, p50_us=speed.p50_us, gb_per_s=speed.gb_per_s) for speed in speeds)
    )
