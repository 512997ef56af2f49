"""Choice of the fastest drafter by measurement: each drafter is used for some steps, then the
fastest one until the next comparison.

Speeds are relative to steps without drafts for the same number of requests, so that measurements
under different load can be compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fleet.drafts.figures.speculation import OFF
from fleet.drafts.pass_costs import PassTimes

WARM_UP_PASSES, TRIAL_PASSES = 16, 64
"""Steps of a drafter's trial: first the steps that are not measured, in which different numbers of
drafts are tried, then the steps that are measured.
"""
FIRST_TERM, LAST_TERM = 1024, 16_384
"""Steps until the next comparison: at first, and at most; doubled each time that a comparison
confirms the choice.
"""
WATCHED_PASSES, LOSS = 256, 0.1
"""Drafters are compared again immediately if the present drafter's gain over the last
`WATCHED_PASSES` steps is lower, by the share `LOSS`, than at its trial.
"""
LEAST_GAIN = 1.02
"""Gain below which no drafter is used, since a smaller gain may be noise."""


@dataclass(slots=True)
class Gain:
    """Measured gain of a drafter: speed with drafts divided by speed without.

    `plain_s`: time that the same tokens would have taken without drafts. `taken_s`: time that they
    took.
    """

    plain_s: float = 0.0
    taken_s: float = 0.0
    num_passes: int = 0

    @property
    def value(self) -> float:
        return self.plain_s / self.taken_s if self.taken_s > 0 else 1.0

    def add(self, plain_s: float, taken_s: float) -> None:
        self.num_passes += 1
        self.plain_s += plain_s
        self.taken_s += taken_s


class DrafterChoice:
    """Choice of the drafter to use, by trials of all of them. Not thread-safe.

    `names`: drafters to choose from, in addition to no drafter (`OFF`). `name`: the present choice.
    `gains`: gain of each drafter at its last trial.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = (OFF, *names)
        self.gains: dict[str, float] = {}
        self._plain, self._term = PassTimes(), FIRST_TERM
        self._best = OFF
        self._begin_trials()

    def _begin_trials(self) -> None:
        self._waiting = list(self._names)
        self._begin_trial()

    def _begin_trial(self) -> None:
        self.name = self._waiting.pop(0)
        self._gain = Gain()
        self._num_passes = 0
        self._is_trial = True

    def add(self, num_requests: int, num_tokens: int, seconds: float) -> None:
        """Count one decode step with the present drafter, which may change `name`.

        `num_tokens`: tokens of the step over all requests. `seconds`: duration.
        """
        if self.name == OFF:
            self._plain.add(num_requests, seconds)
        plain_s = self._plain.of(num_requests)
        if plain_s is None or len(self._names) == 1:
            return
        self._num_passes += 1
        if not self._is_trial or self._num_passes > WARM_UP_PASSES:
            self._gain.add(plain_s * num_tokens / num_requests, seconds)
        if self._is_trial:
            self._advance_trial()
        elif self._num_passes >= self._term or self._has_lost():
            self._begin_trials()

    def _advance_trial(self) -> None:
        if self._gain.num_passes < TRIAL_PASSES:
            return
        self.gains[self.name] = 1.0 if self.name == OFF else self._gain.value
        if self._waiting:
            self._begin_trial()
            return
        best = max(self._names, key=lambda name: LEAST_GAIN if name == OFF else self.gains[name])
        self._term = min(2 * self._term, LAST_TERM) if best == self._best else FIRST_TERM
        self.name = self._best = best
        self._gain = Gain()
        self._num_passes = 0
        self._is_trial = False

    def _has_lost(self) -> bool:
        """Return True if the present drafter is clearly slower than at its trial."""
        if self.name == OFF or self._gain.num_passes < WATCHED_PASSES:
            return False
        gain, self._gain = self._gain.value, Gain()
        return gain < (1 - LOSS) * self.gains[self.name]
