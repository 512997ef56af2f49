"""What two workers need before one reads the memory of the other: network access, and the same
secret.
"""

from dataclasses import dataclass
from pathlib import Path

from fleet.config import FleetConfig
from fleet.core.ids import WorkerId
from fleet.process.fleet_secret import FleetSecret, Record, read_fleet_secret
from fleet.transfer.base import Transfer
from fleet.transfer.reach import LOCAL, Reach, reach_of

LOCAL_REACH, NETWORK_REACH = "host", "network"


@dataclass(frozen=True, slots=True)
class PeerAccess:
    """Rules by which peers access a worker's memory. `reach`: network access of peers. `secret`:
    secret that signs the worker's record in Redis, or None if records are not signed.
    """

    reach: Reach = LOCAL
    secret: FleetSecret | None = None

    def listening_place(self, config: FleetConfig) -> str | Path:
        """Return where this worker accepts connections: an address of the network that
        `transfer.interface` names, or the folder of Unix sockets, which only processes of this user
        on this host can connect to.
        """
        return self.reach.address if self.reach.devices else config.sockets_dir

    def record(
        self, worker: WorkerId, role: str, fields: Record, transfer: Transfer
    ) -> dict[str, str | bytes]:
        """Return the record that a worker registers in Redis: `fields`, its transfer's metadata and
        reach, and a MAC if there is a secret.
        """
        metadata = transfer.metadata()
        record: dict[str, str | bytes] = {**fields, "role": role, "transfer": metadata}
        if metadata:
            record |= {
                "reach": NETWORK_REACH if self.reach.devices else LOCAL_REACH,
                "place": self.reach.place,
            }
        return self.secret.signed(worker, record) if self.secret else record


def read_peer_access(config: FleetConfig) -> PeerAccess:
    """Return the access of peers as configured. Raises: ConfigError naming `transfer.interface` or
    `security.fleet_secret`.
    """
    transfer, security = config.transfer, config.security
    uses_network = transfer.kind != "redis"
    reach = (
        reach_of(transfer.interface, allow_public=security.allow_public_transfer)
        if uses_network
        else LOCAL
    )
    return PeerAccess(
        reach,
        read_fleet_secret(security.fleet_secret) if security.fleet_secret is not None else None,
    )
