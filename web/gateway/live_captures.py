"""Live answers that are trained on: a random share of those whose clients allow it. Knows no
route.
"""

import random
from collections.abc import Sequence

from fleet.config import FleetConfig
from fleet.core.request import RequestSpec
from fleet.drafts.capture.source import AnsweredPrompt, CaptureSource
from web.gateway.fleet_port import FleetPort

NO_STORE = "no_store"
"""Key of a request's `reply`: its client sent `store: false`, so its answer is never trained on."""


class LiveCaptures:
    """Hidden-state samples of live answers; nothing without `training.share`. Answers that their
    request contained, as texts to speak, are not the model's own.
    """

    def __init__(self, client: FleetPort, config: FleetConfig) -> None:
        self._share = config.training.share if config.training.enabled else 0.0
        self._source = CaptureSource(client, config) if self._share else None
        self._random = random.Random()

    def offer(self, spec: RequestSpec, blob: bytes | None, answer: Sequence[int]) -> None:
        """Capture a complete answer, if it is drawn. Nothing waits for it."""
        is_own = bool(answer) and not spec.given
        has_prompt = blob is not None or not spec.audio
        if self._source is None or not is_own or not has_prompt or NO_STORE in spec.reply:
            return
        if self._random.random() < self._share:
            self._source.offer(AnsweredPrompt(spec=spec, answer=tuple(answer), blob=blob))

    async def stop(self) -> None:
        if self._source is not None:
            await self._source.stop()
