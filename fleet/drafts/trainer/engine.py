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
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from fleet.core.errors import (
    ConfigError,
    EngineStopped,
    FleetError,
    RedisUnreachable,
    SampleRefused,
)
from fleet.core.ids import NO_WALK, RequestId, Walk
from fleet.drafts.figures.training import DraftVersion, TrainingFigures
from fleet.drafts.trainer.checkpoints import Checkpoints, WrittenCheckpoint, WrittenVersion
from fleet.drafts.trainer.folder import Overtaken
from fleet.drafts.trainer.held_samples import HeldSamples, WaitingSample
from fleet.drafts.trainer.records import TrainingRecords, promote_if_better
from fleet.drafts.trainer.samples import sample_of
from fleet.drafts.trainer.schedule import TrainingSchedule
from fleet.drafts.trainer.state import TrainedSamples
from fleet.drafts.trainer.trainer import NotFinite, Trainer, WindowRecord
from fleet.engine.base import Arrays, Engine, EngineInput, EngineOutput, EngineRequest, EngineStats
from fleet.engine.turns import check_is_new
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
CLAIM_RETRY_S = 0.5
"""Time between two tries to become the trainer that writes, while another one may."""
MOST_IDS, MOST_WINDOWS, MOST_LOSSES = 1024, 1024, 100


@dataclass(slots=True, kw_only=True)
class _Arriving:
    """A sample whose hidden states are still arriving."""

    request: EngineRequest
    parts: list[Arrays] = field(default_factory=list[Arrays])
    walk: Walk = NO_WALK


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    """A checkpoint that was written to disk but is not visible yet.

    `done`: samples to acknowledge. `windows`: optimizer steps in it. `version`: version to add, if
    any. `present`: version in use; `present_acceptance`: acceptance length of that version on
    held-out samples.
    """

    written: WrittenCheckpoint
    samples: TrainedSamples
    done: list[WaitingSample]
    windows: int
    version: WrittenVersion | None
    present: DraftVersion | None
    present_acceptance: float


