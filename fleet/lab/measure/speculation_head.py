"""Training of a draft head in one process,: from the answers of the stage that is
measured. Knows no model.

The stage answers and captures in one thread while the trainer fits in another, as long as the time
lasts.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch

from fleet.config import FleetConfig
from fleet.core.request import RequestSpec
from fleet.drafts.eagle3.files import save_head
from fleet.drafts.trainer.captured import sample_of
from fleet.drafts.trainer.engine import TrainerEngine
from fleet.drafts.trainer.online import build_online_training
from fleet.drafts.trainer.samples import DraftSample
from fleet.engine.base import EngineOutput
from fleet.graphs.training import TRAINED, TRAINER
from fleet.lab.measure.engine_answers import answer
from fleet.lab.measure.speculation import HeadWork, TrainedHead
from fleet.stages.base import BuiltStage
from fleet.worker.main import build_stage

BATCH = 16
"""Answers that are computed at one time."""
LINES = 100
"""Lines of progress over the whole time."""


def train(config: FleetConfig, work: HeadWork, folder: Path) -> TrainedHead:
    """Train a head for `work.seconds`, and write it to `folder`."""
    torch.set_num_threads(1)
    stage = config.graph_declaration().main_stage
    built = build_stage(config, stage.name, Path(config.checkpoint))
    engine = build_stage(config, TRAINER, Path(config.checkpoint)).engine
    assert isinstance(engine, TrainerEngine), "the trainer's engine"
    trainer, held_out = engine.trainer, list(_samples(built, work.held_out))
    began_s = time.monotonic()
    progress = _Progress(began_s, work.seconds)

    def produce() -> Iterator[DraftSample]:
        for sample in _samples(built, work.taught):
            if progress.report():
                return
            yield sample

    _, loader, run = build_online_training(
        trainer, trainer.settings, produce, capacity=2 * trainer.settings.window_samples
    )
    run()
    while not progress.report():
        trainer.train_window()
    counts = trainer.evaluate(held_out)
    save_head(trainer.head, folder)
    return TrainedHead(
        windows=trainer.num_windows,
        samples=len(trainer.buffer) + trainer.buffer.num_dropped,
        refused=loader.num_refused,
        seconds=time.monotonic() - began_s,
        held_out=counts.simulated_acceptance_length,
    )


class _Progress:
    """Prints a line at each hundredth of the time."""

    def __init__(self, began_s: float, seconds: float) -> None:
        self._began_s, self._seconds, self._num_lines = began_s, seconds, 0

    def report(self) -> bool:
        """Return True once the time is over."""
        share = (time.monotonic() - self._began_s) / self._seconds
        while self._num_lines < min(1.0, share) * LINES:
            self._num_lines += 1
            print(f"trained for {self._num_lines / LINES:.0%} of the time")
        return share >= 1


def _samples(built: BuiltStage, specs: Sequence[RequestSpec]) -> Iterator[DraftSample]:
    """Answer requests, and capture each answer."""
    for first in range(0, len(specs), BATCH):
        some = specs[first : first + BATCH]
        for spec, ids in zip(some, answer(built, some, BATCH), strict=True):
            yield _capture(
                built, msgspec.structs.replace(spec, given=tuple(ids), outputs=(TRAINED,))
            )


def _capture(built: BuiltStage, spec: RequestSpec) -> DraftSample:
    """Compute the rows of a prompt and its answer. Raises: FleetError if the engine fails it."""
    adapter = built.adapter(spec, None)
    request, pieces = adapter.open()
    built.engine.submit(request)
    for piece in pieces:
        built.engine.feed(spec.id, piece)
    items = [item for output in _outputs(built) for item in adapter.produce(output)]
    return sample_of(spec.id, len(spec.prompt_ids), [item.arrays for item in items])


def _outputs(built: BuiltStage) -> Iterator[EngineOutput]:
    """Yield the outputs of the only request, to its end."""
    while True:
        for output in built.engine.step():
            if output.error is not None:
                raise output.error
            yield output
            if output.final:
                return
