"""Versions of the draft head in a fleet: trained, read by NIXL, exchanged between two steps, and
returned to.
"""

import asyncio
from pathlib import Path

import pytest
import torch

from fleet.core.errors import NotFound
from fleet.core.ids import EdgeName, new_request_id
from fleet.core.request import RequestSpec, Sampling
from fleet.drafts.capture.source import AnsweredPrompt
from fleet.drafts.eagle3.files import save_head
from fleet.drafts.eagle3.head import Eagle3Head
from fleet.drafts.exchange.watch import FEWEST_DRAFTS
from fleet.drafts.figures.speculation import SpeculationFigures
from fleet.drafts.figures.training import DraftVersion
from fleet.drafts.trainer.folder import VERSIONS
from fleet.graphs.text import LM
from fleet.graphs.training import TRAINER
from fleet.worker.loop.loop import WorkerLoop
from tests.harness import answer
from tests.support import await_until
from tests.train.fleets import TrainingFleet, prompt, training_fleet

TEXT = EdgeName("text")
NUM_TOKENS, NUM_DRAFTS = 40, 3
OVERFIT = (
    "stages.lm.speculation.drafter=eagle3",
    f"stages.lm.speculation.num_drafts={NUM_DRAFTS}",
    "training.passes=600",
    "training.learning_rate=0.005",
    "training.window_samples=1",
    "training.batch_samples=1",
    "training.num_steps=3",
    "training.checkpoint_windows=1000",
)


def question(number: int = 1) -> RequestSpec:
    return RequestSpec(
        id=new_request_id(),
        graph="text",
        prompt_ids=prompt(number).spec.prompt_ids,
        outputs=(TEXT,),
        sampling={LM: Sampling(max_tokens=NUM_TOKENS, ignore_eos=True)},
    )


async def ask(training: TrainingFleet, number: int = 1) -> list[int]:
    return (await answer(training.client, question(number)))[TEXT].tolist()


def worker_of(training: TrainingFleet) -> WorkerLoop:
    return next(loop for loop in training.alive if loop.stage == LM)


def figures(loop: WorkerLoop) -> SpeculationFigures:
    found = loop.engine.stats().speculation
    assert found is not None
    return found


async def wait_for_version(loop: WorkerLoop, number: int) -> None:
    async def has_it() -> bool:
        return figures(loop).version == number

    await await_until(has_it, f"version {number} in {loop.worker}", timeout_s=10.0)


async def acceptance(training: TrainingFleet, number: int) -> float:
    """Return the mean number of tokens per step of an answer."""
    before = figures(worker_of(training))
    await ask(training, number)
    after = figures(worker_of(training))
    return 1 + (sum(after.accepted) - sum(before.accepted)) / (after.num_draws - before.num_draws)


async def train_on_answer(training: TrainingFleet, tokens: list[int], number: int = 1) -> int:
    sample = AnsweredPrompt(spec=question(number), answer=tokens)
    done = await training.source.capture(sample, publish="overfit")
    return done.version


def verify_every_draft(loop: WorkerLoop) -> None:
    speculation = loop.engine.speculation  # pyright: ignore
    speculation.follows_times = False


async def add_random_version(training: TrainingFleet, folder: Path) -> int:
    """Publish a head version with random weights, as an operator may do by mistake."""
    config = training.trainer.engine._trainer.head.config  # pyright: ignore
    sha256 = save_head(
        Eagle3Head(config, torch.arange(config.draft_vocab_size), seed=99), folder / "part"
    )
    (folder / "part").rename(folder / VERSIONS / sha256)
    version = DraftVersion(
        number=0, sha256=sha256, target=config.target_hash, num_bytes=1, source="random"
    )
    return (await training.client.training.add(version)).number


