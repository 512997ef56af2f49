"""The trainer's engine: samples are acknowledged once, after a durable checkpoint, from which a
successor continues.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from fleet.core.captures import LAST_ROWS, TAPS
from fleet.core.errors import ConfigError, SampleRefused
from fleet.core.ids import RequestId, Walk
from fleet.core.request import Sampling
from fleet.drafts.eagle3.config import Eagle3Config
from fleet.drafts.eagle3.files import load_head
from fleet.drafts.eagle3.head import Eagle3Head
from fleet.drafts.figures.training import DraftVersion
from fleet.drafts.trainer.checkpoints import CHECKPOINTS, VERSIONS
from fleet.drafts.trainer.engine import ANSWER_START, VERSION, WINDOWS, TrainerEngine
from fleet.drafts.trainer.records import TrainingRecords
from fleet.drafts.trainer.replay import ReplayBuffer
from fleet.drafts.trainer.samples import DraftSample, TargetParts
from fleet.drafts.trainer.schedule import TrainingSchedule
from fleet.drafts.trainer.state import MOMENTS_FILE, read_samples
from fleet.drafts.trainer.trainer import Trainer, TrainerSettings
from fleet.engine.base import EngineInput, EngineOutput, EngineRequest, await_ready
from fleet.graphs.training import PUBLISH
from tests.unit.test_draft_trainer import CONFIG, greedy_sample, make_target, make_trainer

TRAIN = Walk("train")
TARGET = bytes(range(32)).hex()


class LocalRecords(TrainingRecords):
    """Records of one trainer, kept in memory instead of Redis."""

    def __init__(self) -> None:
        self._checkpoint = ""
        self.versions: list[DraftVersion] = []
        self.present: DraftVersion | None = None

    def checkpoint(self) -> str:
        return self._checkpoint

    def note_checkpoint(self, name: str) -> bool:
        self._checkpoint = name
        return True

    def add_version(self, version: DraftVersion) -> DraftVersion | None:
        known = next((each for each in self.versions if each.sha256 == version.sha256), None)
        if known is not None:
            return known
        self.versions.append(msgspec.structs.replace(version, number=len(self.versions) + 1))
        return self.versions[-1]

    def version_in_use(self) -> DraftVersion | None:
        return self.present

    def promote(self, version: DraftVersion, present: DraftVersion | None, reason: str) -> bool:
        self.present = version
        return True


@dataclass
class Seconds:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class TrainerBench:
    """A trainer whose clock the test sets."""

    folder: Path
    records: LocalRecords = field(default_factory=LocalRecords)
    clock: Seconds = field(default_factory=Seconds)
    passes: int = 1
    num_slots: int = 4
    checkpoint_windows: int = 8
    held_out: float = 0.0
    margin: float | None = None
    max_bytes: int = 1 << 20
    engine: TrainerEngine = field(init=False)

    def __post_init__(self) -> None:
        self.engine = self.successor()

    def successor(self) -> TrainerEngine:
        plain = make_trainer([greedy_sample([1, 2, 3, 4])])
        config = Eagle3Config.from_json(CONFIG.as_json() | {"target_hash": TARGET}, "test")
        target = make_target()
        trainer = Trainer(
            Eagle3Head(config, plain.head.vocabulary_D, seed=1),
            TargetParts(embed=target.model.embed_tokens, head=target.lm_head),
            TrainerSettings(window_samples=2, batch_samples=1, num_steps=3),
            ReplayBuffer(max_samples=8, max_bytes=self.max_bytes),
        )
        schedule = TrainingSchedule(
            num_slots=self.num_slots,
            window_samples=2,
            passes=self.passes,
            checkpoint_windows=self.checkpoint_windows,
            held_out=self.held_out,
            margin=self.margin,
        )
        engine = TrainerEngine(trainer, schedule, self.folder, self.clock)
        engine.begin(self.records)
        return engine

    def send(
        self,
        name: str,
        sample: DraftSample,
        engine: TrainerEngine | None = None,
        publish: str = "",
        parts: Mapping[str, NDArray[Any]] | None = None,
    ) -> None:
        """Feed a sample in two chunks, as the request `name`. `parts`: arrays to send instead of
        the sample's own, per chunk.
        """
        engine = engine or self.engine
        params = {ANSWER_START: str(sample.answer_start), PUBLISH: publish}
        engine.submit(EngineRequest(request_id=RequestId(name), sampling=Sampling(), params=params))
        assert sample.last_NH is not None
        rows = {
            "ids": sample.ids_N.int().numpy(),
            TAPS: sample.taps_NT.numpy(),
            LAST_ROWS: sample.last_NH.numpy(),
        }
        target = np.frombuffer(bytes.fromhex(TARGET), np.uint8)
        shared = {
            "layer_ids": np.array(sample.layer_ids, np.int32),
            "target": target,
            **(parts or {}),
        }
        for start, stop in ((0, 7), (7, len(sample.ids_N))):
            arrays: dict[str, NDArray[Any]] = {
                key: value[start:stop] for key, value in rows.items()
            } | shared
            engine.feed(
                RequestId(name),
                EngineInput(walk=TRAIN, arrays=arrays, final=stop == len(sample.ids_N)),
            )

    def run(self, engine: TrainerEngine | None = None) -> list[EngineOutput]:
        """Step until no sample is ready and the training thread is idle."""
        engine, found = engine or self.engine, list[EngineOutput]()
        while await_ready(engine, 30):
            found += engine.step()
        return found


def texts(count: int) -> list[DraftSample]:
    return [greedy_sample([first + 1, 9, 2, 7]) for first in range(count)]


def names(outputs: Sequence[EngineOutput]) -> list[str]:
    return [output.request_id for output in outputs if output.final]


def test_sample_is_acknowledged_after_a_checkpoint_that_contains_it(tmp_path: Path) -> None:
    bench = TrainerBench(tmp_path, num_slots=5)
    for number, sample in enumerate(texts(2)):
        bench.send(f"s{number}", sample)
    assert not names(bench.run()) and bench.records.checkpoint() == "", "further samples may come"
    bench.clock.now_s += 1
    acknowledged = bench.run()
    assert names(acknowledged) == ["s0", "s1"] and all(
        output.arrays[WINDOWS] == 1 for output in acknowledged
    )
    assert (tmp_path / CHECKPOINTS / bench.records.checkpoint()).is_dir()
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


class FencedRecords(LocalRecords):
    """Records of a worker that is fenced, since a successor trains in its place."""

    def note_checkpoint(self, name: str) -> bool:
        return False


def test_trainer_that_was_replaced_acknowledges_nothing(tmp_path: Path) -> None:
    bench = TrainerBench(tmp_path, records=FencedRecords())
    bench.send("s0", texts(1)[0])
    for _ in range(3):
        bench.clock.now_s += 10
        assert not bench.run()
    assert bench.engine.stats().running == 1


def test_checkpoint_of_another_folder_fails_the_request_with_the_remedy(tmp_path: Path) -> None:
    bench = TrainerBench(tmp_path)
    bench.records.note_checkpoint("00000007-elsewhere")
    with pytest.raises(ConfigError, match="all trainers need one folder"):
        bench.send("s0", texts(1)[0])


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
    (version,) = bench.records.versions
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
    (version,) = bench.records.versions
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


def num_windows(engine: TrainerEngine) -> int:
    figures = engine.stats().training
    assert figures is not None
    return figures.windows


def test_nothing_is_due_while_another_sample_arrives(tmp_path: Path) -> None:
    """Nothing is due while another sample arrives; otherwise the worker's loop would not sleep
    until the rows come, which may take long under load.
    """
    bench = TrainerBench(tmp_path)
    bench.send("s0", texts(1)[0])
    assert 0 < bench.engine.due_in_s() < math.inf
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


def test_same_bytes_are_the_same_version() -> None:
    records = LocalRecords()
    version = DraftVersion(number=0, sha256="a", target="t", num_bytes=1)
    assert records.add_version(version) == records.add_version(version)


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


def test_checkpoint_without_a_new_window_has_the_files_of_the_last_one(tmp_path: Path) -> None:
    bench = TrainerBench(tmp_path, held_out=1.0)
    files: list[tuple[int, tuple[str, ...]]] = []
    for number, sample in enumerate(texts(2)):
        bench.send(f"s{number}", sample)
        bench.clock.now_s += 1
        bench.run()
        folder = tmp_path / CHECKPOINTS / bench.records.checkpoint()
        files.append(((folder / MOMENTS_FILE).stat().st_ino, read_samples(folder).contained))
    (first, _), (second, contained) = files
    assert first == second and contained == ("s0", "s1")
    successor = bench.successor()
    bench.send("s1", texts(2)[1], successor)
    bench.clock.now_s += 1
    assert names(bench.run(successor)) == ["s1"], "the state can be read"


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
    samples = read_samples(tmp_path / CHECKPOINTS / bench.records.checkpoint())
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
    return bench.records.versions[-1]


def test_version_that_is_better_on_held_out_samples_is_promoted(tmp_path: Path) -> None:
    bench = TrainerBench(tmp_path, held_out=0.5, passes=100, margin=0.05, checkpoint_windows=1000)
    version = published(bench, 100)
    assert bench.records.present == version and (version.acceptance or 0) > 0.05, "none was in use"


def test_version_that_is_no_better_is_kept_and_not_promoted(tmp_path: Path) -> None:
    bench = TrainerBench(tmp_path, held_out=0.5, passes=100, margin=0.05, checkpoint_windows=1000)
    good = published(bench, 100)
    bench.engine._trainer.reset()  # pyright: ignore[reportPrivateUsage]
    bench.records.present = good
    bench.engine._schedule = replace(bench.engine._schedule, passes=1)  # pyright: ignore[reportPrivateUsage]
    assert (
        published(bench, 1) != good
        and bench.records.present == good
        and len(bench.records.versions) == 2
    )


def test_no_version_is_promoted_unless_the_operator_wants_it(tmp_path: Path) -> None:
    bench = TrainerBench(tmp_path, held_out=0.5, passes=10)
    published(bench, 10)
    assert bench.records.present is None
