"""Spacing of a process's round trips to Redis under load."""

import time
from collections.abc import Callable

PACED_ANSWERS, PACE_S = 32, 0.004


class Pacing:
    """Minimum spacing of a process's round trips to Redis. With `PACED_ANSWERS` or more answers in
    progress, round trips begin at least `PACE_S` seconds apart, so that each carries the writes and
    notices of several answers, and Redis and the process need less time per chunk.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_s = 0.0

    def wait_s(self, num_answers: int) -> float:
        """Return the seconds to wait before the next round trip. `num_answers`: number of answers
        in progress.
        """
        if num_answers < PACED_ANSWERS:
            return 0.0
        now_s = self._clock()
        wait_s = max(0.0, self._next_s - now_s)
        self._next_s = now_s + wait_s + PACE_S
        return wait_s
