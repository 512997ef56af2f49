"""Waking pages when something happens: one reader of the fleet's events for all pages of a gateway. Knows no page."""

import asyncio
import logging
from collections.abc import AsyncGenerator

from fleet.core.errors import FleetError
from web.gateway.gateway import Gateway

log = logging.getLogger("fleet.web")

SOONEST_S, LATEST_S = 0.5, 2.0
"""When a page is read again: at the soonest where something happened, at the latest for what no event tells (loads, ages)."""
RETRY_S = 1.0


class RefreshTimer:
    """Reads only while a page is open. `mark`: the id of the last event seen, "" before the first."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._woken = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self._num_pages = 0
        self.last_event_id = ""

    async def wait_for_changes(self) -> AsyncGenerator[str, None]:
        """The mark, each time a page should be read: now, and then until the gateway closes."""
        closing = self._gateway.closing
        self._enter()
        try:
            while not closing.is_set():
                woken = self._woken
                yield self.last_event_id
                await wait_for_any(SOONEST_S, closing)
                await wait_for_any(LATEST_S - SOONEST_S, closing, woken)
        finally:
            self._leave()

    def _enter(self) -> None:
        self._num_pages += 1
        if self._reader is None:
            self._reader = asyncio.create_task(self._read())

    def _leave(self) -> None:
        self._num_pages -= 1
        if self._num_pages == 0 and self._reader is not None:
            self._reader.cancel()
            self._reader = None

    async def _read(self) -> None:
        after = ""
        while True:
            try:
                async for entry in self._gateway.client.telemetry.follow_events(after=after):
                    self.last_event_id = after = entry.id
                    self._wake()
            except FleetError as error:
                log.debug("the events cannot be followed: %s", error.message)
            # pages are told too: what they read next says what is wrong
            self._wake()
            await asyncio.sleep(RETRY_S)

    def _wake(self) -> None:
        woken, self._woken = self._woken, asyncio.Event()
        woken.set()


async def wait_for_any(timeout_s: float, *events: asyncio.Event) -> None:
    """Until one of the events is set, or the time is over."""
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in waiting:
            one.cancel()
