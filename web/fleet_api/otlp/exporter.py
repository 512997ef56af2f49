"""Export of ended answers as traces to a collector (`telemetry.otlp`). No answer waits for it."""

import asyncio
import contextlib
import importlib.util
import logging
import math
import time
from collections import OrderedDict
from contextlib import aclosing
from typing import TYPE_CHECKING

from fleet.core.errors import ConfigError, RedisUnreachable
from fleet.core.events import RequestEnded
from fleet.core.ids import RequestId, WorkerId
from fleet.process.background import keep_running
from fleet.telemetry.trace import RequestTrace
from web.gateway.gateway import Gateway

if TYPE_CHECKING:
    from web.fleet_api.otlp.sender import SpanSender

log = logging.getLogger("fleet.web")

SETTLE_S = 2.0
"""Time after the end of an answer until it is sent, for the last statistics of its workers."""
POLL_S, STOP_S = 1.0, 2.0
MAX_WAITING = 2048
"""Largest number of ended answers that wait to be sent; beyond it the oldest are not sent."""
MAX_BATCH = 64
LOG_EVERY_S = 60.0


class AnswerExporter:
    """Background tasks of one gateway, from `start` to `stop`. All gateways see the end of every
    answer of the fleet. The gateway that first claims an answer in Redis sends it, so that the
    answers of a dead gateway are sent too.

    Raises: ConfigError if answers are to be exported and the packages are missing.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._client = gateway.client
        self._settings = gateway.config.telemetry.otlp
        self._main = gateway.graph.main_stage.name
        self._counts = gateway.metrics.exported
        self._media = frozenset(gateway.graph.media)
        self._waiting: OrderedDict[RequestId, float] = OrderedDict()
        self._tasks: list[asyncio.Task[None]] = []
        self._num_lost, self._logged_s = 0, -LOG_EVERY_S
        self._sender = self._open() if self._settings.endpoint is not None else None

    def start(self) -> None:
        if self._sender is not None:
            self._tasks = [
                keep_running(self._follow, "the reader of ended answers to export"),
                keep_running(self._send, "the export of ended answers"),
            ]

    async def stop(self) -> None:
        """Send what waits, for `STOP_S` at most, and end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._sender is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await self._send_due(math.inf)
            self._sender.close()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def _open(self) -> "SpanSender":
        if importlib.util.find_spec("opentelemetry") is None:
            raise ConfigError(
                "telemetry.otlp.endpoint: exporting answers needs packages that are not installed "
                "here: pip install -e '.[otlp]'; or set it to null",
                param="telemetry.otlp.endpoint",
            )
        from web.fleet_api.otlp.sender import SpanSender

        return SpanSender(self._settings, self._main, self._client.id)

    async def _follow(self) -> None:
        while True:
            try:
                await self._add_ended()
            except RedisUnreachable:
                await asyncio.sleep(POLL_S)

    async def _add_ended(self) -> None:
        async with aclosing(self._client.telemetry.follow_events()) as entries:
            async for entry in entries:
                if isinstance(entry.event, RequestEnded):
                    self._add(entry.event.request)

    def _add(self, request: RequestId) -> None:
        self._waiting[request] = time.monotonic() + SETTLE_S
        while len(self._waiting) > MAX_WAITING:
            self._waiting.popitem(last=False)
            self._lose(1, "more end than the collector takes")

    async def _send(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            await self._send_due(time.monotonic())

    async def _send_due(self, now_s: float) -> None:
        while due := self._take_due(now_s):
            await self._send_batch(due)

    def _take_due(self, now_s: float) -> list[RequestId]:
        due = [request for request, due_s in self._waiting.items() if due_s <= now_s][:MAX_BATCH]
        for request in due:
            del self._waiting[request]
        return due

    async def _send_batch(self, due: list[RequestId]) -> None:
        assert self._sender is not None
        traces: list[RequestTrace] = []
        for request in due:
            try:
                trace = await self._claim(request)
            except RedisUnreachable as error:
                self._lose(1, error.message)
                continue
            if trace is not None and self._sender.wants(trace):
                traces.append(trace)
        await asyncio.to_thread(self._send_traces, self._sender, traces)

    def _send_traces(self, sender: "SpanSender", traces: list[RequestTrace]) -> None:
        """Send and count, in a thread, whose work a cancellation does not end."""
        if sender.send(traces):
            self._counts.labels(outcome="sent").inc(len(traces))
        else:
            self._lose(len(traces), f"{self._settings.endpoint} did not take them")

    async def _claim(self, request: RequestId) -> RequestTrace | None:
        """Claim an ended answer in Redis and return its trace; None if another gateway sends the
        answer, or if the request is a sample for training and no answer.
        """
        if not await self._client.telemetry.claim_export(request, WorkerId(self._client.id)):
            return None
        trace = await self._client.telemetry.trace(request)
        is_answer = trace is not None and trace.ended_us and self._media & {*trace.outputs}
        return trace if is_answer else None

    def _lose(self, number: int, why: str) -> None:
        self._counts.labels(outcome="lost").inc(number)
        self._num_lost += number
        if time.monotonic() >= self._logged_s + LOG_EVERY_S:
            line = "%d ended answers are not exported (telemetry.otlp): %s"
            log.warning(line, self._num_lost, why)
            self._num_lost, self._logged_s = 0, time.monotonic()
