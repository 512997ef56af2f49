"""Captures through a fleet: hidden states only by NIXL, samples refused at admission, answers
first, and operator commands.
"""

import asyncio
from pathlib import Path

import pytest

from fleet.control import keys
from fleet.control.connect import connect, stream_entries
from fleet.core.captures import LAST_ROWS, TAPS
from fleet.core.chunk import decode_chunk
from fleet.core.errors import BadInput, NoWorker, SampleRefused
from fleet.core.ids import EdgeName, new_request_id
from fleet.core.request import RequestSpec, Sampling
from fleet.graphs.text import LM
from fleet.graphs.training import FEATURES, TRAINER
from tests.harness import answer, stop_claims
from tests.support import await_until
from tests.train.fleets import prompt, training_fleet

pytestmark = pytest.mark.one_file_in(2, "training in processes")

TEXT = EdgeName("text")


def question(number: int) -> RequestSpec:
    return RequestSpec(
        id=new_request_id(),
        graph="text",
        prompt_ids=prompt(number).spec.prompt_ids,
        outputs=(TEXT,),
        sampling={LM: Sampling(max_tokens=12, ignore_eos=True)},
    )


async def test_rows_go_by_nixl_and_only_headers_through_redis(
    redis_url: str, text_checkpoint: Path, tmp_path: Path
) -> None:
    async with training_fleet(redis_url, text_checkpoint, tmp_path) as training:
        source = training.source
        done = await asyncio.gather(*(source.capture(prompt(number)) for number in range(2)))
        assert all(1 <= each.windows <= 2 for each in done), (
            "a sample that arrives late has a window of its own"
        )
        with connect(redis_url) as observer:
            logs = list(observer.scan_iter(f"{keys.PREFIX}req:*:edge:{FEATURES}"))
            chunks = [
                decode_chunk(fields["h"])
                for log in logs
                for _, fields in stream_entries(observer.xrange(log))
            ]
        assert len(logs) == 2 and len(chunks) == 2 * 4, "30 rows in chunks of 8"
        assert all(
            chunk.tensors[name].data is None for chunk in chunks for name in (TAPS, LAST_ROWS)
        )
        assert sum(chunk.tensors[TAPS].shape[0] for chunk in chunks) == 2 * 30
        await training.wait_empty()


async def test_rows_without_room_are_refused_and_not_sent_through_redis(
    redis_url: str, text_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.harness.ARENA_BYTES", 4096)
    monkeypatch.setattr("fleet.drafts.capture.source.NO_ROOM_PAUSE_S", 0.0)
    async with training_fleet(redis_url, text_checkpoint, tmp_path) as training:
        with pytest.raises(SampleRefused, match=r"not transferred: .*\(transfer\.\w+_mib\)"):
            await training.source.capture(prompt(1))
        assert (await training.client.training.counts())["failed"] == 1
        assert len(await answer(training.client, question(1))) == 1, "an answer needs no arena"
        await training.wait_empty()


async def test_live_answer_is_shed_while_another_request_waits(
    redis_url: str, text_checkpoint: Path, tmp_path: Path
) -> None:
    async with training_fleet(redis_url, text_checkpoint, tmp_path) as training:
        worker = next(loop for loop in training.alive if loop.stage == LM)
        await asyncio.to_thread(stop_claims, worker)
        waiting = await training.client.requests.submit(question(1), None)
        source = training.source
        source.offer(prompt(1))

        async def is_shed() -> bool:
            return (await training.client.training.counts())["shed"] == 1

        await await_until(is_shed, "the answer to be shed")
        worker.availability.draining = False
        assert [chunk async for chunk in waiting]
        source.offer(prompt(1))

        async def is_trained_on() -> bool:
            return (await training.client.training.counts())["acknowledged"] == 1

        await await_until(is_trained_on, "the next one to be trained on")


async def test_answers_beside_captures_stay_the_same(
    redis_url: str, text_checkpoint: Path, tmp_path: Path
) -> None:
    async with training_fleet(
        redis_url, text_checkpoint, tmp_path, "numerics=invariant"
    ) as training:
        expected = [await answer(training.client, question(number)) for number in range(3)]
        run = asyncio.create_task(
            training.run_over(prompt(number) for number in range(8)).run(asyncio.Event())
        )
        got = await asyncio.gather(
            *(answer(training.client, question(number)) for number in range(3))
        )
        assert [each[TEXT].tolist() for each in got] == [each[TEXT].tolist() for each in expected]
        assert (await run).trained == 8
        await training.wait_empty()


async def test_rows_of_another_target_are_refused_and_freed(
    redis_url: str, text_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with training_fleet(redis_url, text_checkpoint, tmp_path, without=TRAINER) as training:
        monkeypatch.setattr("fleet.stages.draft_heads.hash_of_target", lambda _: "ab" * 32)
        training.fleet.add_worker(TRAINER)
        with pytest.raises(SampleRefused, match="the head belongs to abab"):
            await training.source.capture(prompt(1))
        await training.wait_empty()
        figures = training.trainer.engine.stats().training
        assert figures is not None and figures.refused == 1 and figures.replay_bytes == 0


async def test_only_captures_fail_without_a_trainer(
    redis_url: str, text_checkpoint: Path, tmp_path: Path
) -> None:
    async with training_fleet(redis_url, text_checkpoint, tmp_path, without=TRAINER) as training:
        with pytest.raises(NoWorker, match="fleet worker trainer"):
            await training.source.capture(prompt(1))
        assert await answer(training.client, question(1))
        assert await training.client.telemetry.missing_roles() == []


async def test_capture_without_an_answer_is_refused(
    redis_url: str, text_checkpoint: Path, tmp_path: Path
) -> None:
    async with training_fleet(redis_url, text_checkpoint, tmp_path) as training:
        with pytest.raises(BadInput, match="needs the answer"):
            await training.source.capture(type(prompt(1))(spec=prompt(1).spec, answer=()))
        await training.wait_empty()


async def test_second_trainer_stands_by(
    redis_url: str, text_checkpoint: Path, tmp_path: Path
) -> None:
    async with training_fleet(redis_url, text_checkpoint, tmp_path) as training:
        second = training.fleet.add_worker(TRAINER)
        third = training.fleet.add_worker(TRAINER)
        assert second.availability.standing_by and third.availability.standing_by


async def test_trainer_forgets_its_samples_by_order(
    redis_url: str, text_checkpoint: Path, tmp_path: Path
) -> None:
    async with training_fleet(redis_url, text_checkpoint, tmp_path) as training:
        source = training.source
        await asyncio.gather(*(source.capture(prompt(number)) for number in range(2)))
        engine = training.trainer.engine

        def held() -> int:
            figures = engine.stats().training
            assert figures is not None
            return figures.replay_samples

        assert held() == 2
        await training.client.training.forget_samples()

        async def is_empty() -> bool:
            return held() == 0

        await await_until(is_empty, "the samples to be forgotten", timeout_s=3.0)
