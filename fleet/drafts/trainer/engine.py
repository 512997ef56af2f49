"""The trainer as a worker's engine: receives hidden states of answers, and acknowledges each sample
once a durable checkpoint contains it.

A sample is trained on at least once before the checkpoint that acknowledges it, and at most once as
a new one: a successor that receives it again finds its id in the checkpoint. A window is the
samples of one optimizer step. A thread trains windows and writes checkpoints, one after another,
while samples arrive. Knows no Redis: what trainers share is in `TrainingRecords`.
"""

import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from fleet.core.errors import BadInput, FleetError, SampleRefused
from fleet.core.ids import RequestId, Walk
from fleet.drafts.figures.training import DraftVersion, TrainingFigures
from fleet.drafts.trainer.checkpoints import Checkpoints
from fleet.drafts.trainer.records import TrainingRecords, promote_if_better
from fleet.drafts.trainer.samples import DraftSample, sample_of
from fleet.drafts.trainer.schedule import TrainingSchedule
from fleet.drafts.trainer.state import TrainedSamples
from fleet.drafts.trainer.trainer import NotFinite, Trainer, WindowRecord
from fleet.engine.base import Arrays, Engine, EngineInput, EngineOutput, EngineRequest, EngineStats
from fleet.graphs.training import PUBLISH

log = logging.getLogger(__name__)

WINDOWS, VERSION = "windows", "version"
"""Arrays of an acknowledgement: windows in the checkpoint, and the number of the draft head version
made of it, 0 if none was made.
"""
ANSWER_START = "answer_start"
"""Request parameter: index of the answer's first token."""
IDLE_S = 0.1
"""Time without a new sample after which an incomplete window is trained."""
RETRY_S = 5.0
MOST_IDS, MOST_WINDOWS, MOST_HELD_OUT, MOST_LOSSES = 1024, 1024, 64, 100
UNKNOWN = "?"
"""Placeholder for a checkpoint's name while the trainer may contain unacknowledged samples."""


@dataclass(slots=True, kw_only=True)
class _Arriving:
    """A sample whose hidden states are still arriving."""

    request: EngineRequest
    parts: list[Arrays] = field(default_factory=list[Arrays])
    walk: Walk = Walk("")


@dataclass(slots=True, kw_only=True)
class _Waiting:
    """A sample that is not acknowledged yet. `is_contained`: True if the trainer's present state
    contains it. `publish`: source of the version to make with it, or "".
    """

    request: RequestId
    walk: Walk
    publish: str
    is_contained: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    """A checkpoint that was written to disk but is not in the records yet.

    `done`: samples to acknowledge. `windows`: optimizer steps in it. `version`: version to add, if
    any. `present`: version in use; `present_acceptance`: acceptance length of that version on
    held-out samples.
    """

    name: str
    samples: TrainedSamples
    done: list[_Waiting]
    windows: int
    version: DraftVersion | None
    present: DraftVersion | None
    present_acceptance: float


