"""Batches that run in the background of a measurement, one after the other. Measures nothing."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import msgspec

from fleet.lab.client.chat import ChatCall, ChatMessage
from fleet.lab.client.client import ApiClient, BatchState
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.prompts import PROMPTS

POLL_S, SETTLE_S = 0.5, 120.0
URL = "/v1/chat/completions"


def batch_lines(model: str, num_lines: int, max_tokens: int) -> bytes:
    """Return an input file of chat lines, no two of which begin alike."""
    lines = (
        {
            "custom_id": f"line {number}",
            "method": "POST",
            "url": URL,
            "body": ChatCall(
                model=model,
                messages=(
                    ChatMessage(role="user", content=f"{number}: {PROMPTS[number % len(PROMPTS)]}"),
                ),
                max_tokens=max_tokens,
            ),
        }
        for number in range(num_lines)
    )
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


class RunningBatches:
    """Batches of the same lines, each started when the one before has ended."""

    def __init__(self, api: ApiClient, lines: bytes) -> None:
        self._api = api
        self._lines = lines
        self._ids: list[str] = []
        self._stop = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Keep a batch running during the block, which begins once a line has been answered; then
        cancel the last batch and wait for its end. Raises: ApiError, BenchError.
        """
        self._stop.clear()
        self._start()
        self._wait(lambda batch: batch.request_counts.completed > 0, "answered a line of a batch")
        with ThreadPoolExecutor(max_workers=1) as pool:
            following = pool.submit(self._follow)
            try:
                yield
            finally:
                self._stop.set()
            following.result()
        if not self._latest().has_ended:
            self._api.cancel_batch(self._ids[-1])
            self._wait(lambda batch: batch.has_ended, "ended a cancelled batch")

    def num_answered(self) -> int:
        """Return the number of lines answered so far, in all batches since the construction."""
        return sum(self._api.batch(each).request_counts.completed for each in self._ids)

    def _start(self) -> None:
        self._ids.append(self._api.start_batch(self._lines, URL).id)

    def _latest(self) -> BatchState:
        """Return the state of the batch started last. Raises: BenchError if lines of this batch
        have failed.
        """
        batch = self._api.batch(self._ids[-1])
        if batch.status != "cancelled" and (
            batch.request_counts.failed or batch.status in ("failed", "expired")
        ):
            raise BenchError(
                f"the batch {batch.id} is {batch.status}, and {batch.request_counts.failed} of its "
                "lines have an error; its error file tells why"
            )
        return batch

    def _follow(self) -> None:
        """Start the next batch when one ends, until the block is over."""
        while not self._stop.wait(POLL_S):
            if self._latest().has_ended:
                self._start()

    def _wait(self, is_reached: Callable[[BatchState], bool], what: str) -> None:
        deadline_s = time.monotonic() + SETTLE_S
        while not is_reached(self._latest()):
            if time.monotonic() > deadline_s:
                raise BenchError(
                    f"the fleet has not {what} within {SETTLE_S:g} s; does `fleet jobs` run?"
                )
            time.sleep(POLL_S)
