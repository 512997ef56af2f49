"""A trainer's engine without a fleet, whose clock the test sets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.core.captures import LAST_ROWS, TAPS
from fleet.core.ids import RequestId, Walk
from fleet.core.request import Sampling
from fleet.drafts.eagle3.config import Eagle3Config
from fleet.drafts.eagle3.head import Eagle3Head
from fleet.drafts.trainer.engine import ANSWER_START, TrainerEngine
from fleet.drafts.trainer.folder import checkpoints_of
from fleet.drafts.trainer.replay import ReplayBuffer
from fleet.drafts.trainer.samples import DraftSample, TargetParts
from fleet.drafts.trainer.schedule import TrainingSchedule
from fleet.drafts.trainer.trainer import Trainer, TrainerSettings
from fleet.engine.base import EngineInput, EngineOutput, EngineRequest, await_ready
from fleet.graphs.training import PUBLISH
from tests.draft_records import LocalRecords, RecordTable
from tests.unit.test_draft_trainer import CONFIG, greedy_sample, make_target, make_trainer

TRAIN = Walk("train")
TARGET = bytes(range(32)).hex()


@dataclass
class Seconds:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class TrainerBench:
    """A trainer whose clock the test sets."""

    folder: Path
    table: RecordTable = field(default_factory=RecordTable)
    clock: Seconds = field(default_factory=Seconds)
    passes: int = 1
    num_slots: int = 4
    checkpoint_windows: int = 8
    held_out: float = 0.0
    margin: float | None = None
    max_bytes: int = 1 << 20
    engine: TrainerEngine = field(init=False)
    records: LocalRecords = field(init=False)

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
        self.records = LocalRecords(self.table)
        engine.begin(self.records)
        return engine

    def checkpoint(self) -> Path:
        """Return the folder of the newest checkpoint; fail the test if there is none."""
        return checkpoints_of(self.folder)[0]

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


def num_windows(engine: TrainerEngine) -> int:
    figures = engine.stats().training
    assert figures is not None
    return figures.windows


def trained(bench: TrainerBench, name: str, engine: TrainerEngine | None = None) -> None:
    """Train on one sample, and check that it is acknowledged."""
    bench.send(name, greedy_sample([int(name[1:]) + 1, 9, 2, 7]), engine)
    bench.clock.now_s += 10
    assert names(bench.run(engine)) == [name]
