"""Which payloads between the processes of a route are read by NIXL, by the configuration and what
this process has.
"""

from fleet.config import FleetConfig
from fleet.core.ids import StageName
from fleet.spans.net.ring import MIN_BLOCK_BYTES, BlockReads, nixl_starts
from fleet.transfer.reach import Reach, copies_between_processes, has_rdma


def block_reads(config: FleetConfig, stage: StageName, reach: Reach) -> BlockReads | None:
    """Return None if all payloads of a stage's route travel on its connections.

    Unless the configuration has a size, so they do where NIXL would copy by TCP too, and more
    slowly: over a network without RDMA, and on a host whose kernel permits no copies between
    processes.
    """
    spans = config.stage(stage).spans
    if spans is None or config.transfer.kind == "redis":
        return None
    default = (
        MIN_BLOCK_BYTES if (has_rdma() if reach.devices else copies_between_processes()) else 0
    )
    min_bytes = default if spans.nixl_kib is None else spans.nixl_kib << 10
    return (
        BlockReads(min_bytes=min_bytes, reach=reach) if min_bytes and nixl_starts(reach) else None
    )
