"""Everything that one worker is made of: its parts read it, and nothing changes it."""

from collections.abc import Mapping
from dataclasses import dataclass

import redis

from fleet.config import FleetConfig
from fleet.config.roles import Role
from fleet.control.outage import Outage
from fleet.core.ids import RoleName, StageName, WorkerId
from fleet.engine.base import Engine
from fleet.graphs import Graph
from fleet.spans.route.entry import AnchorRoute
from fleet.stages.base import BuiltStage
from fleet.transfer.base import Transfer
from fleet.worker.process.peers import PeerAccess
from fleet.worker.process.redis_link import RedisLink


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What a worker process has loaded and configured, shared by its successive incarnations.

    `config`: configuration narrowed to the role. `fingerprint`: hash of the checkpoint that the
    stage was built from. `fingerprint` and `dtype` are "" if there is no checkpoint. `route`:
    settings of the route to span workers if this worker is an anchor, else None.
    """

    config: FleetConfig
    role: RoleName
    built: BuiltStage
    access: PeerAccess
    fingerprint: str = ""
    device: str = ""
    dtype: str = ""
    route: AnchorRoute | None = None

    @property
    def serves(self) -> Role:
        return self.config.role(self.role)

    @property
    def stage(self) -> StageName:
        return self.serves.stage

    @property
    def is_split(self) -> bool:
        return self.config.stage(self.stage).split is not None

    @property
    def record_fields(self) -> Mapping[str, str | bytes]:
        """Fields that only an anchor adds to its worker's record in Redis."""
        return self.route.record_fields if self.route is not None else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """Settings, id, connections and transfer of one incarnation of a worker. `lease_us`: lease with
    which it registers; the configured lease if None.
    """

    settings: WorkerSettings
    worker: WorkerId
    client: redis.Redis
    transfer: Transfer
    link: RedisLink
    outage: Outage | None = None
    lease_us: int | None = None

    @property
    def config(self) -> FleetConfig:
        return self.settings.config

    @property
    def graph(self) -> Graph:
        return self.settings.config.graph_declaration()

    @property
    def stage(self) -> StageName:
        return self.settings.stage

    @property
    def engine(self) -> Engine:
        return self.settings.built.engine
