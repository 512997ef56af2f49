"""A training run: the answers of a pool are captured while the trainer trains on them, and a new
version of the draft head ends the run.

Runs end as `finished`, `stopped` or `failed`; only a finished run makes a version.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from fleet.core.errors import BadInput, SampleRefused
from fleet.drafts.capture.source import AnsweredPrompt, CaptureSource

log = logging.getLogger(__name__)


class RunState(StrEnum):
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """Progress of a training run. `submitted`, `trained` and `refused` count samples.

    `windows`: optimizer steps in the trainer's last checkpoint. `version`: version of the draft
    head that the run made; 0 before its end.
    """

    state: RunState = RunState.RUNNING
    submitted: int = 0
    trained: int = 0
    refused: int = 0
    windows: int = 0
    version: int = 0

    def __str__(self) -> str:
        made = f", version {self.version}" if self.version else ""
        refused = f", {self.refused} refused" if self.refused else ""
        return (
            f"{self.state}: {self.trained} of {self.submitted} samples trained on{refused}, "
            f"{self.windows} windows{made}"
        )


@dataclass(slots=True, kw_only=True)
class CapturedRun:
    """A training run over the answers of `pool`.

    `name`: recorded as the source of the resulting version. `num_at_once`: most samples in flight.
    `on_progress`: called after each change of `progress`.
    """

    source: CaptureSource
    pool: AsyncIterator[AnsweredPrompt]
    name: str
    num_at_once: int
    on_progress: Callable[[RunProgress], None] = lambda _: None
    progress: RunProgress = field(default_factory=RunProgress)
    _first: AnsweredPrompt | None = None

    async def run(self, stop: asyncio.Event) -> RunProgress:
        """Run to the end of the pool, or until `stop` is set; return the final progress.

        Raises: the first error that concerns more than one sample, after the state is `failed`.
        """
        running: set[asyncio.Task[None]] = set()
        stopping = asyncio.create_task(stop.wait())
        try:
            async for answered in self.pool:
                running.add(asyncio.create_task(self._train_on(answered)))
                self._note(submitted=self.progress.submitted + 1)
                while len(running) >= self.num_at_once and not stop.is_set():
                    running = await _still_running(running, stopping)
                if stop.is_set():
                    break
            while running and not stop.is_set():
                running = await _still_running(running, stopping)
            if stop.is_set():
                return self._note(state=RunState.STOPPED)
            return await self._publish(stopping)
        except BaseException:
            self._note(state=RunState.FAILED)
            raise
        finally:
            stopping.cancel()
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _publish(self, stopping: "asyncio.Task[bool]") -> RunProgress:
        """Submit the first trained sample again, with the order to make a version; the trainer
        makes it after all windows. Return the final progress: `stopped` if `stopping` is done
        first. Raises: BadInput if no sample was trained on.
        """
        if self._first is None:
            raise BadInput(
                f"pool: the trainer took none of its {self.progress.submitted} samples",
                param="pool",
            )
        publishing = asyncio.create_task(self.source.capture(self._first, publish=self.name))
        await asyncio.wait({publishing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not publishing.done():
            publishing.cancel()
            await asyncio.gather(publishing, return_exceptions=True)
            return self._note(state=RunState.STOPPED)
        done = publishing.result()
        return self._note(state=RunState.FINISHED, windows=done.windows, version=done.version)

    async def _train_on(self, answered: AnsweredPrompt) -> None:
        try:
            done = await self.source.capture(answered)
        except SampleRefused as error:
            log.warning("%s", error.message)
            self._note(refused=self.progress.refused + 1)
            return
        self._first = self._first or answered
        self._note(
            trained=self.progress.trained + 1, windows=max(self.progress.windows, done.windows)
        )

    def _note(self, **changes: object) -> RunProgress:
        self.progress = replace(self.progress, **changes)  # pyright: ignore[reportArgumentType]
        self.on_progress(self.progress)
        return self.progress


async def _still_running(
    running: set["asyncio.Task[None]"], stopping: "asyncio.Task[bool]"
) -> set["asyncio.Task[None]"]:
    """Wait until a task ends or `stopping` is done; return the tasks still running. Raises: the
    error of a failed task.
    """
    await asyncio.wait({*running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    for task in running:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            raise error
    return {task for task in running if not task.done()}
