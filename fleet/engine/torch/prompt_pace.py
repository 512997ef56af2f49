"""Number of prompt rows in a step, where steps are captured as graphs: while other requests decode,
the number is limited for a short step. Knows no model and no scheduling.

The rows of a captured step are padded to the next of a few numbers, the buckets, so the time of a
step is measured for each bucket.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MAX_STEP_S = 0.02
"""Longest time in seconds that a step with prompt rows is to take while other requests decode. A
codec frame lasts 80 ms, so that speech is produced faster than it is played even if every step has
prompt rows.
"""
NEWEST_SHARE = 0.25
"""Share of the newest step in the mean time of a bucket."""
RETRY_S = 60.0
"""Seconds after which a bucket whose steps were too slow is tried again. It may have been slow only
because another process used the GPU.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _BucketTime:
    """Mean time of a bucket's steps in seconds, and the time at which the newest one ended."""

    mean_s: float
    ended_s: float


class PromptPace:
    """Measured times of steps with prompt rows, and the number of rows that follows from them.

    `buckets`: numbers of rows to which steps are padded; empty where steps are not captured, and
    rows then have no limit. `clock`: a monotonic clock in seconds.
    """

    def __init__(self, buckets: Sequence[int], clock: Callable[[], float] = time.monotonic) -> None:
        self._buckets, self._clock = sorted(buckets), clock
        self._times: dict[int, _BucketTime] = {}
        self._is_idle = True  # nothing is left on the device from an earlier step

    def max_rows(self) -> int | None:
        """Return the largest number of prompt rows in a step beside decoding requests, a bucket;
        None without a limit.

        This is the largest bucket whose steps are short enough, or the next one if its time is
        unknown, so that larger buckets are tried one after the other.
        """
        if not self._buckets:
            return None
        short = [
            number
            for number, bucket in enumerate(self._buckets)
            if bucket in self._times and self._times[bucket].mean_s <= MAX_STEP_S
        ]
        following = short[-1] + 1 if short else 0
        is_tried = following < len(self._buckets) and not self._is_slow(self._buckets[following])
        return self._buckets[following if is_tried else max(0, following - 1)]

    def _is_slow(self, bucket: int) -> bool:
        measured = self._times.get(bucket)
        return (
            measured is not None
            and measured.mean_s > MAX_STEP_S
            and self._clock() - measured.ended_s <= RETRY_S
        )

    def record(self, num_rows: int, took_s: float, *, has_sampled: bool) -> None:
        """Record the time of a step with `num_rows` prompt rows.

        A step that samples nothing ends for the host before the device has computed it, so neither
        its time nor the next step's is used.
        """
        was_idle, self._is_idle = self._is_idle, has_sampled
        bucket = next((each for each in self._buckets if each >= num_rows), None)
        if not (num_rows and was_idle and has_sampled) or bucket is None:
            return
        now_s, before = self._clock(), self._times.get(bucket)
        if before is not None and now_s - before.ended_s <= RETRY_S:
            took_s = before.mean_s + NEWEST_SHARE * (took_s - before.mean_s)
        self._times[bucket] = _BucketTime(mean_s=took_s, ended_s=now_s)


def divided_rows(wanted: Sequence[int], num_rows: int) -> list[int]:
    """Divide the rows of a step among requests, the oldest first: equal shares, and what a request
    does not want goes to the others. `wanted`: number of rows that each request could compute.

    With fewer rows than requests, each of the oldest gets one.
    """
    sharing = min(len(wanted), num_rows)
    shares, left = [0] * len(wanted), num_rows
    order = sorted(range(sharing), key=lambda at: wanted[at])
    for served, at in enumerate(order):
        shares[at] = min(wanted[at], left // (sharing - served))
        left -= shares[at]
    return shares
