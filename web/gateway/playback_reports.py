"""Writer of the playback positions that clients report, to the traces of their requests, at most
once a second for each request.
"""

import asyncio
import logging
from collections.abc import Callable

from fleet.core.errors import FleetError
from fleet.core.ids import RequestId
from fleet.process.background import start
from web.gateway.fleet_port import FleetPort

log = logging.getLogger("fleet.web")

WRITE_INTERVAL_S = 1.0


class PlaybackReports:
    """Pending playback reports of one gateway. `note` never waits: reports are written in the
    background, and a failed write only makes the trace less accurate. `on_dropout` is called with
    the request of each report that has underruns.
    """

    def __init__(self, client: FleetPort) -> None:
        self._client = client
        self.on_dropout: Callable[[RequestId], None] = lambda _request: None
        self._latest: dict[RequestId, tuple[int, int]] = {}
        self._writing: dict[RequestId, asyncio.Task[None]] = {}

    def note(self, request: RequestId, played_samples: int, underruns: int) -> None:
        """Record a playback report of a client. `played_samples`: samples played since the
        beginning of the answer. `underruns`: number of underruns since the previous report.
        """
        if underruns:
            self.on_dropout(request)
        before = self._latest.get(request, (0, 0))
        self._latest[request] = (played_samples, before[1] + underruns)
        if request not in self._writing:
            self._writing[request] = start(
                self._write(request), f"the writing of playback positions of request {request}"
            )

    async def _write(self, request: RequestId) -> None:
        written: tuple[int, int] | None = None
        while (latest := self._latest[request]) != written:
            try:
                await self._client.telemetry.record_playback(
                    request, played_samples=latest[0], underruns=latest[1]
                )
            except FleetError as error:
                log.info(
                    "request %s: its playback position cannot be written: %s",
                    request,
                    error.message,
                )
            written = latest
            await asyncio.sleep(WRITE_INTERVAL_S)
        del self._latest[request], self._writing[request]
