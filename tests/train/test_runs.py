"""Training runs end as finished, stopped or failed, in every order in which their parts end, and
leave nothing behind.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from fleet.core.errors import EngineError, FleetError
from fleet.drafts.capture.run import CapturedRun, RunProgress, RunState
from fleet.drafts.capture.source import AnsweredPrompt
from fleet.drafts.trainer.folder import checkpoints_of, epochs_of
from fleet.drafts.trainer.samples import DraftSample
from fleet.drafts.trainer.trainer import Trainer, WindowRecord
from fleet.graphs.training import TRAINER
from tests.support import await_until
from tests.train.fleets import NUM_AT_ONCE, TrainingFleet, prompt, training_fleet

pytestmark = pytest.mark.one_file_in(2, "training in processes")


def pool(count: int) -> list[AnsweredPrompt]:
    return [prompt(number) for number in range(count)]


async def run(given: CapturedRun) -> RunProgress:
    async with asyncio.timeout(60):
        return await given.run(asyncio.Event())


async def versions(training: TrainingFleet) -> int:
    return len(await training.client.training.versions())


async def acknowledged(training: TrainingFleet) -> int:
    return (await training.client.training.counts())["acknowledged"]


async def test_run_drains_its_pool_and_terminates(
    redis_url: str, text_checkpoint: Path, tmp_path: Path
) -> None:
    async with training_fleet(redis_url, text_checkpoint, tmp_path) as training:
        given = training.run_over(pool(7))
        done = await run(given)
        assert (done.state, done.submitted, done.trained, done.refused) == (
            RunState.FINISHED,
            7,
            7,
            0,
        )
        (version,) = await training.client.training.versions()
        assert (
            done.version == version.number == 1
            and version.source == "test"
            and version.windows == done.windows
        )
        await training.wait_empty()


async def test_training_begins_before_the_pool_is_drained(
    redis_url: str, text_checkpoint: Path, tmp_path: Path
) -> None:
    async with training_fleet(redis_url, text_checkpoint, tmp_path) as training:
        given, seen = training.run_over(pool(12)), list[RunProgress]()
        given.on_progress = seen.append
        await run(given)
        assert any(0 < each.trained and each.submitted < 12 for each in seen)


async def test_samples_are_captured_while_the_trainer_trains(
    redis_url: str, text_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples are captured while the trainer trains. The first samples are acknowledged before all
    their training windows, so that others take their places.
    """
    captured_more, windows, train_on = threading.Event(), list[int](), Trainer.train_on

    def held(trainer: Trainer, samples: Sequence[DraftSample]) -> WindowRecord:
        windows.append(len(samples))
        assert len(windows) != 2 or captured_more.wait(30), (
            "all places are taken until the trainer has computed the windows"
        )
        return train_on(trainer, samples)

    monkeypatch.setattr(Trainer, "train_on", held)
    async with training_fleet(
        redis_url, text_checkpoint, tmp_path, "training.passes=4"
    ) as training:
        given = training.run_over(pool(12))
        given.on_progress = lambda progress: (
            captured_more.set() if progress.submitted > NUM_AT_ONCE else None
        )
        assert (await run(given)).state is RunState.FINISHED


