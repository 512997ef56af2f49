"""The trainer's engine: samples are acknowledged once, after a durable checkpoint, from which a
successor continues.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fleet.core.captures import LAST_ROWS, TAPS
from fleet.core.errors import ConfigError, SampleRefused
from fleet.core.ids import RequestId
from fleet.core.request import Sampling
from fleet.drafts.eagle3.files import load_head
from fleet.drafts.figures.training import DraftVersion
from fleet.drafts.trainer.engine import (
    ANSWER_START,
    VERSION,
    WINDOWS,
)
from fleet.drafts.trainer.folder import VERSIONS, checkpoints_of
from fleet.drafts.trainer.schedule import TrainingSchedule
from fleet.drafts.trainer.state import read_samples
from fleet.engine.base import EngineRequest, await_ready
from tests.trainer_bench import TARGET, TrainerBench, names, num_windows, texts
from tests.unit.test_draft_trainer import greedy_sample

pytestmark = pytest.mark.one_file_in(3, "parts with processes")


def test_sample_is_acknowledged_after_a_checkpoint_that_contains_it(tmp_path: Path) -> None:
    bench = TrainerBench(tmp_path, num_slots=5)
    for number, sample in enumerate(texts(2)):
        bench.send(f"s{number}", sample)
    assert not names(bench.run()) and not checkpoints_of(tmp_path), "further samples may come"
    bench.clock.now_s += 1
    acknowledged = bench.run()
    assert names(acknowledged) == ["s0", "s1"] and all(
        output.arrays[WINDOWS] == 1 for output in acknowledged
    )
    assert read_samples(bench.checkpoint()).contained == ("s0", "s1")
    assert bench.engine.stats().running == 0


def test_full_slots_are_acknowledged_without_a_pause(tmp_path: Path) -> None:
    bench = TrainerBench(tmp_path)
    for number, sample in enumerate(texts(4)):
        bench.send(f"s{number}", sample)
    assert sorted(names(bench.run())) == ["s0", "s1", "s2", "s3"]


def test_sample_is_trained_on_as_often_as_its_passes_say(tmp_path: Path) -> None:
    bench = TrainerBench(tmp_path, passes=6)
    for number, sample in enumerate(texts(2)):
        bench.send(f"s{number}", sample)
    bench.clock.now_s += 1
    assert names(bench.run()) == ["s0", "s1"]
    figures = bench.engine.stats().training
    assert figures is not None and figures.windows == 6 and figures.checkpoint == 6


def test_successor_acknowledges_samples_of_the_checkpoint_without_training(tmp_path: Path) -> None:
    """A successor acknowledges the samples of the checkpoint without training on them: its
    predecessor died between the checkpoint and the acknowledgement.
    """
    bench = TrainerBench(tmp_path)
    for number, sample in enumerate(texts(2)):
        bench.send(f"s{number}", sample)
    bench.clock.now_s += 1
    assert names(bench.run()) == ["s0", "s1"]
    successor = bench.successor()
    for number, sample in enumerate(texts(3)):
        bench.send(f"s{number}", sample, successor)
    bench.clock.now_s += 1
    assert sorted(names(bench.run(successor))) == ["s0", "s1", "s2"]
    figures = successor.stats().training
    assert figures is not None and figures.windows == 2, "one window more, for the third sample"


def test_sample_that_no_checkpoint_contains_is_trained_on_by_the_successor(tmp_path: Path) -> None:
    bench = TrainerBench(tmp_path)
    for number, sample in enumerate(texts(2)):
        bench.send(f"s{number}", sample)
    bench.run()  # a window, and no checkpoint
    successor = bench.successor()
    for number, sample in enumerate(texts(2)):
        bench.send(f"s{number}", sample, successor)
    bench.clock.now_s += 1
    assert sorted(names(bench.run(successor))) == ["s0", "s1"]
    figures = successor.stats().training
    assert figures is not None and figures.windows == 1


def test_trainer_that_was_replaced_acknowledges_nothing(tmp_path: Path) -> None:
    bench = TrainerBench(tmp_path)
    bench.records.fence()
    bench.send("s0", texts(1)[0])
    for _ in range(3):
        bench.clock.now_s += 10
        assert not bench.run()
    assert bench.engine.stats().running == 1


@pytest.mark.parametrize(
    ("parts", "cause"),
    [
        ({"target": np.zeros(32, np.uint8)}, "computed by the target 0000"),
        ({"layer_ids": np.array([2, 3, 5], np.int32)}, "taps of the layers"),
        ({TAPS: np.zeros((7, 5), np.float32)}, "have the shape"),
        ({LAST_ROWS: np.full((7, 32), np.nan, np.float32)}, "shape|finite"),
    ],
)
def test_sample_that_does_not_fit_is_refused_and_frees_its_bytes(
    tmp_path: Path, parts: dict[str, NDArray[Any]], cause: str
) -> None:
    bench = TrainerBench(tmp_path)
    bench.send("s0", greedy_sample([1, 9, 2, 7], length=14), parts=parts)
    (output,) = bench.run()
    assert isinstance(output.error, SampleRefused)
    figures = bench.engine.stats()
    assert figures.running == 0 and figures.training is not None
    assert figures.training.refused == 1 and figures.training.replay_bytes == 0


def test_window_without_a_finite_gradient_refuses_its_samples(tmp_path: Path) -> None:
    bench = TrainerBench(tmp_path)
    for parameter in bench.engine._trainer.head.parameters():  # pyright: ignore[reportPrivateUsage]
        parameter.data.fill_(float("nan"))
    for number, sample in enumerate(texts(2)):
        bench.send(f"s{number}", sample)
    outputs = bench.run()
    assert {output.request_id for output in outputs} == {"s0", "s1"}
    assert all(isinstance(output.error, SampleRefused) for output in outputs)


def test_version_has_the_bytes_of_the_checkpoint_and_a_number(tmp_path: Path) -> None:
    bench = TrainerBench(tmp_path, held_out=0.0)
    bench.send("s0", texts(1)[0], publish="weekly")
    bench.clock.now_s += 1
    (output,) = bench.run()
    (version,) = bench.table.versions
    assert output.arrays[VERSION] == version.number == 1 and version.source == "weekly"
    head = load_head(tmp_path / VERSIONS / version.sha256, target_hash=TARGET)
    trained = bench.engine._trainer.head  # pyright: ignore[reportPrivateUsage]
    assert all(
        np.array_equal(one.detach(), other.detach())
        for one, other in zip(head.parameters(), trained.parameters(), strict=True)
    )


def test_held_out_samples_are_acknowledged_and_never_trained_on(tmp_path: Path) -> None:
    bench = TrainerBench(tmp_path, held_out=0.5)
    for number, sample in enumerate(texts(4)):
        bench.send(f"s{number}", sample, publish="run")
    bench.clock.now_s += 1
    assert len(names(bench.run())) == 4
    figures = bench.engine.stats().training
    assert (
        figures is not None and figures.held_out and figures.replay_samples == 4 - figures.held_out
    )
    (version,) = bench.table.versions
    assert version.acceptance is not None


def test_aborted_sample_leaves_nothing(tmp_path: Path) -> None:
    bench = TrainerBench(tmp_path)
    bench.send("s0", texts(1)[0])
    bench.engine.abort(RequestId("s0"))
    bench.clock.now_s += 1
    assert bench.run() == []
    stats = bench.engine.stats()
    assert stats.running == 0 and stats.training is not None and stats.training.replay_bytes == 0


def test_capacity_below_a_window_is_refused() -> None:
    with pytest.raises(ConfigError, match="raise stages.trainer.max_batch"):
        TrainingSchedule(
            num_slots=3, window_samples=4, passes=1, checkpoint_windows=1, held_out=0.0
        )


def test_half_of_the_slots_are_acknowledged_before_further_windows(tmp_path: Path) -> None:
    """Half of the slots are acknowledged before further training windows, so that sources send new
    samples while the trainer computes the other windows of these samples.
    """
    bench = TrainerBench(tmp_path, num_slots=4, passes=4)
    for number, sample in enumerate(texts(2)):
        bench.send(f"s{number}", sample)
    acknowledged, windows_then = list[str](), -1
    while await_ready(bench.engine, 30):
        acknowledged += names(bench.engine.step())
        if acknowledged and windows_then < 0:
            windows_then = num_windows(bench.engine)
    assert acknowledged == ["s0", "s1"] and (windows_then, num_windows(bench.engine)) == (1, 4)


def test_nothing_is_due_while_another_sample_arrives(tmp_path: Path) -> None:
    """Nothing is due while another sample arrives; otherwise the worker's loop would not sleep
    until the rows come, which may take long under load.
    """
    bench = TrainerBench(tmp_path)
    bench.send("s0", texts(1)[0])
    assert bench.run() == [] and 0 < bench.engine.due_in_s() < math.inf
    bench.engine.submit(
        EngineRequest(request_id=RequestId("s1"), sampling=Sampling(), params={ANSWER_START: "1"})
    )
    bench.clock.now_s += 1
    assert not bench.engine.is_ready() and bench.engine.due_in_s() == math.inf
    bench.engine.abort(RequestId("s1"))
    assert bench.engine.due_in_s() == 0 and names(bench.run()) == ["s0"]


def test_full_disk_delays_the_acknowledgement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = TrainerBench(tmp_path)
    bench.send("s0", texts(1)[0])
    bench.clock.now_s += 1
    with monkeypatch.context() as patch:

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr("fleet.drafts.trainer.checkpoints.save_trainer", full)
        assert bench.run() == [] and bench.engine.due_in_s() > 0
    bench.clock.now_s += 10
    assert names(bench.run()) == ["s0"]


def test_state_without_a_checkpoint_starts_again(tmp_path: Path) -> None:
    """A trainer state without a checkpoint starts again: after training windows that no checkpoint
    has, the next incarnation trains from the first head.
    """
    bench = TrainerBench(tmp_path)
    for number, sample in enumerate(texts(2)):
        bench.send(f"s{number}", sample)
    bench.run()
    bench.engine.begin(bench.records)
    for number, sample in enumerate(texts(2)):
        bench.send(f"s{number}", sample)
    bench.clock.now_s += 1
    assert sorted(names(bench.run())) == ["s0", "s1"]
    figures = bench.engine.stats().training
    assert figures is not None and figures.windows == 1 and figures.waiting == 0


def test_samples_that_are_all_held_out_are_acknowledged_and_not_trained_on(tmp_path: Path) -> None:
    bench = TrainerBench(tmp_path, held_out=1.0)
    for number, sample in enumerate(texts(3)):
        bench.send(f"s{number}", sample)
    bench.clock.now_s += 1
    assert sorted(names(bench.run())) == ["s0", "s1", "s2"]
    figures = bench.engine.stats().training
    assert figures is not None and (figures.windows, figures.held_out) == (0, 3)


def test_checkpoint_names_each_new_sample_in_one_window_also_after_a_restart(
    tmp_path: Path,
) -> None:
    bench = TrainerBench(tmp_path, checkpoint_windows=1, passes=3)
    for number, sample in enumerate(texts(4)):
        bench.send(f"s{number}", sample)
    bench.clock.now_s += 1
    bench.run()
    successor = bench.successor()
    for number, sample in enumerate(texts(6)):
        if number >= 3:  # one of them again, whose acknowledgement was lost
            bench.send(f"s{number}", sample, successor)
    bench.clock.now_s += 1
    assert sorted(names(bench.run(successor))) == ["s3", "s4", "s5"]
    samples = read_samples(bench.checkpoint())
    new = [each for window in samples.windows for each in window]
    assert sorted(new) == [f"s{number}" for number in range(6)] and set(samples.contained) == set(
        new
    )
    figures = successor.stats().training
    assert figures is not None and samples.first + len(samples.windows) - 1 == figures.windows


def published(bench: TrainerBench, passes: int) -> DraftVersion:
    """Train on some samples, half of them held out, and return the published version."""
    for number, sample in enumerate(texts(4)):
        bench.send(f"p{passes}-{number}", sample, publish="run")
    bench.clock.now_s += 1
    bench.run()
    return bench.table.versions[-1]


def test_version_that_is_better_on_held_out_samples_is_promoted(tmp_path: Path) -> None:
    bench = TrainerBench(tmp_path, held_out=0.5, passes=100, margin=0.05, checkpoint_windows=1000)
    version = published(bench, 100)
    assert bench.table.present == version and (version.acceptance or 0) > 0.05, "none was in use"


def test_version_that_is_no_better_is_kept_and_not_promoted(tmp_path: Path) -> None:
    bench = TrainerBench(tmp_path, held_out=0.5, passes=100, margin=0.05, checkpoint_windows=1000)
    good = published(bench, 100)
    bench.engine._trainer.reset()  # pyright: ignore[reportPrivateUsage]
    bench.table.present = good
    schedule = bench.engine._schedule  # pyright: ignore[reportPrivateUsage]
    bench.engine._schedule = replace(schedule, passes=1)  # pyright: ignore[reportPrivateUsage]
    assert (
        published(bench, 1) != good
        and bench.table.present == good
        and len(bench.table.versions) == 2
    )


def test_no_version_is_promoted_unless_the_operator_wants_it(tmp_path: Path) -> None:
    bench = TrainerBench(tmp_path, held_out=0.5, passes=10)
    published(bench, 10)
    assert bench.table.present is None
