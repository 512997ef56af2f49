"""View of a batch loop whose other layers are in span workers, for the worker around it."""

from collections.abc import Mapping, Sequence, Sized
from typing import Generic

from fleet.core.errors import FleetError
from fleet.core.ids import RequestId
from fleet.engine.torch.pass_queue import PassQueue
from fleet.engine.torch.program import TaskT
from fleet.engine.torch.scheduled import ScheduledRequest


class RemoteLayers(Generic[TaskT]):
    """Implements `RemotePasses` and `BackgroundWork` for one batch loop. `running`: steps that the
    loop has begun and not completed.
    """

    def __init__(
        self,
        passes: PassQueue[TaskT],
        requests: Mapping[RequestId, ScheduledRequest[TaskT]],
        running: Sized,
    ) -> None:
        self._passes = passes
        self._requests = requests
        self._running = running

    def await_pass(self, timeout_s: float) -> bool:
        self._passes.follow_route()
        return bool(self._running) and self._passes.await_ended(timeout_s)

    def accepts_requests(self) -> bool:
        return self._passes.is_open

    def outage(self) -> FleetError | None:
        return self._passes.outage()

    def take_suspects(self) -> Sequence[RequestId]:
        suspects = {id(task) for task in self._passes.take_suspects()}
        return [
            request
            for request, scheduled in self._requests.items()
            if id(scheduled.task) in suspects
        ]
