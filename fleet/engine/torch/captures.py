"""Requests whose computed rows are returned instead of draws, to train on, and the time that they may take from others.

A pass has either captures or other requests: so its time is known, and no answer waits for rows that only a trainer needs.
"""

from collections.abc import Collection, Sequence

import torch

from fleet.core.captures import INPUT_ROWS, LAST_ROWS, TAPS
from fleet.core.errors import BadInput
from fleet.engine.base import EngineOutput, EngineRequest
from fleet.engine.torch.layout import Extent
from fleet.engine.torch.passes import PassDone
from fleet.engine.torch.program import TaskT
from fleet.engine.torch.scheduled import Planned, ScheduledRequest

MOST_CREDIT_S = 0.25


class Captures:
    """`share`: of the time of other passes, which captures may use while others could run; without others they run freely.

    None: captures are refused.
    """

    def __init__(self, share: float | None) -> None:
        self._share = share
        self._credit_s = 0.0
        self._delayed_others = False

    def check(self, request: EngineRequest) -> None:
        """Raise BadInput for a capture where they are refused."""
        if request.captured and self._share is None:
            raise BadInput("this worker computes no captures: set training.enabled: true for the whole fleet", param="outputs")

    def choose(self, requests: Collection[ScheduledRequest[TaskT]]) -> Collection[ScheduledRequest[TaskT]]:
        """Return the requests of the next pass: others before captures, except within the share of time."""
        captures = [each for each in requests if each.request.captured]
        if not captures:
            return requests
        others = [each for each in requests if not each.request.captured]
        self._delayed_others = any(each.can_begin() for each in others)
        if self._delayed_others and (self._credit_s <= 0 or not any(each.can_begin() for each in captures)):
            return others
        return captures

    def record(self, planned: Sequence[Planned[TaskT]], took_s: float) -> bool:
        """Count the time of a pass; return True if it had captures."""
        is_of_captures = bool(planned) and bool(planned[0][0].request.captured)
        if not is_of_captures:
            self._credit_s = min(MOST_CREDIT_S, self._credit_s + (self._share or 0.0) * took_s)
        elif self._delayed_others:
            self._credit_s -= took_s
        return is_of_captures

    def outputs(self, scheduled: ScheduledRequest[TaskT], extent: Extent, done: PassDone) -> Sequence[EngineOutput]:
        """Return the rows of a pass that were not returned before; the last ones end the request."""
        first, task = max(extent.start, scheduled.reported), scheduled.task
        if first >= extent.stop:
            return ()
        rows = {TAPS: done.features[id(extent)], LAST_ROWS: done.last[id(extent)]}
        if INPUT_ROWS in scheduled.request.captured:
            rows[INPUT_ROWS] = task.rows(extent.start, extent.stop)
        skipped = first - extent.start
        arrays = {name: rows[name][skipped:].to(torch.float32).cpu().contiguous().numpy() for name in scheduled.request.captured}
        final = scheduled.fed_final and extent.stop == task.num_rows
        return [EngineOutput(request_id=scheduled.request.request_id, walk=scheduled.walk, arrays=arrays, final=final)]
