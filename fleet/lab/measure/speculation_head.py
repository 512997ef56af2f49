"""Training of a draft head in one process, on hidden states of the answers of the measured stage.
Knows no model.

The stage answers and produces samples in one thread while the trainer trains in another, until the
time is over.
"""

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch

from fleet.config import FleetConfig
from fleet.core.errors import SampleRefused
from fleet.core.request import RequestSpec
from fleet.drafts.eagle3.files import save_head
from fleet.drafts.trainer.engine import TrainerEngine
from fleet.drafts.trainer.samples import DraftSample, sample_of
from fleet.drafts.trainer.trainer import Trainer
from fleet.engine.base import EngineOutput
from fleet.graphs.training import TRAINED, TRAINER
from fleet.lab.measure.engine_answers import answer
from fleet.lab.measure.speculation import HeadWork, TrainedHead
from fleet.stages.base import BuiltStage
from fleet.worker.main import build_stage

BATCH = 16
"""Number of answers computed concurrently."""
POLL_S = 0.1
LINES = 100
"""Number of progress lines over the whole training time."""


def train(config: FleetConfig, work: HeadWork, folder: Path) -> TrainedHead:
    """Train a draft head for `work.seconds`, and write it to `folder`."""
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

    num_refused = _train_on(trainer, produce())
    while not progress.report():
        trainer.train_window()
    counts = trainer.evaluate(held_out)
    save_head(trainer.head, folder)
    return TrainedHead(
        windows=trainer.num_windows,
        samples=len(trainer.buffer) + trainer.buffer.num_dropped,
        refused=num_refused,
        seconds=time.monotonic() - began_s,
        held_out=counts.simulated_acceptance_length,
    )


def _train_on(trainer: Trainer, samples: Iterator[DraftSample]) -> int:
    """Train on samples while a thread produces them; return the number of samples that did not fit
    the head.
    """
    arrived: queue.Queue[DraftSample | None] = queue.Queue(2 * trainer.settings.window_samples)
    has_ended = threading.Event()

    def produce() -> None:
        try:
            for sample in itertools.takewhile(lambda _: not has_ended.is_set(), samples):
                arrived.put(sample)
        finally:
            arrived.put(None)

    with ThreadPoolExecutor(1, "samples") as thread:
        producing = thread.submit(produce)
        try:
            num_refused = _fit(trainer, arrived)
        finally:
            has_ended.set()
            _drain(arrived, producing)
        producing.result()
    return num_refused


def _fit(trainer: Trainer, arrived: queue.Queue[DraftSample | None]) -> int:
    """Train on windows of new samples until None arrives in the queue; return the number of samples
    that did not fit the head.
    """
    num_refused, whole, buffer = 0, trainer.settings.window_samples, trainer.buffer
    while (sample := arrived.get()) is not None:
        num_refused += _is_refused(trainer, sample)
        if buffer.num_fresh >= whole:
            trainer.train_window()
    if buffer.num_fresh:
        trainer.train_on(buffer.draw(min(whole, len(buffer))))
    return num_refused


def _drain(arrived: queue.Queue[DraftSample | None], producing: Future[None]) -> None:
    """Empty the queue until the producer has ended, since the producer may be waiting for room in
    the queue.
    """
    while not producing.done():
        with contextlib.suppress(queue.Empty):
            arrived.get(timeout=POLL_S)


def _is_refused(trainer: Trainer, sample: DraftSample) -> bool:
    """Add a sample to the trainer; return True if the sample does not fit the head."""
    try:
        trainer.add(sample)
    except SampleRefused:
        return True
    return False


class _Progress:
    """Prints a progress line at each hundredth of the training time."""

    def __init__(self, began_s: float, seconds: float) -> None:
        self._began_s = began_s
        self._seconds = seconds
        self._num_lines = 0

    def report(self) -> bool:
        """Print due progress lines; return True once the time is over."""
        share = (time.monotonic() - self._began_s) / self._seconds
        while self._num_lines < min(1.0, share) * LINES:
            self._num_lines += 1
            print(f"trained for {self._num_lines / LINES:.0%} of the time")
        return share >= 1


def _samples(built: BuiltStage, specs: Sequence[RequestSpec]) -> Iterator[DraftSample]:
    """Answer the requests, and yield a sample with the hidden states of each answer."""
    for first in range(0, len(specs), BATCH):
        some = specs[first : first + BATCH]
        for spec, ids in zip(some, answer(built, some, BATCH), strict=True):
            yield _capture(
                built, msgspec.structs.replace(spec, given=tuple(ids), outputs=(TRAINED,))
            )


def _capture(built: BuiltStage, spec: RequestSpec) -> DraftSample:
    """Compute the hidden states of a prompt and its answer. Raises: FleetError if the engine fails
    the request.
    """
    adapter = built.adapter(spec, None)
    request, pieces = adapter.open()
    built.engine.submit(request)
    for piece in pieces:
        built.engine.feed(spec.id, piece)
    items = [item for output in _outputs(built) for item in adapter.produce(output)]
    return sample_of(spec.id, len(spec.prompt_ids), [item.arrays for item in items])


def _outputs(built: BuiltStage) -> Iterator[EngineOutput]:
    """Yield the engine outputs of the only open request, to its end."""
    while True:
        for output in built.engine.step():
            if output.error is not None:
                raise output.error
            yield output
            if output.final:
                return
