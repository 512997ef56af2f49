"""Timing of the updates of open pages: one reader of the fleet's events serves all pages of a
gateway.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator

from fleet.core.errors import FleetError
from fleet.process.background import keep_running
from web.gateway.gateway import Gateway

log = logging.getLogger("fleet.web")

MIN_INTERVAL_S, MAX_INTERVAL_S = 0.5, 2.0
"""Seconds between two readings of a page: at least `MIN_INTERVAL_S` after an event; at most
`MAX_INTERVAL_S`, since loads and ages change without an event.
"""
RETRY_S = 1.0


class RefreshTimer:
    """Timer that decides when open pages are read again, by the fleet's events, which it follows
    while any page is open. `last_event_id` is "" before the first event.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._changed = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self._num_pages = 0
        self.last_event_id = ""

    async def wait_for_changes(self) -> AsyncGenerator[str, None]:
        """Yield the id of the fleet's last event whenever a page should be read again. The first id
        is yielded immediately; ends when the gateway closes.
        """
        closing = self._gateway.closing
        self._num_pages += 1
        if self._reader is None:
            self._reader = keep_running(self._follow_events, "the reader of the fleet's events")
        try:
            while not closing.is_set():
                changed = self._changed
                yield self.last_event_id
                await wait_for_any(MIN_INTERVAL_S, closing)
                await wait_for_any(MAX_INTERVAL_S - MIN_INTERVAL_S, closing, changed)
        finally:
            self._num_pages -= 1
            if self._num_pages == 0:
                self._reader.cancel()
                self._reader = None

    async def _follow_events(self) -> None:
        while True:
            try:
                async for entry in self._gateway.client.telemetry.follow_events(
                    after=self.last_event_id
                ):
                    self.last_event_id = entry.id
                    self._notify_pages()
            except FleetError as error:
                log.debug(
                    "the fleet's events cannot be followed; retrying in %s s: %s",
                    RETRY_S,
                    error.message,
                )
            # pages are read on an error too, and then show it
            self._notify_pages()
            await asyncio.sleep(RETRY_S)

    def _notify_pages(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


async def wait_for_any(timeout_s: float, *events: asyncio.Event) -> None:
    """Wait until any of the events is set, or until `timeout_s` have passed."""
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
