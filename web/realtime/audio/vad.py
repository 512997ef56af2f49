"""Voice activity of all sessions of a gateway, classified in batches. Knows no turn."""

import asyncio
import time
from collections.abc import Callable

from fleet.processing.base import Samples
from fleet.processing.voice_activity import FRAME_MS, VadState, speech_probabilities

GATHER_S = 0.012
"""Seconds between two batches. A frame is 32 ms long, so that of fifty streams about twenty share a
batch.
"""
AHEAD_S = 0.1
"""Seconds ahead of real time from which a stream, such as a recording, does not wait for the next
batch.
"""


class VadBatcher:
    """Runs the voice detection model in batches for the streams of one event loop, with one batch
    per `GATHER_S`. Batches need a third of the time of single frames.

    A single live stream never waits; many streams wait for the next batch. A stream that is behind
    or ahead of real time, such as a recording, starts the batch immediately, with all frames that
    wait, so that a gateway that falls behind does not need more time per frame.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: list[tuple[VadState, Samples, asyncio.Future[float]]] = []
        self._last_batch_s = 0.0
        self._due: asyncio.Handle | None = None

    async def probability(self, vad: VadState, frame: Samples, *, behind: bool = False) -> float:
        """Return the probability of speech in a frame. `vad` is the state of the frame's stream,
        which the call advances. `behind` is True if the next frame of the stream has arrived
        already.
        """
        loop, now_s = asyncio.get_running_loop(), self._clock()
        vad.paced_s = max(vad.paced_s, now_s) + FRAME_MS / 1000
        wait_s = self._last_batch_s + GATHER_S - now_s
        if behind or vad.paced_s - now_s > AHEAD_S:
            wait_s = 0.0
        result: asyncio.Future[float] = loop.create_future()
        self._waiting.append((vad, frame, result))
        if self._due is not None and wait_s <= 0:
            self._due.cancel()
            self._due = None
        if self._due is None:
            self._due = (
                loop.call_later(wait_s, self._run_batch)
                if wait_s > 0
                else loop.call_soon(self._run_batch)
            )
        return await result

    def _run_batch(self) -> None:
        waiting, self._waiting, self._due = self._waiting, [], None
        self._last_batch_s = self._clock()
        probabilities = speech_probabilities(
            [vad for vad, _, _ in waiting], [frame for _, frame, _ in waiting]
        )
        for (_, _, result), probability in zip(waiting, probabilities, strict=True):
            if not result.done():
                result.set_result(probability)
