"""A bounded buffer of training samples, from which windows (the samples of one optimizer step) are
drawn. Knows no training.
"""

import itertools
import random
from collections import OrderedDict

from fleet.core.errors import ConfigError
from fleet.drafts.trainer.samples import DraftSample


class ReplayBuffer:
    """Training samples by id, at most `max_samples` and `max_bytes` of tensors. Equal seeds and
    samples give equal windows.

    A sample is `fresh` until it is first drawn: fresh samples are drawn before others, and never
    dropped for a newer sample.
    Invariants: `num_bytes` is the total size of the samples; `num_dropped` counts all samples that
    were ever dropped for newer ones.
    """

    def __init__(self, *, max_samples: int, max_bytes: int, seed: int = 0) -> None:
        if max_samples < 1 or max_bytes < 1:
            raise ConfigError(
                "replay buffer: max_samples and max_bytes must be above 0", param="max_samples"
            )
        self._max_samples, self._max_bytes = max_samples, max_bytes
        self._samples: OrderedDict[str, DraftSample] = OrderedDict()
        self._fresh: OrderedDict[str, None] = OrderedDict()
        self._random = random.Random(seed)
        self.num_bytes, self.num_dropped = 0, 0

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def num_fresh(self) -> int:
        return len(self._fresh)

    def may_ever_hold(self, sample: DraftSample) -> bool:
        return sample.num_bytes <= self._max_bytes

    def add(self, sample: DraftSample) -> bool:
        """Add a sample; return False and change nothing if its id is present, or if fresh samples
        leave no room.
        """
        if sample.sample_id in self._samples or not self._make_room(sample):
            return False
        self._samples[sample.sample_id] = sample
        self._fresh[sample.sample_id] = None
        self.num_bytes += sample.num_bytes
        return True

    def _make_room(self, sample: DraftSample) -> bool:
        """Drop the oldest samples that are not fresh until there is room; return False and change
        nothing if that is not enough.
        """
        fresh_bytes = sum(self._samples[each].num_bytes for each in self._fresh)
        if (
            len(self._fresh) >= self._max_samples
            or fresh_bytes + sample.num_bytes > self._max_bytes
        ):
            return False
        while (
            len(self._samples) >= self._max_samples
            or self.num_bytes + sample.num_bytes > self._max_bytes
        ):
            oldest = next(each for each in self._samples if each not in self._fresh)
            self.remove(oldest)
            self.num_dropped += 1
        return True

    def remove(self, sample_id: str) -> None:
        """Remove a sample, if it is in the buffer."""
        self._fresh.pop(sample_id, None)
        removed = self._samples.pop(sample_id, None)
        self.num_bytes -= removed.num_bytes if removed is not None else 0

    def clear(self) -> None:
        self._samples.clear()
        self._fresh.clear()
        self.num_bytes = 0

    def fresh_ids(self, most: int) -> tuple[str, ...]:
        """Return the ids of the fresh samples that `draw(most)` would return; change nothing."""
        return tuple(itertools.islice(self._fresh, most))

    def draw(self, num_samples: int) -> list[DraftSample]:
        """Return `num_samples` different samples: fresh ones first, the oldest first, then others
        at random. All of them stay in the buffer, and are no longer fresh.

        Raises: ValueError if the buffer has fewer.
        """
        first = list(self._fresh)[:num_samples]
        others = [each for each in self._samples if each not in self._fresh]
        drawn = first + self._random.sample(others, num_samples - len(first))
        for each in first:
            del self._fresh[each]
        return [self._samples[each] for each in drawn]