class TrainerEngine(Engine):
    """Engine that trains a draft head with the samples that it receives. `folder`: folder of the
    checkpoints and of the head's versions, shared by all trainers of the fleet.

    Invariants: nothing is trained or written before this trainer may write; a sample is
    acknowledged once, after a checkpoint that lists the sample's id is durable and visible.
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
        self._is_writer = False
        """True if this trainer may write, as far as it knows."""
        self._overtaken = ""
        self._contained: tuple[str, ...] = ()
        self._drawn: tuple[str, ...] = ()
        self._new: deque[tuple[str, ...]] = deque(maxlen=MOST_WINDOWS)
        """Ids of the samples that were new in each window of the trainer's state. `_drawn`: ids of
        the new samples in the window that is being computed. `_contained`: see `TrainedSamples`.
        """
        self._arriving: dict[RequestId, _Arriving] = {}
        self._held = HeldSamples(trainer.buffer, schedule)
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
        self._num_accepted = 0
        self._num_refused = 0
        self._num_saved = 0
        self.background = self
        self.samples = self

    @property
    def trainer(self) -> Trainer:
        """The trainer itself, for callers that train without a fleet."""
        return self._trainer

    def begin(self, records: TrainingRecords) -> None:
        """Wait for running work, forget all samples except those kept for evaluation, and use the
        training records of the worker's next incarnation.
        """
        self._await_work(None)
        self._arriving.clear()
        self._held.begin()
        self._outputs.clear()
        self._window = self._saving = None
        self._owed, self._num_since = 0.0, 0
        self._is_writer, self._retry_s = False, -math.inf
        self._checkpoints.begin(records)

    def submit(self, request: EngineRequest) -> None:
        """Expect the sample of a request. If this trainer has no other unacknowledged sample, it
        checks again that it may write before it trains, since another trainer may have trained
        meanwhile.
        """
        check_is_new(request.request_id, self._arriving)
        check_is_new(request.request_id, self._held.waiting)
        if not self._arriving and not self._held.waiting:
            self._is_writer = False
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
        """Check and hold a complete sample. Raises: SampleRefused."""
        request = arriving.request
        sample = sample_of(request.request_id, int(request.params[ANSWER_START]), arriving.parts)
        sample.check(self._trainer.head.config)
        publish = request.params.get(PUBLISH, "")
        self._held.receive(
            sample, WaitingSample(request=request.request_id, walk=arriving.walk, publish=publish)
        )
        self._num_accepted += 1
        if self._is_writer:
            self._sort()

    def _sort(self) -> None:
        num_queued = self._held.sort(self._contained)
        self._owed += num_queued * self._schedule.passes / self._schedule.window_samples

    def pause(self, request_id: RequestId, *, paused: bool) -> None:
        """Do nothing: acknowledgements are single items, which never lack credit."""

    def is_ready(self) -> bool:
        work = self._work
        if self._outputs or (work is not None and work.done()):
            return True
        if work is not None or self._clock() < self._retry_s:
            return False
        if not self._is_writer:
            return bool(self._held.waiting or self._num_since)
        self._held.fill_buffer()
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
        is_open = bool(self._held.waiting or self._num_since) and not self._arriving
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
        try:
            outputs += self._advance()
        except Overtaken as error:
            log.warning("another trainer is active: %s", error)
            self._is_writer = False
            self._retry_s = self._clock() + CLAIM_RETRY_S
        except RedisUnreachable as error:
            log.warning("training waits for Redis: %s", error.message)
            self._retry_s = self._clock() + RETRY_S
        except OSError as error:
            log.error("no checkpoint can be written to %s: %s; trying again", self._folder, error)
            self._retry_s = self._clock() + RETRY_S
        return outputs

    def _advance(self) -> Sequence[EngineOutput]:
        """Do the next step of training. Raises: Overtaken, RedisUnreachable, OSError; the step is
        then repeated.
        """
        if self._window is not None and self._window.done():
            window, self._window = self._window, None
            self._end_window(window)
        elif self._saving is not None and self._saving.done():
            saving, self._saving = self._saving, None
            return self._end_save(saving)
        elif self._work is None and self._clock() >= self._retry_s and self._may_write():
            self._held.fill_buffer()
            if self._is_checkpoint_due():
                self._begin_save()
            elif size := self._window_size():
                self._drawn = self._trainer.buffer.fresh_ids(size)
                self._window = self._thread.submit(
                    self._trainer.train_on, self._trainer.buffer.draw(size)
                )
        return ()

    def _may_write(self) -> bool:
        """Return True if this trainer may write. A trainer that does not write yet claims the
        right, and loads the newest checkpoint unless its own state is newer; if that checkpoint
        does not fit, waiting samples are refused.

        Raises: EngineStopped if another trainer's checkpoints lack what this one was trained on.
        """
        if self._is_writer:
            return True
        if not self._checkpoints.may_write():
            try:
                opened = self._checkpoints.open()
            except ConfigError as error:
                for waiting in list(self._held.waiting.values()):
                    self._refuse(waiting.request, error)
                return False
            if opened is None:
                self._retry_s = self._clock() + CLAIM_RETRY_S
                return False
            if opened.restored is not None:
                self._continue_from(opened.restored)
        self._is_writer = True
        self._sort()
        return True

    def _continue_from(self, samples: TrainedSamples) -> None:
        if self._held.contained:
            self._overtaken = "another trainer wrote checkpoints, which lack this one's windows"
            self.check()
        self._contained = samples.contained
        self._new = deque(samples.windows, maxlen=MOST_WINDOWS)
        self._num_saved, self._num_since = self._trainer.num_windows, 0

    def _samples_with(self, done: Sequence[WaitingSample]) -> TrainedSamples:
        """Return the sample ids of a checkpoint that newly contains `done`."""
        contained = tuple(
            dict.fromkeys([*self._contained, *(waiting.request for waiting in done)])
        )[-MOST_IDS:]
        return TrainedSamples(
            contained=contained,
            windows=tuple(self._new),
            first=self._trainer.num_windows - len(self._new) + 1,
        )

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
        is_full = len(self._held.waiting) >= self._schedule.num_slots or self._held.has_queue
        return is_full or (not self._arriving and self._clock() - self._arrived_s >= IDLE_S)

    def _is_checkpoint_due(self) -> bool:
        contained = self._held.contained
        if self._saves_first(contained):
            return True
        return bool(contained or self._num_since) and self._is_settled() and not self._window_size()

    def _saves_first(self, contained: Sequence[WaitingSample]) -> bool:
        """Return True if a checkpoint is written before further windows: enough windows were
        trained since the last one, or half of the slots are held by samples that wait only for a
        checkpoint. Return False while such a sample asks for a version, before which all windows
        are trained.
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
                self._refuse(sample_id, SampleRefused(f"sample {sample_id}: {error}"))
            return
        self._losses.append(record.loss)
        self._new.append(self._drawn)
        self._shares = tuple(record.counts.acceptance_by_position)
        self._owed = max(0.0, self._owed - len(record.sample_ids) / self._schedule.window_samples)
        self._num_since += 1
        self._held.mark_contained(record.sample_ids)

    def _refuse(self, sample_id: str, error: FleetError) -> None:
        if (waiting := self._held.refuse(sample_id)) is not None:
            self._num_refused += 1
            self._outputs.append(
                EngineOutput(request_id=waiting.request, walk=waiting.walk, error=error)
            )

    def _begin_save(self) -> None:
        done = self._held.contained
        publishes = any(each.publish for each in done)
        present = self._checkpoints.records.version_in_use() if publishes else None
        self._saving = self._thread.submit(self._save, done, self._samples_with(done), present)

    def _save(
        self, done: list[WaitingSample], samples: TrainedSamples, present: DraftVersion | None
    ) -> _Saved:
        """Write a checkpoint, and a version of the head if a sample asks for it. Runs in the
        thread.

        Raises: Overtaken, OSError.
        """
        files, held_out = self._checkpoints, self._held.held_out
        written = files.write(samples)
        source, version = next((waiting.publish for waiting in done if waiting.publish), ""), None
        if source:
            if held_out:
                self._acceptance = self._trainer.evaluate(held_out).simulated_acceptance_length
            version = files.write_version(source, self._num_accepted, self._acceptance)
        return _Saved(
            written=written,
            samples=samples,
            done=done,
            windows=self._trainer.num_windows,
            version=version,
            present=present,
            present_acceptance=files.acceptance_of(present, held_out) if source else 0.0,
        )

    def _end_save(self, saving: Future[_Saved]) -> Sequence[EngineOutput]:
        """Make a written checkpoint visible, and return the acknowledgements of its samples.

        Raises: Overtaken if another trainer is active.
        """
        saved = saving.result()
        self._checkpoints.publish(saved.written)
        self._contained = saved.samples.contained
        self._num_saved, self._num_since = saved.windows, 0
        number = self._publish_version(saved, saved.version) if saved.version is not None else 0
        arrays = {
            WINDOWS: np.array([saved.windows], np.int64),
            VERSION: np.array([number], np.int64),
        }
        done = [each for each in saved.done if self._held.waiting.pop(each.request, None)]
        return [
            EngineOutput(request_id=each.request, walk=each.walk, arrays=arrays, final=True)
            for each in done
        ]

    def _publish_version(self, saved: _Saved, written: WrittenVersion) -> int:
        """Make a written version visible, and promote it if it is better than the version in use by
        the configured margin; return its number.
        """
        version = self._checkpoints.publish_version(written)
        log.info(
            "version %d of the draft head: %d windows, acceptance %s",
            version.number,
            version.windows,
            version.acceptance,
        )
        margin, records = self._schedule.margin, self._checkpoints.records
        promote_if_better(records, version, saved.present, saved.present_acceptance, margin)
        return version.number

    def forget_samples(self) -> int:
        """Forget every sample that is held for training or evaluation; return their number.

        Samples that the trainer's state does not contain yet are refused.
        """
        num_samples = self._held.drop()
        for request in list(self._held.waiting):
            message = f"sample {request}: forgotten by order of an operator"
            self._refuse(request, SampleRefused(message))
        return num_samples

    def finish(self, request_id: RequestId) -> None:
        self.abort(request_id)

    def abort(self, request_id: RequestId) -> None:
        self._arriving.pop(request_id, None)
        self._held.abort(request_id)

    def check(self) -> None:
        """Raise EngineStopped if another trainer has overtaken this one. A failed window does not
        raise: only its samples are refused.
        """
        if self._overtaken:
            raise EngineStopped(self._overtaken)

    def stats(self) -> EngineStats:
        buffer = self._trainer.buffer
        figures = TrainingFigures(
            windows=self._trainer.num_windows,
            loss=self._losses[-1] if self._losses else None,
            accepted=self._num_accepted,
            refused=self._num_refused,
            waiting=len(self._held.waiting),
            held_out=len(self._held.held_out),
            replay_samples=len(buffer),
            replay_bytes=buffer.num_bytes,
            checkpoint=self._num_saved,
            checkpoint_name=self._checkpoints.last.name,
            saved_us=self._checkpoints.last.saved_us,
            acceptance=self._acceptance,
            losses=tuple(self._losses),
            shares=self._shares,
        )
        num_running = len(self._arriving) + len(self._held.waiting)
        return EngineStats(running=num_running, ready=int(self.is_ready()), training=figures)