async def test_samples_are_trained_on_one_at_a_time_where_there_is_no_room_for_more(
    redis_url: str, text_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.harness.ARENA_BYTES", 64 << 10)
    async with training_fleet(redis_url, text_checkpoint, tmp_path) as training:
        done = await run(training.run_over(pool(6)))
        assert (done.state, done.trained, done.refused) == (RunState.FINISHED, 6, 0)
        await training.wait_empty()


async def test_sample_that_has_no_room_is_refused_and_the_run_continues(
    redis_url: str, text_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.harness.ARENA_BYTES", 64 << 10)
    monkeypatch.setattr("fleet.drafts.capture.source.NO_ROOM_PAUSE_S", 0.0)
    async with training_fleet(redis_url, text_checkpoint, tmp_path) as training:
        done = await run(training.run_over([prompt(1), prompt(2, length=60), prompt(3)]))
        assert (done.state, done.trained, done.refused) == (RunState.FINISHED, 2, 1)
        await training.wait_empty()


async def test_run_that_is_stopped_makes_no_version(
    redis_url: str, text_checkpoint: Path, tmp_path: Path
) -> None:
    async with training_fleet(redis_url, text_checkpoint, tmp_path) as training:
        stop, given = asyncio.Event(), training.run_over(prompt(number) for number in range(10_000))
        given.on_progress = lambda progress: stop.set() if progress.trained >= 3 else None
        done = await given.run(stop)
        assert done.state is RunState.STOPPED and await versions(training) == 0
        await training.wait_empty()


async def test_producer_exception_propagates_and_unblocks_consumer(
    redis_url: str, text_checkpoint: Path, tmp_path: Path
) -> None:
    async def failing() -> AsyncIterator[AnsweredPrompt]:
        for number in range(3):
            yield prompt(number)
        raise RuntimeError("the pool cannot be read")

    async with training_fleet(redis_url, text_checkpoint, tmp_path) as training:
        given = training.run_over(failing())
        with pytest.raises(RuntimeError, match="the pool cannot be read"):
            await run(given)
        assert given.progress.state is RunState.FAILED and await versions(training) == 0
        await training.wait_empty()


async def test_trainer_that_stops_first_ends_the_run(
    redis_url: str, text_checkpoint: Path, tmp_path: Path
) -> None:
    """A trainer that stops in the middle ends the run if no other trainer is there: the run fails
    with the remedy, although its producer is blocked.
    """
    async with training_fleet(redis_url, text_checkpoint, tmp_path) as training:
        given = training.run_over(prompt(number) for number in range(10_000))
        running = asyncio.create_task(run(given))
        await await_until(lambda: _has_trained(given), "a sample to be trained on")
        training.fleet.kill(training.trainer, died=False)
        with pytest.raises(FleetError, match="fleet worker trainer"):
            await running
        assert given.progress.state is RunState.FAILED and await versions(training) == 0
        await training.wait_empty()


async def test_error_of_the_trainer_fails_the_run(
    redis_url: str, text_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("fleet.drafts.trainer.trainer.Trainer.train_on", failing)
    async with training_fleet(redis_url, text_checkpoint, tmp_path) as training:
        given = training.run_over(pool(3))
        with pytest.raises(EngineError, match="out of memory"):
            await run(given)
        assert given.progress.state is RunState.FAILED
        await training.wait_empty()


async def test_run_survives_the_death_of_the_trainer(
    redis_url: str, text_checkpoint: Path, tmp_path: Path
) -> None:
    """A run survives the death of the trainer: the standby trainer continues from the last durable
    checkpoint, and no sample is acknowledged twice.
    """
    async with training_fleet(redis_url, text_checkpoint, tmp_path) as training:
        training.fleet.add_worker(TRAINER)
        given = training.run_over(pool(14))
        running = asyncio.create_task(run(given))
        await await_until(lambda: _has_trained(given), "a sample to be trained on")
        training.fleet.kill(training.trainer)
        done = await running
        assert (done.state, done.trained) == (RunState.FINISHED, 14)
        assert await acknowledged(training) == 15, (
            "each sample once, and the one that made the version"
        )
        assert done.windows >= 7, "windows of the dead trainer's last checkpoint count"
        await training.wait_empty()
        assert len(epochs_of(tmp_path)) == 1 and 1 <= len(checkpoints_of(tmp_path)) <= 2


async def test_trainer_that_was_fenced_acknowledges_nothing(
    redis_url: str, text_checkpoint: Path, tmp_path: Path
) -> None:
    """A fenced trainer acknowledges nothing: frozen past its lease and resumed after a successor
    took over, it finds its checkpoint and acknowledgements refused.
    """
    async with training_fleet(redis_url, text_checkpoint, tmp_path) as training:
        training.fleet.add_worker(TRAINER)
        frozen = training.trainer
        records = frozen.engine._checkpoints.records  # pyright: ignore
        training.fleet.fence(frozen)
        done = await run(training.run_over(pool(4)))
        assert done.state is RunState.FINISHED and await acknowledged(training) == 5
        assert not records.holds() and records.claim(0) is None, "its right ended with its lease"
        assert frozen.worker in training.fleet.killed or frozen.engine.stats().running == 0


async def test_run_survives_the_death_of_the_worker_that_computes_captures(
    redis_url: str, text_checkpoint: Path, tmp_path: Path
) -> None:
    async with training_fleet(redis_url, text_checkpoint, tmp_path) as training:
        training.fleet.add_worker("lm")
        given = training.run_over(pool(14))
        running = asyncio.create_task(run(given))
        await await_until(lambda: _has_trained(given), "a sample to be trained on")
        training.fleet.kill(next(loop for loop in training.alive if loop.stage == "lm"))
        done = await running
        assert (done.state, done.trained) == (RunState.FINISHED, 14)
        await training.wait_empty()


async def test_next_run_continues_from_the_checkpoint_of_the_last_one(
    redis_url: str, text_checkpoint: Path, tmp_path: Path
) -> None:
    async with training_fleet(redis_url, text_checkpoint, tmp_path) as training:
        first = await run(training.run_over(pool(4)))
        training.fleet.kill(training.trainer, died=False)
        training.fleet.add_worker(TRAINER)
        second = await run(training.run_over(pool(4)))
        assert second.windows > first.windows and second.version == 2


async def test_pool_without_a_fitting_sample_fails(
    redis_url: str, text_checkpoint: Path, tmp_path: Path
) -> None:
    async with training_fleet(redis_url, text_checkpoint, tmp_path) as training:
        with pytest.raises(FleetError, match="took none of its 0 samples"):
            await run(training.run_over([]))


async def _has_trained(given: CapturedRun) -> bool:
    return given.progress.trained > 0