class TrainerEngine(Engine):
    """Engine that trains a draft head with the samples that it receives. `folder`: folder of the
    checkpoints and of the head's versions, shared by all trainers of the fleet.

    Invariants: the checkpoint that `TrainingRecords` names is never deleted; a sample is
    acknowledged once, after the records name a checkpoint that lists the sample's id.
    """

    def __init__(
        self,
        trainer: Trainer,
        schedule: TrainingSchedule,
        folder: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trainer = trainer
        self._schedule = schedule
        self._clock = clock
        self._folder, self._checkpoints = folder, Checkpoints(trainer, folder)
        self._records: TrainingRecords | None = None
        self._name = UNKNOWN
        """Name of the checkpoint from which the trainer's state continues."""
        self._contained: tuple[str, ...] = ()
        self._drawn: tuple[str, ...] = ()
        self._new: deque[tuple[str, ...]] = deque(maxlen=MOST_WINDOWS)
        """Ids of new samples. `_drawn`: samples of the window that is computed now. `_new`: samples
        of each window that the trainer's state contains.
        """
        self._arriving: dict[RequestId, _Arriving] = {}
        self._waiting: dict[RequestId, _Waiting] = {}
        self._queue: OrderedDict[str, DraftSample] = OrderedDict()
        self._held_out: OrderedDict[str, DraftSample] = OrderedDict()
        self._outputs: list[EngineOutput] = []
        self._thread = ThreadPoolExecutor(1, "fleet-trainer")
        self._window: Future[WindowRecord] | None = None
        self._saving: Future[_Saved] | None = None
        self._owed, self._num_since = 0.0, 0
        """`_owed`: windows still to be trained for the accepted samples. `_num_since`: windows
        since the last checkpoint.
        """
        self._arrived_s = self._retry_s = -math.inf
        self._losses: deque[float] = deque(maxlen=MOST_LOSSES)
        self._shares: tuple[float, ...] = ()
        self._acceptance: float | None = None
        self._num_accepted = self._num_refused = self._num_saved = 0
        self.background = self
        self.samples = self

    @property
    def trainer(self) -> Trainer:
        """The trainer itself, for callers that train without a fleet."""
        return self._trainer

    def begin(self, records: TrainingRecords) -> None:
        """Forget all samples, and use the training records of the worker's next incarnation."""
        self._records = records
        self._forget()

    def submit(self, request: EngineRequest) -> None:
        """Expect the sample of a request. If there is no other unacknowledged sample, first load
        the checkpoint that the records name, which another trainer may have written.

        Raises: ConfigError if the last durable checkpoint is not in the folder; errors of Redis.
        """
        if request.request_id in self._arriving or request.request_id in self._waiting:
            raise BadInput(f"request {request.request_id} was submitted twice")
        if not self._arriving and not self._waiting:
            self._follow_checkpoint()
        self._arriving[request.request_id] = _Arriving(request=request)

    def feed(self, request_id: RequestId, piece: EngineInput) -> int:
        arriving = self._arriving.get(request_id)
        if arriving is None:
            return 0
        arriving.walk = piece.walk
        if piece.arrays:
            arriving.parts.append(piece.arrays)
        self._arrived_s = self._clock()
        if piece.final:
            del self._arriving[request_id]
            try:
                self._receive(arriving)
            except FleetError as error:
                self._num_refused += 1
                self._outputs.append(
                    EngineOutput(request_id=request_id, walk=piece.walk, error=error)
                )
        return 0

    def _receive(self, arriving: _Arriving) -> None:
        """Check a complete sample; queue it for training or hold it out. Raises: SampleRefused."""
        request = arriving.request
        sample = sample_of(request.request_id, int(request.params[ANSWER_START]), arriving.parts)
        sample.check(self._trainer.head.config)
        if not self._trainer.buffer.may_ever_hold(sample):
            raise SampleRefused(
                f"sample {sample.sample_id}: {sample.num_bytes >> 20} MiB do not fit "
                "training.replay_mib; raise it"
            )
        waiting = _Waiting(
            request=request.request_id, walk=arriving.walk, publish=request.params.get(PUBLISH, "")
        )
        self._num_accepted += 1
        self._waiting[request.request_id] = waiting
        if sample.sample_id in self._contained:
            waiting.is_contained = True
        elif self._schedule.holds_out(sample):
            waiting.is_contained = True
            self._held_out[sample.sample_id] = sample
            while len(self._held_out) > MOST_HELD_OUT:
                self._held_out.popitem(last=False)
        else:
            self._queue[sample.sample_id] = sample
            self._owed += self._schedule.passes / self._schedule.window_samples

    def pause(self, request_id: RequestId, *, paused: bool) -> None:
        """Do nothing: acknowledgements are single items, which never lack credit."""

    def is_ready(self) -> bool:
        work = self._work
        if self._outputs or (work is not None and work.done()):
            return True
        if work is not None or self._clock() < self._retry_s:
            return False
        self._fill_buffer()
        return bool(self._window_size() or self._is_checkpoint_due())

    @property
    def _work(self) -> "Future[WindowRecord] | Future[_Saved] | None":
        """The window or checkpoint that the thread is working on; None if it is idle."""
        return self._window or self._saving

    def due_in_s(self) -> float:
        if self.is_ready() or self._work is not None:
            return 0.0
        now_s = self._clock()
        if now_s < self._retry_s:
            return self._retry_s - now_s
        # While samples arrive, only more of their rows can make it ready.
        is_open = bool(self._waiting or self._num_since) and not self._arriving
        return max(0.0, self._arrived_s + IDLE_S - now_s) if is_open else math.inf

    def await_pass(self, timeout_s: float) -> bool:
        return self._await_work(timeout_s)

    def _await_work(self, timeout_s: float | None) -> bool:
        work = cast("Future[Any] | None", self._work)
        if work is None:
            return False
        wait([work], timeout_s)
        return work.done()

    def step(self) -> Sequence[EngineOutput]:
        """Begin a window or a checkpoint, or handle the one that has ended; return refusals and
        acknowledgements.
        """
        outputs, self._outputs = self._outputs, []
        if self._window is not None and self._window.done():
            window, self._window = self._window, None
            self._end_window(window)
        elif self._saving is not None and self._saving.done():
            saving, self._saving = self._saving, None
            outputs += self._end_save(saving)
        elif self._work is None and self._clock() >= self._retry_s:
            self._fill_buffer()
            is_checkpoint_due = self._is_checkpoint_due()
            if not is_checkpoint_due and (size := self._window_size()):
                self._drawn = self._trainer.buffer.fresh_ids(size)
                self._window = self._thread.submit(
                    self._trainer.train_on, self._trainer.buffer.draw(size)
                )
            elif is_checkpoint_due:
                done = [each for each in self._waiting.values() if each.is_contained]
                assert self._records is not None, "a trainer without records"
                present = (
                    self._records.version_in_use() if any(each.publish for each in done) else None
                )
                self._saving = self._thread.submit(
                    self._save, done, self._samples_with(done), present
                )
        return outputs

    def _samples_with(self, done: Sequence[_Waiting]) -> TrainedSamples:
        """Return the sample ids of a checkpoint that newly contains `done`."""
        contained = tuple(
            dict.fromkeys([*self._contained, *(waiting.request for waiting in done)])
        )[-MOST_IDS:]
        return TrainedSamples(
            contained=contained,
            windows=tuple(self._new),
            first=self._trainer.num_windows - len(self._new) + 1,
        )

    def _fill_buffer(self) -> None:
        while self._queue:
            sample_id, sample = next(iter(self._queue.items()))
            if not self._trainer.buffer.add(sample):
                return
            del self._queue[sample_id]

    def _window_size(self) -> int:
        """Return the number of samples of the next window: a whole window, or fewer if no more
        arrive; 0 if none is due.
        """
        buffer, whole = self._trainer.buffer, self._schedule.window_samples
        is_due = buffer.num_fresh >= whole or self._owed >= 1
        if len(buffer) >= whole and is_due:
            return whole
        return (
            min(whole, len(buffer))
            if self._is_settled() and (buffer.num_fresh or self._owed >= 1)
            else 0
        )

    def _is_settled(self) -> bool:
        """Return True if no sample can arrive soon: all slots are taken, or none arrived for
        `IDLE_S`.
        """
        is_full = len(self._waiting) >= self._schedule.num_slots or bool(self._queue)
        return is_full or (not self._arriving and self._clock() - self._arrived_s >= IDLE_S)

    def _is_checkpoint_due(self) -> bool:
        contained = [waiting for waiting in self._waiting.values() if waiting.is_contained]
        if self._saves_first(contained):
            return True
        return bool(contained or self._num_since) and self._is_settled() and not self._window_size()

    def _saves_first(self, contained: Sequence[_Waiting]) -> bool:
        """Return True if a checkpoint comes before further windows: it is due, or half of the slots
        wait for it only, so that sources can send while the trainer trains. Before a version, all
        windows are trained first.
        """
        if not contained or any(waiting.publish for waiting in contained):
            return False
        return (
            self._num_since >= self._schedule.checkpoint_windows
            or 2 * len(contained) >= self._schedule.num_slots
        )

    def _end_window(self, window: Future[WindowRecord]) -> None:
        """Count a window. If its gradient was not finite, refuse its samples."""
        try:
            record = window.result()
        except NotFinite as error:
            log.warning("%s: its samples are refused", error)
            for sample_id in error.sample_ids:
                self._refuse(sample_id, f"sample {sample_id}: {error}")
            return
        self._losses.append(record.loss)
        self._new.append(self._drawn)
        self._shares = tuple(record.counts.acceptance_by_position)
        self._owed = max(0.0, self._owed - len(record.sample_ids) / self._schedule.window_samples)
        self._num_since += 1
        for sample_id in record.sample_ids:
            if (waiting := self._waiting.get(RequestId(sample_id))) is not None:
                waiting.is_contained = True

    def _refuse(self, sample_id: str, message: str) -> None:
        self._trainer.buffer.remove(sample_id)
        waiting = self._waiting.get(RequestId(sample_id))
        if waiting is not None and not waiting.is_contained:
            del self._waiting[waiting.request]
            self._num_refused += 1
            self._outputs.append(
                EngineOutput(
                    request_id=waiting.request, walk=waiting.walk, error=SampleRefused(message)
                )
            )

    def _save(
        self, done: list[_Waiting], samples: TrainedSamples, present: DraftVersion | None
    ) -> _Saved:
        """Write a checkpoint, and a version of the head if a sample asks for it. Runs in the
        thread.

        Raises: OSError.
        """
        files, held_out = self._checkpoints, list(self._held_out.values())
        is_trained = self._trainer.num_windows != self._num_saved
        name = files.save(samples, self._name, is_trained=is_trained)
        source, version = next((waiting.publish for waiting in done if waiting.publish), ""), None
        if source:
            if held_out:
                self._acceptance = self._trainer.evaluate(held_out).simulated_acceptance_length
            version = files.write_version(source, self._num_accepted, self._acceptance)
        return _Saved(
            name=name,
            samples=samples,
            done=done,
            windows=self._trainer.num_windows,
            version=version,
            present=present,
            present_acceptance=files.acceptance_of(present, held_out) if source else 0.0,
        )

    def _end_save(self, saving: Future[_Saved]) -> Sequence[EngineOutput]:
        """Record a written checkpoint, and return the acknowledgements of its samples; empty if
        another trainer is active, or the disk is full.
        """
        records = self._records
        assert records is not None, "a trainer without records"
        try:
            saved = saving.result()
        except OSError as error:
            log.error("no checkpoint can be written to %s: %s; trying again", self._folder, error)
            self._retry_s = self._clock() + RETRY_S
            return ()
        if not records.note_checkpoint(saved.name):
            log.warning("another trainer is active: the checkpoint %s is not used", saved.name)
            self._retry_s = self._clock() + RETRY_S
            return ()
        self._name, self._contained = saved.name, saved.samples.contained
        self._num_saved, self._num_since = saved.windows, 0
        version = records.add_version(saved.version) if saved.version is not None else None
        if version is not None:
            log.info(
                "version %d of the draft head: %d windows, acceptance %s",
                version.number,
                version.windows,
                version.acceptance,
            )
            promote_if_better(
                records, version, saved.present, saved.present_acceptance, self._schedule.margin
            )
        self._checkpoints.keep_only(saved.name)
        number = version.number if version is not None else 0
        arrays = {
            WINDOWS: np.array([saved.windows], np.int64),
            VERSION: np.array([number], np.int64),
        }
        done = [each for each in saved.done if self._waiting.pop(each.request, None) is not None]
        return [
            EngineOutput(request_id=each.request, walk=each.walk, arrays=arrays, final=True)
            for each in done
        ]

    def _follow_checkpoint(self) -> None:
        """Load the last durable checkpoint if another trainer made it."""
        if self._records is None or (name := self._records.checkpoint()) == self._name:
            return
        if name:
            self._restored(self._checkpoints.restore(name))
            log.info("training continues from the checkpoint %s", name)
        elif self._trainer.num_windows:
            self._trainer.reset()
            self._restored(TrainedSamples())
        self._name, self._num_saved = name, self._trainer.num_windows

    def _forget(self) -> None:
        """Forget all samples, after the thread has ended its present work."""
        self._await_work(None)
        self._arriving.clear()
        self._waiting.clear()
        self._queue.clear()
        self._trainer.buffer.clear()
        self._outputs.clear()
        self._window = self._saving = None
        self._owed, self._num_since = 0.0, 0
        self._name = UNKNOWN

    def forget_samples(self) -> int:
        """Forget every sample that is held for training or evaluation; return their number.

        Samples that the trainer's state does not contain yet are refused.
        """
        num_samples = len(self._trainer.buffer) + len(self._held_out) + len(self._queue)
        self._trainer.buffer.clear()
        self._held_out.clear()
        self._queue.clear()
        for waiting in [each for each in self._waiting.values() if not each.is_contained]:
            self._refuse(
                waiting.request, f"sample {waiting.request}: forgotten by order of an operator"
            )
        return num_samples

    def finish(self, request_id: RequestId) -> None:
        self.abort(request_id)

    def abort(self, request_id: RequestId) -> None:
        self._arriving.pop(request_id, None)
        if self._waiting.pop(request_id, None) is not None:
            self._queue.pop(request_id, None)
            self._trainer.buffer.remove(request_id)
            self._held_out.pop(request_id, None)

    def check(self) -> None:
        """Do nothing: a failed window fails only its samples."""

    def stats(self) -> EngineStats:
        buffer = self._trainer.buffer
        loss = self._losses[-1] if self._losses else None
        figures = TrainingFigures(
            windows=self._trainer.num_windows,
            loss=loss,
            accepted=self._num_accepted,
            refused=self._num_refused,
            waiting=len(self._waiting),
            held_out=len(self._held_out),
            replay_samples=len(buffer),
            replay_bytes=buffer.num_bytes,
            checkpoint=self._num_saved,
            acceptance=self._acceptance,
            losses=tuple(self._losses),
            shares=self._shares,
        )
        num_running = len(self._arriving) + len(self._waiting)
        return EngineStats(running=num_running, ready=int(self.is_ready()), training=figures)

    def _restored(self, samples: TrainedSamples) -> None:
        self._contained = samples.contained
        self._new = deque(samples.windows, maxlen=MOST_WINDOWS)
