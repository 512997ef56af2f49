"""Clock of the saves of conversations: which are under way, and how long they usually take, so that
a fault can be injected during a save. Reads no file and no fleet state.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fleet.core.ids import WorkerId, role_of

RECENT = 32
"""Number of saves from which the usual duration is estimated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSave:
    """A save under way. `processes`: id of the worker that caches the conversation, followed by the
    span workers of its route.
    """

    number: int
    stage: str
    processes: tuple[str, ...]

    def workers_of(self, role: str) -> list[str]:
        return [worker for worker in self.processes if role_of(WorkerId(worker)) == role]


class SaveClock:
    """Registry of the saves under way. Thread-safe: each conversation is saved by its own thread,
    and faults are injected by another.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: dict[int, OpenSave] = {}
        self._num_begun = 0
        self._durations_s: deque[float] = deque(maxlen=RECENT)

    @contextmanager
    def saving(self, stage: str, processes: tuple[str, ...]) -> Iterator[None]:
        """Register a save as under way during the block. A failed save does not count for the usual
        duration.
        """
        with self._changed:
            self._num_begun += 1
            save = OpenSave(number=self._num_begun, stage=stage, processes=processes)
            self._open[save.number] = save
            self._changed.notify_all()
        began_s = time.monotonic()
        try:
            yield
            with self._changed:
                self._durations_s.append(time.monotonic() - began_s)
        finally:
            with self._changed:
                del self._open[save.number]

    def is_open(self, save: OpenSave) -> bool:
        return save.number in self._open

    def next_save(self, stage: str, *, share: float, timeout_s: float) -> OpenSave | None:
        """Wait until a save of the stage begins, and until `share` of its usual duration is over;
        return None if no save begins within `timeout_s`.
        """
        with self._changed:
            before = self._num_begun

            def begun() -> OpenSave | None:
                later = (save for save in self._open.values() if save.number > before)
                return next((save for save in later if save.stage == stage), None)

            save = self._changed.wait_for(begun, timeout_s)
            usual_s = self._usual_s()
        if save is not None:
            threading.Event().wait(share * usual_s)
        return save

    def _usual_s(self) -> float:
        """Return the lower quartile of recent save durations, which most saves exceed; 0 if there
        are none. The caller holds `_changed`.
        """
        durations_s = sorted(self._durations_s)
        return durations_s[len(durations_s) // 4] if durations_s else 0.0
