"""Scheduling of requests for hidden states ("captures"), which a trainer uses, and the time that
they may take from other requests.

A step has either captures or other requests: so the time of captures is known, and no answer waits
for hidden states that only a trainer needs.
"""

import math
import time
from collections.abc import Callable, Collection, Sequence

import torch

from fleet.core.captures import INPUT_ROWS, LAST_ROWS, TAPS
from fleet.core.errors import BadInput
from fleet.engine.base import EngineOutput, EngineRequest
from fleet.engine.torch.layout import Extent
from fleet.engine.torch.passes import PassDone
from fleet.engine.torch.program import TaskT
from fleet.engine.torch.scheduled import Planned, ScheduledRequest

QUIET_S = 0.2
"""Captures run without a time limit once no other request could be computed for this time. Under
load the gaps between answers are shorter.
"""


class Captures:
    """Scheduling of captures, which are requests for hidden states, beside other requests.

    `share`: the share of the elapsed time that captures may take while other requests are computed;
    without other requests, captures are not limited. If `share` is None, captures are refused.
    `clock`: a monotonic clock, in seconds.
    """

    def __init__(self, share: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._share, self._clock = share, clock
        self._others_at_s = -math.inf  # when others were last computed
        self._next_s = -math.inf if share else math.inf  # when the next bounded pass may begin
        self._is_bounded = False

    def check(self, request: EngineRequest) -> None:
        """Raise BadInput if the request is a capture and this worker refuses captures."""
        if request.captured and self._share is None:
            raise BadInput(
                "this worker computes no captures: set training.enabled: true for the whole fleet",
                param="outputs",
            )

    def choose(
        self, requests: Collection[ScheduledRequest[TaskT]]
    ) -> Collection[ScheduledRequest[TaskT]]:
        """Return the requests from which the next step is chosen: all requests but captures; or one
        capture, if captures have not used up their share of time; or all captures, if there was no
        other work for `QUIET_S`.
        """
        captures = [each for each in requests if each.request.captured]
        others = [each for each in requests if not each.request.captured] if captures else requests
        now_s = self._clock()
        if any(each.running or each.can_begin() for each in others):
            self._others_at_s = now_s
        able, is_bounded = [each for each in captures if each.can_begin()], now_s < self._free_s()
        must_wait = is_bounded and (now_s < self._next_s or any(each.running for each in captures))
        if not able or must_wait:
            return others
        self._is_bounded = is_bounded
        return able[:1] if is_bounded else captures

    def due_in_s(self, requests: Collection[ScheduledRequest[TaskT]]) -> float:
        """Return the seconds until `choose` returns captures, provided that no other request is
        computed meanwhile; infinite if no capture waits.
        """
        if not any(each.request.captured and each.can_begin() for each in requests):
            return math.inf
        return max(0.0, min(self._next_s, self._free_s()) - self._clock())

    def _free_s(self) -> float:
        """Return the time, on the clock, from which captures run without a limit."""
        return self._others_at_s + QUIET_S

    def record(self, planned: Sequence[Planned[TaskT]], took_s: float) -> bool:
        """Count the time of a finished step against the captures' share; return True if the step
        computed captures.
        """
        is_of_captures = bool(planned) and bool(planned[0][0].request.captured)
        if is_of_captures and self._is_bounded and self._share:
            self._next_s = self._clock() + took_s * (1 / self._share - 1)
        return is_of_captures

    def outputs(
        self, scheduled: ScheduledRequest[TaskT], extent: Extent, done: PassDone
    ) -> Sequence[EngineOutput]:
        """Return the hidden states of a capture's positions that a step computed and that were not
        returned before; the output with the last position ends the request.
        """
        first, task = max(extent.start, scheduled.reported), scheduled.task
        if first >= extent.stop:
            return ()
        rows = {TAPS: done.features[id(extent)], LAST_ROWS: done.last[id(extent)]}
        if INPUT_ROWS in scheduled.request.captured:
            rows[INPUT_ROWS] = task.rows(extent.start, extent.stop)
        skipped = first - extent.start
        arrays = {
            name: rows[name][skipped:].to(torch.float32).cpu().contiguous().numpy()
            for name in scheduled.request.captured
        }
        final = scheduled.fed_final and extent.stop == task.num_rows
        return [
            EngineOutput(
                request_id=scheduled.request.request_id,
                walk=scheduled.walk,
                arrays=arrays,
                final=final,
            )
        ]