@pytest.mark.one_in(3, "versions of a draft head")
async def test_head_trained_on_an_answer_guesses_it_and_a_random_head_gives_way(
    redis_url: str, text_checkpoint: Path, tmp_path: Path
) -> None:
    """A head trained on an answer (captured, trained, published, swapped in and served) drafts it:
    at least nine of ten of the tokens that can be accepted.

    A random version that is forced in is replaced by it, without a command.
    """
    async with training_fleet(redis_url, text_checkpoint, tmp_path, *OVERFIT) as training:
        worker = worker_of(training)
        verify_every_draft(worker)
        before = await ask(training)
        assert figures(worker).version == 0 and not sum(figures(worker).drafted), (
            "no head yet, so no guesses"
        )
        number = await train_on_answer(training, before)
        assert number == 1
        await training.client.training.promote(number)
        await wait_for_version(worker, number)
        assert await ask(training) == before
        got, most = (
            figures(worker).acceptance_length,
            NUM_TOKENS / (1 - (1 - NUM_TOKENS) // (NUM_DRAFTS + 1)),
        )
        assert got is not None and got >= 0.9 * most, figures(worker)
        while figures(worker).drafted[0] < FEWEST_DRAFTS:
            await asyncio.gather(*(ask(training) for _ in range(8)))
        random = await add_random_version(training, tmp_path)
        await training.client.training.promote(random)
        await wait_for_version(worker, random)
        async with asyncio.timeout(60):
            while figures(worker).version == random:
                assert await asyncio.gather(*(ask(training) for _ in range(8))) == [before] * 8
        assert figures(worker).version == number
        (noted, _) = await training.client.training.versions()
        assert noted.number == random and "guesses in a row are right" in noted.note


@pytest.mark.one_in(3, "versions of a draft head")
async def test_next_version_learns_traffic_that_has_changed(
    redis_url: str, text_checkpoint: Path, tmp_path: Path
) -> None:
    """The next version learns traffic that has changed: acceptance falls when other questions come,
    and the version trained on their answers recovers at least half.
    """
    async with training_fleet(redis_url, text_checkpoint, tmp_path, *OVERFIT) as training:
        worker = worker_of(training)
        verify_every_draft(worker)
        first, second = await ask(training, 1), await ask(training, 2)
        assert first != second
        await training.client.training.promote(await train_on_answer(training, first, 1))
        await wait_for_version(worker, 1)
        known, fallen = await acceptance(training, 1), await acceptance(training, 2)
        assert fallen < known - 1, (known, fallen)
        await training.client.training.promote(await train_on_answer(training, second, 2))
        await wait_for_version(worker, 2)
        recovered = await acceptance(training, 2)
        assert recovered >= (known + fallen) / 2, (known, fallen, recovered)
        state = await training.client.training.state()
        assert [version.samples for version in state.versions] == [2, 1] and state.acknowledged == 2


@pytest.mark.one_in(3, "versions of a draft head")
async def test_later_worker_reads_the_version_from_a_worker_when_no_trainer_is_there(
    redis_url: str, text_checkpoint: Path, tmp_path: Path
) -> None:
    async with training_fleet(redis_url, text_checkpoint, tmp_path) as training:
        number = (await training.run_over([prompt(1), prompt(2)]).run(asyncio.Event())).version
        await training.client.training.promote(number)
        await wait_for_version(worker_of(training), number)
        training.fleet.kill(training.trainer, died=False)
        for file in (tmp_path / VERSIONS).rglob("*.*"):
            file.unlink()
        second = training.fleet.add_worker(LM)
        await wait_for_version(second, number)


@pytest.mark.one_in(3, "versions of a draft head")
async def test_exchange_changes_no_running_answer(
    redis_url: str, text_checkpoint: Path, tmp_path: Path
) -> None:
    settings = ("numerics=invariant", "stages.lm.speculation.drafter=eagle3")
    async with training_fleet(redis_url, text_checkpoint, tmp_path, *settings) as training:
        verify_every_draft(worker_of(training))
        expected = await ask(training)
        numbers = [
            (await training.run_over([prompt(number)]).run(asyncio.Event())).version
            for number in (1, 2)
        ]
        assert numbers == [1, 2]

        async def exchange() -> None:
            for number in (1, 2, 1, 0, 2):
                await training.client.training.promote(number)
                await wait_for_version(worker_of(training), number)

        exchanging = asyncio.create_task(exchange())
        while not exchanging.done():
            answers = await asyncio.gather(*(ask(training) for _ in range(4)))
            assert answers == [expected] * 4
        await exchanging


@pytest.mark.one_in(3, "versions of a draft head")
async def test_rollback_returns_to_the_version_before(
    redis_url: str, text_checkpoint: Path, tmp_path: Path
) -> None:
    async with training_fleet(redis_url, text_checkpoint, tmp_path) as training:
        for number in (1, 2):
            made = (await training.run_over([prompt(number)]).run(asyncio.Event())).version
            await training.client.training.promote(made)
            await wait_for_version(worker_of(training), made)
        assert await training.client.training.roll_back() == 1
        await wait_for_version(worker_of(training), 1)
        state = await training.client.training.state()
        assert (state.version, state.last_version, len(state.versions)) == (
            1,
            2,
            2,
        ) and state.trainer.startswith(TRAINER)


async def test_version_that_does_not_exist_is_refused(
    redis_url: str, text_checkpoint: Path, tmp_path: Path
) -> None:
    async with training_fleet(redis_url, text_checkpoint, tmp_path) as training:
        with pytest.raises(NotFound, match="no version 7"):
            await training.client.training.promote(7)


async def test_damaged_version_is_not_used_and_the_present_one_stays(
    redis_url: str, text_checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with training_fleet(redis_url, text_checkpoint, tmp_path) as training:
        first = (await training.run_over([prompt(1)]).run(asyncio.Event())).version
        await training.client.training.promote(first)
        await wait_for_version(worker_of(training), first)
        second = (await training.run_over([prompt(2)]).run(asyncio.Event())).version
        (version, _) = await training.client.training.versions()
        weights = tmp_path / VERSIONS / version.sha256 / "eagle3.safetensors"
        weights.write_bytes(weights.read_bytes()[:-4] + b"\x00\x00\x80\x7f")
        await training.client.training.promote(second)

        async def is_refused() -> bool:
            return "version 2 of the draft head is not used, version 1 stays" in caplog.text

        await await_until(is_refused, "the version to be refused", timeout_s=10.0)
        assert figures(worker_of(training)).version == first
