"""Load of hidden-state samples for a trainer while faults are injected, and checks of the trainer's
last checkpoint.

A sample may fail with an error, and is then counted as lost. The last checkpoint must list every
acknowledged sample, and list it as new in at most one training window (one optimizer step), even if
the trainer received it several times.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from fleet.config import FleetConfig
from fleet.control.client import FleetClient
from fleet.core.errors import FleetError
from fleet.drafts.capture.pool import prepare
from fleet.drafts.capture.source import AnsweredPrompt, CaptureSource
from fleet.drafts.trainer.checkpoints import newest_whole
from fleet.drafts.trainer.state import TrainedSamples
from fleet.lab.faults.client_threads import ClientThreads
from fleet.lab.faults.errors import ChaosError
from fleet.lab.measure.prompts import PROMPTS
from fleet.processing import Message, TextPart, open_frontend

MOST_CAPTURES = 900
"""Largest number of hidden-state samples of a run, below the number of sample ids that a checkpoint
stores.
"""
MOST_ANSWER_IDS = 12
ENDS_S = 60.0


class CaptureReport(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of the hidden-state samples that clients sent to the trainer in a run.

    `acknowledged`: number of samples that the trainer acknowledged. `failed`: number of failed
    samples by error code. `windows`: number of training windows in the last checkpoint. `wrong`: a
    line for each acknowledged sample that the checkpoint lacks or counts twice, and for other
    mistakes; any line fails the run.
    """

    acknowledged: int
    failed: dict[str, int]
    windows: int
    wrong: tuple[str, ...]


class CaptureLoad:
    """Clients that each send hidden-state samples of one answer after another to the trainer, as
    many clients as the deployment allows. Does nothing without a trainer.
    """

    def __init__(self, redis_url: str, config: FleetConfig, seed: int) -> None:
        self._redis_url = redis_url
        self._config = config
        self._seed = seed
        self._threads = ClientThreads()
        self._acknowledged: list[str] = []
        self._failed: Counter[str] = Counter()
        self._error: Exception | None = None
        self._num_begun = 0

    def running(self, step: Callable[[], None]) -> AbstractContextManager[None]:
        """Send hidden-state samples during the block. `step` is called after each sample."""

        def run(_: int) -> None:
            try:
                asyncio.run(self._capture_all(step))
            except Exception as error:  # raised by `finish`, in the thread of the run
                self._error = error

        return self._threads.running(int(self._config.training.enabled), run)

    async def _capture_all(self, step: Callable[[], None]) -> None:
        config = self._config
        frontend = open_frontend(config, Path(config.checkpoint))
        client = await FleetClient.connect(self._redis_url, config)
        await client.start()
        rng, source = random.Random(f"captures {self._seed}"), CaptureSource(client, config)

        def sample() -> AnsweredPrompt:
            text = f"{rng.randrange(10**6)} {rng.choice(PROMPTS)}"
            message = Message(role="user", content=TextPart(text=text, where="messages"))
            spec = prepare((message,), config, frontend)
            return AnsweredPrompt(spec=spec, answer=spec.prompt_ids[-MOST_ANSWER_IDS:])

        async def capture_some() -> None:
            while not self._threads.finishing.is_set() and self._num_begun < MOST_CAPTURES:
                self._num_begun += 1
                try:
                    self._acknowledged.append((await source.capture(sample())).request)
                except FleetError as error:
                    self._failed[error.code] += 1
                step()

        try:
            await asyncio.gather(*(capture_some() for _ in range(config.training.max_in_flight)))
        finally:
            await client.stop()

    def finish(self) -> CaptureReport | None:
        """Wait for the last samples and compare them with the trainer's last checkpoint; return
        None without a trainer. Raises: the error of a client.
        """
        if not self._config.training.enabled:
            return None
        self._threads.join(ENDS_S)
        if self._error is not None:
            raise self._error
        if self._threads.is_alive():
            raise ChaosError(f"captures did not end within {ENDS_S:g} s after the last fault")
        newest = newest_whole(self._config.drafts_dir)
        samples = newest.trained if newest is not None else TrainedSamples()
        return CaptureReport(
            acknowledged=len(self._acknowledged),
            failed=dict(self._failed),
            windows=samples.first - 1 + len(samples.windows),
            wrong=tuple(wrong_samples(self._acknowledged, samples)),
        )


def wrong_samples(acknowledged: list[str], samples: TrainedSamples) -> list[str]:
    """Return a line for each mistake in the samples listed by the last checkpoint. `acknowledged`:
    ids of the samples that the trainer acknowledged.
    """
    contained = set(samples.contained)
    new = Counter(each for window in samples.windows for each in window)
    return [
        *(
            f"capture {each} was acknowledged, but the last checkpoint lacks it"
            for each in acknowledged
            if each not in contained
        ),
        *(
            f"capture {each} was a new sample of {count} windows"
            for each, count in new.items()
            if count > 1
        ),
        *(
            f"capture {each} was acknowledged {count} times"
            for each, count in Counter(acknowledged).items()
            if count > 1
        ),
        *(["no capture was acknowledged"] if not acknowledged else []),
    ]
