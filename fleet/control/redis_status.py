"""State of Redis as a gateway sees it: whether it accepts writes, and whether its memory has room
for new requests.
"""

import logging
from collections.abc import Mapping
from typing import cast

from redis.asyncio import Redis

from fleet.control.outage import Outage
from fleet.core.errors import RedisUnreachable

log = logging.getLogger(__name__)

RETRY_FULL_S = 10


def memory_of(info: Mapping[str, int]) -> tuple[int, int]:
    """Return (used, limit) in bytes from `INFO memory`: the memory that Redis counts against its
    `maxmemory`, and `maxmemory` itself (0: no limit).
    """
    return info["used_memory"] - info.get("mem_not_counted_for_evict", 0), info["maxmemory"]


class RedisStatus:
    """State of Redis for one gateway: whether it accepts writes and has memory for new requests.
    `writes`: outage of the gateway's writes, updated by each renewal of its lease.
    """

    def __init__(self, client: Redis, max_memory_percent: float) -> None:
        self._redis = client
        self._max_percent = max_memory_percent
        self.writes = Outage("this gateway")
        self._full = ""

    @property
    def trouble(self) -> str:
        """Reason why requests cannot be admitted, with the remedy; "" if they can be."""
        return self.writes.cause or self._full

    async def read_memory(self) -> None:
        """Read the memory use of Redis, and compare it with the configured percentage of its
        `maxmemory`. Raises: redis-py's errors.
        """
        used, most = memory_of(cast("dict[str, int]", await self._redis.info("memory")))
        percent = 100 * used / most if most else 0.0
        was_full = bool(self._full)
        self._full = self._describe(used, most) if most and percent >= self._max_percent else ""
        if self._full and not was_full:
            log.warning("new requests are refused: %s", self._full)
        elif was_full and not self._full:
            log.warning(
                "new requests are admitted again: Redis uses %.0f %% of its maxmemory", percent
            )

    def _describe(self, used: int, most: int) -> str:
        return (
            f"Redis uses {used / 2**20:.1f} of its {most / 2**20:.1f} MiB, and "
            "limits.max_redis_memory_percent reserves what is "
            f"beyond {self._max_percent:g} % for running requests: raise its maxmemory, or wait "
            "until ended requests expire"
        )

    def check_memory(self) -> None:
        """Check that Redis had room for a new request at the last `read_memory`. Raises:
        RedisUnreachable if not.
        """
        if self._full:
            raise RedisUnreachable(self._full, retry_after_s=RETRY_FULL_S)
