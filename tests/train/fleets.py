"""A fleet that trains a draft head: a tiny language model and a trainer on threads, with real Redis
and NIXL.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from fleet.control.client import FleetClient
from fleet.core.ids import RequestId
from fleet.core.request import RequestSpec
from fleet.drafts.capture.run import CapturedRun
from fleet.drafts.capture.source import AnsweredPrompt, CaptureSource
from fleet.graphs.training import TRAINER
from fleet.worker.loop.loop import WorkerLoop
from tests.harness import ThreadFleet, gateway, thread_fleet
from tests.support import await_until

NUM_AT_ONCE = 4
SETTINGS = (
    "graph=text",
    "engine=torch",
    "training.enabled=true",
    "training.window_samples=2",
    "training.batch_samples=2",
    "training.passes=1",
    "training.held_out=0",
    f"training.max_in_flight={NUM_AT_ONCE}",
    "stages.trainer.max_batch=4",
    "lease.no_worker_timeout_s=2",
    "lease.claim_timeout_s=0.5",
    "stages.lm.prefill_chunk_tokens=8",
)


@dataclass(slots=True)
class TrainingFleet:
    """A fleet with a trainer. `run` trains on a number of prompts; `source` submits samples to the
    trainer.
    """

    fleet: ThreadFleet
    client: FleetClient

    @property
    def source(self) -> CaptureSource:
        return CaptureSource(self.client, self.fleet.config)

    @property
    def trainer(self) -> WorkerLoop:
        """Return the active trainer."""
        return next(
            loop
            for loop in self.alive
            if loop.stage == TRAINER and not loop.availability.standing_by
        )

    @property
    def alive(self) -> list[WorkerLoop]:
        return [loop for loop in self.fleet.loops if loop.worker not in self.fleet.killed]

    def run_over(
        self, pool: "Iterable[AnsweredPrompt] | AsyncIterator[AnsweredPrompt]"
    ) -> CapturedRun:
        samples = pool if isinstance(pool, AsyncIterator) else _each(pool)
        return CapturedRun(source=self.source, pool=samples, name="test", num_at_once=NUM_AT_ONCE)

    async def wait_empty(self) -> None:
        """Wait until no arena slot, engine request or KV page is in use, and no request is live."""

        async def is_empty() -> bool:
            left = [self._left_in(loop) for loop in self.alive]
            return not any(map(any, left)) and not await self.client.telemetry.num_live()

        await await_until(is_empty, "arenas and pools to be empty", timeout_s=10.0)

    def _left_in(self, loop: WorkerLoop) -> tuple[int, int, int]:
        """Return the arena slots, requests and KV pages that the worker still uses."""
        stats = loop.engine.stats()
        return (
            loop.transfer.used_slots(),
            stats.running,
            stats.kv.pages_used - stats.kv.pages_cached,
        )


async def _each(samples: Iterable[AnsweredPrompt]) -> AsyncIterator[AnsweredPrompt]:
    for sample in samples:
        yield sample


def prompt(number: int, *, length: int = 20) -> AnsweredPrompt:
    """Return a prompt with an answer of ten tokens, different for each `number`."""
    ids = tuple((7 * number + position) % 200 + 10 for position in range(length))
    spec = RequestSpec(id=RequestId("unused"), graph="text", prompt_ids=ids)
    return AnsweredPrompt(
        spec=spec, answer=tuple((number + position) % 200 + 10 for position in range(10))
    )


@asynccontextmanager
async def training_fleet(
    url: str, checkpoint: Path, folder: Path, *overrides: str, without: str = ""
) -> AsyncGenerator[TrainingFleet]:
    """Run a fleet with a conductor, a gateway, and one worker of each role except `without`.
    `folder`: folder of the trainer's checkpoints.
    """
    settings = (*SETTINGS, f"training.folder={folder}", *overrides)
    with thread_fleet(
        url, *settings, checkpoint=checkpoint, transfer="nixl", without=without
    ) as fleet:
        async with gateway(fleet) as client:
            yield TrainingFleet(fleet, client)
