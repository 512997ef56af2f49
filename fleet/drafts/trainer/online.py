"""Training in one process: samples are produced in a thread while the trainer fits, and either side
may end first.

A run ends as `finished` (the producer is done, and all of its samples are trained on), `stopped`
(the trainer had enough) or `failed` (either side raised). Only a finished run calls `on_finished`.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from fleet.core.errors import ConfigError, FleetError
from fleet.drafts.trainer.samples import DraftSample
from fleet.drafts.trainer.trainer import Trainer, TrainerSettings

JOIN_S = 30.0
"""The longest time that a producer may take to end once the trainer takes no more samples."""
RunEnd = Literal["finished", "stopped", "failed"]


class ProducerStopped(Exception):
    """The trainer takes no more samples."""


class SampleChannel:
    """A bounded queue between one producer and one consumer. Any method may be called by either
    thread.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._samples: deque[DraftSample] = deque()
        self._changed = threading.Condition()
        self._closed = self._stopped = False

    def put(self, sample: DraftSample) -> None:
        """Add a sample, waiting for room. Raises: ProducerStopped once the consumer stopped, also
        while waiting.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or len(self._samples) < self._capacity)
            if self._stopped:
                raise ProducerStopped
            self._samples.append(sample)
            self._changed.notify_all()

    def close(self) -> None:
        """Declare that no sample follows, whether the producer is done or has failed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Take no more samples."""
        with self._changed:
            self._stopped = True
            self._samples.clear()
            self._changed.notify_all()

    def take(self, *, wait: bool) -> DraftSample | None:
        """Return the next sample; None if there is none now, or with `wait`, if none will
        follow.
        """
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._samples or self._closed or self._stopped)
            sample = self._samples.popleft() if self._samples else None
            self._changed.notify_all()
            return sample


class WindowLoader:
    """Moves samples of a channel into a trainer's buffer; iterating yields the size of each window
    that is due.

    Samples that arrive while a window is computed are in the next one. What is left below a window
    at the end is a window too.
    `num_refused`: samples that did not fit the head.
    """

    def __init__(self, channel: SampleChannel, trainer: Trainer, window_samples: int) -> None:
        self._channel, self._trainer, self._window_samples = channel, trainer, window_samples
        self.num_refused = 0

    def __iter__(self) -> Iterator[int]:
        buffer = self._trainer.buffer
        while True:
            sample = self._channel.take(wait=buffer.num_fresh < self._window_samples)
            if sample is not None:
                self._add(sample)
            if buffer.num_fresh >= self._window_samples:
                yield self._window_samples
            elif sample is None:
                break
        if buffer.num_fresh:
            yield min(self._window_samples, len(buffer))

    def _add(self, sample: DraftSample) -> None:
        try:
            self._trainer.add(sample)
        except FleetError:
            self.num_refused += 1


@dataclass(slots=True, kw_only=True)
class OnlineRun:
    """One run. `produce` yields samples, in a thread of its own; `max_windows`: after which the
    trainer has enough.

    `end`: None until the run has ended.
    """

    trainer: Trainer
    loader: WindowLoader
    channel: SampleChannel
    produce: Callable[[], Iterable[DraftSample]]
    on_finished: Callable[[Trainer], None] = lambda _: None
    max_windows: int | None = None
    end: RunEnd | None = None
    _failure: list[BaseException] = field(default_factory=list[BaseException])

    def __call__(self) -> RunEnd:
        """Run to the end.

        Raises: the producer's error, with the trainer's as its context if both failed; the
        trainer's error; TimeoutError if the producer does not end.
        """
        producer = threading.Thread(target=self._produce, name="samples", daemon=True)
        producer.start()
        error: BaseException | None = None
        had_enough = False
        try:
            had_enough = self._fit()
        except BaseException as raised:
            error = raised
        self.channel.stop()
        producer.join(JOIN_S)
        self.end = "failed"
        if self._failure:
            raise self._failure[0] from error
        if error is not None:
            raise error
        if producer.is_alive():
            raise TimeoutError(f"the producer of samples did not end within {JOIN_S:g} s")
        self.end = "stopped" if had_enough else "finished"
        if self.end == "finished":
            self.on_finished(self.trainer)
        return self.end

    def _fit(self) -> bool:
        """Train until no sample follows; return True if the trainer had enough before."""
        for num_samples in self.loader:
            self.trainer.train_on(self.trainer.buffer.draw(num_samples))
            if self.max_windows is not None and self.trainer.num_windows >= self.max_windows:
                return True
        return False

    def _produce(self) -> None:
        try:
            with contextlib.closing(_generated(self.produce())) as samples:
                for sample in samples:
                    self.channel.put(sample)
        except ProducerStopped:
            pass  # the trainer has enough
        except BaseException as error:  # re-raised by the run, on the thread that called it
            self._failure.append(error)
        finally:
            self.channel.close()


def _generated(samples: Iterable[DraftSample]) -> Generator[DraftSample]:
    """Return the samples as a generator, which ends with its source: what a producer holds is freed
    when it is stopped.
    """
    if isinstance(samples, Generator):
        return samples
    return (sample for sample in samples)


def build_online_training(
    trainer: Trainer,
    settings: TrainerSettings,
    produce: Callable[[], Iterable[DraftSample]],
    *,
    capacity: int,
    on_finished: Callable[[Trainer], None] = lambda _: None,
    max_windows: int | None = None,
) -> tuple[Trainer, WindowLoader, OnlineRun]:
    """Compose a trainer, its loader and a run. `capacity`: samples that wait between producer and
    trainer.

    Raises: ConfigError for a capacity below one window, with which neither side could continue.
    """
    if capacity < settings.window_samples:
        raise ConfigError(
            f"capacity: {capacity} samples are less than a window ({settings.window_samples})",
            param="capacity",
        )
    channel = SampleChannel(capacity)
    loader = WindowLoader(channel, trainer, settings.window_samples)
    run = OnlineRun(
        trainer=trainer,
        loader=loader,
        channel=channel,
        produce=produce,
        on_finished=on_finished,
        max_windows=max_windows,
    )
    return trainer, loader, run
