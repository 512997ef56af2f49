"""Silence of a loop as an observer adds it up: only over the observer's own intervals, apart for a
thread that waits and one that computes.
"""

import os
import subprocess
import sys
import threading

import pytest

from fleet.process.silence import Silence, ThreadState, thread_state
from tests.support import freeze_process, wait_until

INTERVAL_S = 0.25


class Observer:
    """An observer of one loop, with a clock that moves by `pass_time` only."""

    def __init__(self) -> None:
        self.silence = Silence(INTERVAL_S)
        self.now_s = 100.0
        self.count = 0
        self.cpu_s = 5.0
        self.letter = "S"
        self.look()

    def look(self) -> None:
        state = ThreadState(self.letter, self.cpu_s)
        self.silence.observe(self.now_s, self.count, lambda: state)

    def pass_time(self, seconds: float, *, beating: bool = False, computing: bool = False) -> None:
        for _ in range(round(seconds / INTERVAL_S)):
            self.now_s += INTERVAL_S
            self.count += beating
            self.cpu_s += INTERVAL_S * computing
            self.look()

    @property
    def counted(self) -> tuple[float, float, float]:
        silence = self.silence
        return silence.total_s, silence.waiting_s, silence.stopped_s


def test_beating_loop_is_never_silent() -> None:
    observer = Observer()
    observer.pass_time(10.0, beating=True)
    assert observer.counted == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("letter", "computing", "counted"),
    [
        ("S", False, (2.0, 2.0, 0.0)),
        ("S", True, (2.0, 0.0, 0.0)),
        ("R", False, (2.0, 0.0, 0.0)),
        ("D", False, (2.0, 0.0, 0.0)),
        ("T", False, (2.0, 2.0, 2.0)),
        ("t", False, (0.0, 0.0, 0.0)),
    ],
    ids=["waits", "computes", "runs", "reads a disk", "is stopped", "is debugged"],
)
def test_silence_counts_by_what_the_thread_does(
    letter: str, computing: bool, counted: tuple[float, float, float]
) -> None:
    observer = Observer()
    observer.letter = letter
    observer.pass_time(2.0, computing=computing)
    assert observer.counted == pytest.approx(counted)


def test_beat_ends_a_silence() -> None:
    observer = Observer()
    observer.pass_time(2.0)
    observer.count += 1
    observer.pass_time(0.5)
    assert observer.counted == pytest.approx((0.25, 0.25, 0.0))


def test_suspension_of_the_observer_does_not_count() -> None:
    """An observer that was suspended proves nothing: neither its absence counts, nor the silence
    before it.
    """
    observer = Observer()
    observer.letter = "T"
    observer.pass_time(2.0)
    observer.now_s += 3600.0
    observer.look()
    assert observer.counted == (0.0, 0.0, 0.0)


def test_slow_observer_counts_at_most_two_intervals_at_a_time() -> None:
    observer = Observer()
    for _ in range(4):
        observer.now_s += 0.9
        observer.look()
    assert observer.counted == pytest.approx((2.0, 2.0, 0.0))


def test_ended_thread_is_not_silent() -> None:
    observer = Observer()
    observer.pass_time(2.0)
    observer.now_s += INTERVAL_S
    observer.silence.observe(observer.now_s, observer.count, lambda: None)
    assert observer.counted == (0.0, 0.0, 0.0)


def test_state_of_a_real_thread_is_read() -> None:
    own = thread_state(os.getpid(), threading.get_native_id())
    assert own is not None and own.letter == "R" and own.cpu_s > 0
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as process:
        freeze_process(process.pid)
        stopped = thread_state(process.pid)
        assert stopped is not None and stopped.letter == "T"
        process.kill()
        wait_until(lambda: thread_state(process.pid) is None, "an ended process to have no state")
