"""The part of `FleetClient` that the gateway uses; tests implement it in memory. Knows no Redis and
no HTTP.
"""

from typing import Protocol

from fleet.control.client import (
    AlertStore,
    GatewayRequests,
    JobClient,
    LoginStore,
    Operations,
    ResponseStore,
    Telemetry,
    TrainingClient,
    VoiceStore,
)


class FleetPort(Protocol):
    """Interface of the control-plane client, in parts by subject. Every method of a part may raise
    RedisUnreachable.
    """

    @property
    def id(self) -> str: ...
    @property
    def requests(self) -> GatewayRequests: ...
    @property
    def telemetry(self) -> Telemetry: ...
    @property
    def operations(self) -> Operations: ...
    @property
    def jobs(self) -> JobClient: ...
    @property
    def voice(self) -> VoiceStore: ...
    @property
    def logins(self) -> LoginStore: ...
    @property
    def alerts(self) -> AlertStore: ...
    @property
    def responses(self) -> ResponseStore: ...
    @property
    def training(self) -> TrainingClient: ...
