"""What listeners' players say they have played, written to the requests' stories: the latest, at most once a second each."""

import asyncio
import logging

from fleet.core.errors import FleetError
from fleet.core.ids import RequestId
from web.ports import FleetPort

log = logging.getLogger("fleet.web")

EVERY_S = 1.0


class HeardNotes:
    """One gateway's. `note` never waits; what could not be written is only a number that people look at."""

    def __init__(self, client: FleetPort) -> None:
        self._client = client
        self._latest: dict[RequestId, tuple[int, int]] = {}
        self._writing: dict[RequestId, asyncio.Task[None]] = {}

    def note(self, request: RequestId, played_samples: int, underruns: int) -> None:
        """`underruns`: since the last note."""
        before = self._latest.get(request, (0, 0))
        self._latest[request] = (played_samples, before[1] + underruns)
        if request not in self._writing:
            self._writing[request] = asyncio.create_task(self._write(request))

    async def _write(self, request: RequestId) -> None:
        written: tuple[int, int] | None = None
        while (latest := self._latest[request]) != written:
            try:
                await self._client.telemetry.record_playback(request, played_samples=latest[0], underruns=latest[1])
            except FleetError as error:
                log.info("request %s: what was heard of it is not noted: %s", request, error.message)
            written = latest
            await asyncio.sleep(EVERY_S)
        del self._latest[request], self._writing[request]
