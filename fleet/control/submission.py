"""Script calls that write a request of a deployment: its submission, and its restoration after
Redis lost it. Sends nothing.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from fleet.config import FleetConfig
from fleet.config.api_keys import NO_LIMITS, KeyLimits
from fleet.control import scripts
from fleet.control.waiting import Applicant, client_key, limits_of
from fleet.core.ids import EdgeName, Epoch, RequestId, RoleName, StageName, WorkerId
from fleet.core.request import RequestSpec


class _Parts(NamedTuple):
    """Parts of the deployment that a request uses. `audio`: client edges of the request with audio.
    `first_roles`: role to which each stage's task is granted first.
    """

    stages: list[StageName]
    edges: list[EdgeName]
    audio: list[EdgeName]
    first_roles: list[RoleName]


class SubmissionCalls:
    """Builder of the calls of `submit`, `restore` and `admission` for one deployment."""

    def __init__(self, config: FleetConfig) -> None:
        self._config = config
        self._graph = config.graph_declaration()
        self.grace_us = int(config.lease.no_worker_timeout_s * 1e6)

    def submit(
        self,
        spec: RequestSpec,
        blob: bytes | None,
        gateway: WorkerId,
        client: str,
        waits: scripts.Waits,
        limits: KeyLimits = NO_LIMITS,
        ordered_by: str | None = None,
    ) -> scripts.Call:
        parts = self._parts_of(spec)
        return scripts.submit(
            spec,
            blob,
            bound=self._config.limits.max_requests,
            stages=parts.stages,
            roles=self.roles_of(parts.stages),
            grace_us=self.grace_us,
            edges=parts.edges,
            gateway=gateway,
            audio=parts.audio,
            retention_s=self._config.retention_s,
            first_roles=parts.first_roles,
            client=client,
            waits=waits,
            limits=limits,
            ordered_by=ordered_by,
        )

    def restore(
        self, spec: RequestSpec, blob: bytes | None, gateway: WorkerId, epoch: Epoch, client: str
    ) -> scripts.Call:
        parts = self._parts_of(spec)
        return scripts.restore(
            spec,
            blob,
            epoch=epoch,
            stages=parts.stages,
            edges=parts.edges,
            gateway=gateway,
            audio=parts.audio,
            retention_s=self._config.retention_s,
            first_roles=parts.first_roles,
            client=client,
        )

    def admission(
        self,
        request: RequestId,
        roles: Sequence[RoleName],
        gateway: WorkerId,
        applicant: Applicant | None,
        waits: scripts.Waits,
    ) -> scripts.Call:
        return scripts.admission(
            request,
            bound=self._config.limits.max_requests,
            gateway=gateway,
            roles=roles,
            grace_us=self.grace_us,
            client=client_key(applicant),
            waits=waits,
            key=applicant.key if applicant is not None else "",
            limits=limits_of(applicant),
        )

    def roles_of_request(self, spec: RequestSpec) -> list[RoleName]:
        """Return the roles of the stages that a request runs."""
        return self.roles_of(self._graph.stages_of(spec))

    def roles_for(self, outputs: tuple[EdgeName, ...]) -> list[RoleName]:
        """Return the roles of the stages that a request for the client edges `outputs`, with audio
        in its prompt, would run.
        """
        return self.roles_of(self._graph.stages_for(outputs))

    def roles_of(self, stages: Collection[StageName]) -> list[RoleName]:
        """Return the roles of `stages`, in the order of the deployment's roles."""
        return [role.name for role in self._config.roles() if role.stage in stages]

    def _parts_of(self, spec: RequestSpec) -> _Parts:
        stages = list(self._graph.stages_of(spec))
        return _Parts(
            stages=stages,
            edges=[edge.name for edge in self._graph.edges_of(spec)],
            audio=[edge for edge in spec.outputs if self._graph.media.get(edge) == "audio"],
            first_roles=[self._config.roles_of(stage)[0].name for stage in stages],
        )
