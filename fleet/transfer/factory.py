"""Choice of a worker's transfer. NIXL is imported only when a NIXL transfer is opened, so that a
fleet without NIXL starts.
"""

import logging

from fleet.core.errors import ConfigError, TransferError
from fleet.core.ids import WorkerId
from fleet.transfer.base import Transfer
from fleet.transfer.inline import InlineTransfer
from fleet.transfer.nixl import NixlTransfer
from fleet.transfer.reach import LOCAL, Reach

log = logging.getLogger(__name__)


def open_transfer(
    kind: str, agent: WorkerId, arena_bytes: int, request_cap_bytes: int, reach: Reach = LOCAL
) -> Transfer:
    """Open a worker's transfer. `kind`: `nixl`, `redis` (inline in chunk headers), or `auto` (NIXL
    where it starts, else inline). `request_cap_bytes`: largest part of the arena for one request;
    `reach`: peers that may connect.

    Raises: ConfigError for any other kind, or for `nixl` where NIXL does not start.
    """
    if kind == "redis":
        return InlineTransfer(agent, arena_bytes, request_cap_bytes)
    if kind not in ("auto", "nixl"):
        raise ConfigError(
            f"transfer.kind is {kind!r}; use auto, nixl or redis", param="transfer.kind"
        )
    try:
        return NixlTransfer(agent, arena_bytes, request_cap_bytes, reach)
    except (ImportError, TransferError) as error:
        if kind == "nixl":
            raise ConfigError(
                f"transfer.kind is nixl, but NIXL does not start here ({error}); install nixl "
                "or use redis",
                param="transfer.kind",
            ) from error
        log.warning(
            "NIXL does not start here (%s); %s sends tensors inline through Redis, which is slower",
            error,
            agent,
        )
        return InlineTransfer(agent, arena_bytes, request_cap_bytes)
