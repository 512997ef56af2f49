"""Training samples from live traffic: a random share of the answers whose clients allow it. Knows
no route.
"""

import random
from collections.abc import Sequence

from fleet.config import FleetConfig
from fleet.core.request import RequestSpec
from fleet.drafts.capture.source import AnsweredPrompt, CaptureSource
from web.gateway.fleet_port import FleetPort

NO_STORE = "no_store"
"""Key in a request's `reply` that is present if the client sent `store: false`: the answer is never
used for training.
"""


class LiveCaptures:
    """Source of hidden-state samples of live answers, for training the draft head. Disabled without
    `training.share`. Text that the request itself gave to be spoken is never sampled, since the
    model did not generate it.
    """

    def __init__(self, client: FleetPort, config: FleetConfig) -> None:
        self._share = config.training.share if config.training.enabled else 0.0
        self._source = CaptureSource(client, config) if self._share else None
        self._random = random.Random()

    def offer(self, spec: RequestSpec, blob: bytes | None, answer: Sequence[int]) -> None:
        """Have hidden states of a complete answer recorded in the background, if the random draw
        selects the answer for training. `answer`: token ids of the answer's text. `blob`: audio of
        the prompt, None if the prompt has no audio or its audio is not known here.
        """
        is_own = bool(answer) and not spec.given
        has_prompt = blob is not None or not spec.audio
        if self._source is None or not is_own or not has_prompt or NO_STORE in spec.reply:
            return
        if self._random.random() < self._share:
            self._source.offer(AnsweredPrompt(spec=spec, answer=tuple(answer), blob=blob))

    async def stop(self) -> None:
        if self._source is not None:
            await self._source.stop()
