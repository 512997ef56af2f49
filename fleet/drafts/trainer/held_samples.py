"""Samples that a trainer holds: those that wait for a checkpoint, those to train on, and those that
are kept for evaluation. Knows no thread and no files.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from fleet.core.errors import SampleRefused
from fleet.core.ids import RequestId, Walk
from fleet.drafts.trainer.replay import ReplayBuffer
from fleet.drafts.trainer.samples import DraftSample
from fleet.drafts.trainer.schedule import TrainingSchedule

MOST_HELD_OUT = 64


@dataclass(slots=True, kw_only=True)
class WaitingSample:
    """A sample that is not acknowledged yet. `is_contained`: True if the trainer's present state
    contains it. `publish`: source of the version to make with it; "" if none is to be made.
    """

    request: RequestId
    walk: Walk
    publish: str
    is_contained: bool = False


class HeldSamples:
    """Samples that a trainer holds. `waiting`: unacknowledged samples by request.

    A sample is `received` until the trainer knows which samples its state contains; `sort` then
    counts it as contained, holds it out, or queues it for the buffer.
    """

    def __init__(self, buffer: ReplayBuffer, schedule: TrainingSchedule) -> None:
        self._buffer = buffer
        self._schedule = schedule
        self.waiting: dict[RequestId, WaitingSample] = {}
        self._received: OrderedDict[str, DraftSample] = OrderedDict()
        self._queue: OrderedDict[str, DraftSample] = OrderedDict()
        self._held_out: OrderedDict[str, DraftSample] = OrderedDict()

    @property
    def held_out(self) -> list[DraftSample]:
        return list(self._held_out.values())

    @property
    def has_queue(self) -> bool:
        """True if samples wait for room in the buffer."""
        return bool(self._queue)

    @property
    def contained(self) -> list[WaitingSample]:
        """The samples that only wait for a checkpoint."""
        return [each for each in self.waiting.values() if each.is_contained]

    def receive(self, sample: DraftSample, waiting: WaitingSample) -> None:
        """Hold a complete sample. Raises: SampleRefused if the buffer can never hold it."""
        if not self._buffer.may_ever_hold(sample):
            raise SampleRefused(
                f"sample {sample.sample_id}: {sample.num_bytes >> 20} MiB do not fit "
                "training.replay_mib; raise it"
            )
        self.waiting[waiting.request] = waiting
        self._received[sample.sample_id] = sample

    def sort(self, contained: Collection[str]) -> int:
        """Empty the received samples: mark each as contained, hold it out for evaluation, or queue
        it for training; return the number that was queued. `contained`: ids of the samples that the
        trainer's state contains.
        """
        num_queued = 0
        while self._received:
            sample_id, sample = self._received.popitem(last=False)
            if sample_id in contained:
                self.mark_contained([sample_id])
            elif self._schedule.holds_out(sample):
                self.mark_contained([sample_id])
                self._held_out[sample_id] = sample
                while len(self._held_out) > MOST_HELD_OUT:
                    self._held_out.popitem(last=False)
            else:
                self._queue[sample_id] = sample
                num_queued += 1
        self.fill_buffer()
        return num_queued

    def mark_contained(self, sample_ids: Iterable[str]) -> None:
        for sample_id in sample_ids:
            if (waiting := self.waiting.get(RequestId(sample_id))) is not None:
                waiting.is_contained = True

    def fill_buffer(self) -> None:
        """Move queued samples into the buffer while it has room."""
        while self._queue:
            sample_id, sample = next(iter(self._queue.items()))
            if not self._buffer.add(sample):
                return
            del self._queue[sample_id]

    def refuse(self, sample_id: str) -> WaitingSample | None:
        """Drop a received or buffered sample. If it is unacknowledged and the trainer's state does
        not contain it, remove and return its record, to refuse the request; else return None.
        """
        self._buffer.remove(sample_id)
        self._received.pop(sample_id, None)
        waiting = self.waiting.get(RequestId(sample_id))
        if waiting is None or waiting.is_contained:
            return None
        return self.waiting.pop(waiting.request)

    def abort(self, request: RequestId) -> None:
        """Drop the sample of a request; do nothing if it was acknowledged or is unknown."""
        if self.waiting.pop(request, None) is not None:
            self._received.pop(request, None)
            self._queue.pop(request, None)
            self._buffer.remove(request)
            self._held_out.pop(request, None)

    def drop(self) -> int:
        """Drop the tensors of all samples; return the number of samples. The records in `waiting`
        stay.
        """
        parts = (self._received, self._queue, self._held_out)
        num_samples = len(self._buffer) + sum(map(len, parts))
        self._buffer.clear()
        for part in parts:
            part.clear()
        return num_samples

    def begin(self) -> None:
        """Forget all samples of a former incarnation, except those kept for evaluation."""
        self.waiting.clear()
        self._received.clear()
        self._queue.clear()
        self._buffer.clear()
