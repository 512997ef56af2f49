"""Captures for a trainer under faults, and what its last checkpoint must say of them.

A capture may fail, with an error; it is counted as lost. One that was acknowledged is in the last
checkpoint, whose windows have each sample as a new one at most once, however often it was received
again.
"""

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Group

from fleet.config import FleetConfig
from fleet.control.client import FleetClient
from fleet.core.errors import FleetError
from fleet.drafts.capture.pool import prepare
from fleet.drafts.capture.source import AnsweredPrompt, CaptureSource
from fleet.drafts.trainer.checkpoints import CHECKPOINTS
from fleet.drafts.trainer.state import TrainedSamples, read_samples
from fleet.lab.faults.errors import ChaosError
from fleet.lab.measure.prompts import PROMPTS
from fleet.lab.report.tables import table_of, titled
from fleet.processing import Message, TextPart, load_frontend

MOST_CAPTURES = 900
"""Captures of a run: fewer than the ids that a checkpoint has."""
MOST_ANSWER_IDS = 12
ENDS_S = 60.0


class CaptureReport(msgspec.Struct, frozen=True, kw_only=True):
    """`failed`: by the error's code. `windows`: in the last checkpoint. `wrong`: what fails the
    run.
    """

    acknowledged: int
    failed: dict[str, int]
    windows: int
    wrong: tuple[str, ...]


class CaptureLoad:
    """Clients that capture one answer after another, as many as the deployment allows at one time;
    none without a trainer.
    """

    def __init__(self, redis_url: str, config: FleetConfig, seed: int) -> None:
        self._redis_url, self._config, self._seed = redis_url, config, seed
        self._acknowledged: list[str] = []
        self._failed: Counter[str] = Counter()
        self._finishing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._checkpoint = ""
        self._error: Exception | None = None
        self._num_begun = 0
        self._step: Callable[[], None] = lambda: None

    @contextmanager
    def running(self, step: Callable[[], None]) -> Iterator[None]:
        """Capture during the block. `step` is called after each capture."""
        self._step = step
        if self._config.training.enabled:
            self._thread.start()
        try:
            yield
        finally:
            self._finishing.set()

    def _run(self) -> None:
        try:
            asyncio.run(self._capture_all())
        except Exception as error:  # raised by `finish`, in the thread of the run
            self._error = error

    async def _capture_all(self) -> None:
        config = self._config
        frontend = load_frontend(
            config.graph_declaration().frontend, Path(config.checkpoint), config.limits
        )
        client = await FleetClient.connect(self._redis_url, config)
        await client.start()
        rng, source = random.Random(f"captures {self._seed}"), CaptureSource(client, config)

        def sample() -> AnsweredPrompt:
            text = f"{rng.randrange(10**6)} {rng.choice(PROMPTS)}"
            spec = prepare(
                (Message(role="user", content=TextPart(text=text, where="messages")),),
                config,
                frontend,
            )
            return AnsweredPrompt(spec=spec, answer=spec.prompt_ids[-MOST_ANSWER_IDS:])

        try:
            await asyncio.gather(
                *(self._capture_some(source, sample) for _ in range(config.training.max_in_flight))
            )
            self._checkpoint = (await client.training.state()).checkpoint
        finally:
            await client.stop()

    async def _capture_some(
        self, source: CaptureSource, sample: Callable[[], AnsweredPrompt]
    ) -> None:
        while not self._finishing.is_set() and self._num_begun < MOST_CAPTURES:
            self._num_begun += 1
            try:
                self._acknowledged.append((await source.capture(sample())).request)
            except FleetError as error:
                self._failed[error.code] += 1
            self._step()

    def finish(self) -> CaptureReport | None:
        """Wait for the last captures, and read the last checkpoint. None without a trainer. Raises:
        the error of a client.
        """
        if not self._config.training.enabled:
            return None
        self._thread.join(ENDS_S)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            raise ChaosError(f"captures did not end within {ENDS_S:g} s after the last fault")
        samples = TrainedSamples()
        if self._checkpoint:
            samples = read_samples(self._config.drafts_dir / CHECKPOINTS / self._checkpoint)
        return CaptureReport(
            acknowledged=len(self._acknowledged),
            failed=dict(self._failed),
            windows=samples.first - 1 + len(samples.windows),
            wrong=tuple(wrong_samples(self._acknowledged, samples)),
        )


def wrong_samples(acknowledged: list[str], samples: TrainedSamples) -> list[str]:
    """Return what is wrong with the samples of the last checkpoint, a line each."""
    contained, new = (
        Counter(samples.contained),
        Counter(each for window in samples.windows for each in window),
    )
    counted = Counter(acknowledged)
    lost = [
        f"capture {each} was acknowledged, but the last checkpoint lacks it"
        for each in acknowledged
        if not contained[each]
    ]
    twice = [
        f"capture {each} was a new sample of {count} windows"
        for each, count in new.items()
        if count > 1
    ]
    again = [
        f"capture {each} was acknowledged {count} times"
        for each, count in counted.items()
        if count > 1
    ]
    none = ["no capture was acknowledged"] if not acknowledged else []
    return [*lost, *twice, *again, *none]


def captures_table(report: CaptureReport) -> Group:
    table = table_of("", "count")
    rows = (
        ("acknowledged", report.acknowledged),
        *((f"lost: {code}", count) for code, count in report.failed.items()),
        ("windows in the last checkpoint", report.windows),
        ("wrong", len(report.wrong)),
    )
    for name, count in rows:
        table.add_row(name, str(count))
    return titled("captures for the trainer under faults", table)
