"""Training in one process: producer and trainer may end in any order, each time within a bound and
with one cause.
"""

import threading
from collections.abc import Iterator

import pytest

from fleet.core.errors import ConfigError
from fleet.drafts.trainer.online import (
    OnlineRun,
    SampleChannel,
    WindowLoader,
    build_online_training,
)
from fleet.drafts.trainer.samples import DraftSample
from fleet.drafts.trainer.trainer import Trainer, TrainerSettings, WindowRecord
from tests.unit.test_draft_trainer import greedy_sample, make_trainer

SETTINGS = TrainerSettings(window_samples=2, batch_samples=2, num_steps=2)


def samples(count: int) -> Iterator[DraftSample]:
    for number in range(count):
        yield greedy_sample([1 + number % 60, 9, 2, 7], length=8, sample_id=f"s{number}")


def compose(
    produced: Iterator[DraftSample], **options: object
) -> tuple[Trainer, WindowLoader, OnlineRun, list[WindowRecord]]:
    records: list[WindowRecord] = []
    trainer = make_trainer([], SETTINGS, on_window=records.append)
    return *build_online_training(
        trainer,
        SETTINGS,
        lambda: produced,
        capacity=2,
        **options,  # pyright: ignore
    ), records


def test_run_drains_its_pool_and_terminates() -> None:
    finished: list[Trainer] = []
    trainer, loader, run, records = compose(samples(5), on_finished=finished.append)
    assert run() == run.end == "finished" and finished == [trainer] and loader.num_refused == 0
    trained = {sample_id for record in records for sample_id in record.sample_ids}
    assert trained == {f"s{number}" for number in range(5)}, (
        "what is left below a window is trained on too"
    )


def test_trainer_that_stops_first_unblocks_its_producer() -> None:
    ended = threading.Event()

    def endless() -> Iterator[DraftSample]:
        try:
            yield from samples(10_000)
        finally:
            ended.set()

    finished: list[Trainer] = []
    trainer, _, run, _ = compose(endless(), max_windows=3, on_finished=finished.append)
    assert run() == "stopped" and trainer.num_windows == 3 and finished == []
    assert ended.wait(10), "the producer, which waited for room, has ended"


def test_producer_exception_propagates_and_unblocks_consumer() -> None:
    def failing() -> Iterator[DraftSample]:
        yield from samples(3)
        raise RuntimeError("no more samples")

    finished: list[Trainer] = []
    _, _, run, _ = compose(failing(), on_finished=finished.append)
    with pytest.raises(RuntimeError, match="no more samples"):
        run()
    assert run.end == "failed" and finished == []


def test_errors_of_trainer_and_producer_are_chained(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer_failed = threading.Event()

    def failing() -> Iterator[DraftSample]:
        yield from samples(2)
        assert trainer_failed.wait(10)
        raise RuntimeError("no more samples")

    def train_on(_trainer: Trainer, _samples: object) -> None:
        trainer_failed.set()
        raise ArithmeticError("not a number")

    monkeypatch.setattr(Trainer, "train_on", train_on)
    _, _, run, _ = compose(failing())
    with pytest.raises(RuntimeError, match="no more samples") as raised:
        run()
    assert isinstance(raised.value.__cause__, ArithmeticError) and run.end == "failed"


def test_error_of_the_trainer_ends_its_producer(monkeypatch: pytest.MonkeyPatch) -> None:
    def train_on(_trainer: Trainer, _samples: object) -> None:
        raise ArithmeticError("not a number")

    monkeypatch.setattr(Trainer, "train_on", train_on)
    _, _, run, _ = compose(samples(10_000))
    with pytest.raises(ArithmeticError, match="not a number"):
        run()
    assert run.end == "failed"


def test_windows_are_trained_on_while_samples_are_produced() -> None:
    trained = threading.Event()

    def waiting() -> Iterator[DraftSample]:
        yield from samples(4)
        assert trained.wait(10), "a window, although the producer has not ended"
        yield greedy_sample([61, 9, 2, 7], length=8, sample_id="last")

    trainer = make_trainer([], SETTINGS, on_window=lambda _: trained.set())
    _, _, run = build_online_training(trainer, SETTINGS, waiting, capacity=2)
    assert run() == "finished" and trainer.num_windows == 3


def test_producer_waits_for_room() -> None:
    channel = SampleChannel(1)
    first, second = samples(2)
    channel.put(first)
    putting = threading.Thread(target=lambda: channel.put(second))
    putting.start()
    assert channel.take(wait=True) is first
    assert channel.take(wait=True) is second
    putting.join(10)
    assert not putting.is_alive()


def test_capacity_below_a_window_is_refused() -> None:
    with pytest.raises(ConfigError, match="less than a window"):
        build_online_training(make_trainer([]), SETTINGS, lambda: [], capacity=1)


def test_sample_that_does_not_fit_is_counted_and_skipped() -> None:
    def produced() -> Iterator[DraftSample]:
        yield greedy_sample([1, 9, 2, 7], length=8, target_hash="another")
        yield from samples(2)

    _, loader, run, _ = compose(produced())
    assert run() == "finished" and loader.num_refused == 1
