"""Faults of a thread at its file operations: it is killed before one of them, or frozen there and
resumed later.
"""

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

OPERATIONS = frozenset(
    ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.listdir", "os.scandir")
)
WAIT_S = 30.0


class KilledAtFile(BaseException):
    """The thread ends here, as a killed process does."""


@dataclass
class _Fault:
    """What happens to the thread that runs a call: `act` before the file operation `at`, counted
    from 0.
    """

    at: int
    act: Callable[[], None]
    num_operations: int = 0

    def on_operation(self) -> None:
        self.num_operations += 1
        if self.num_operations == self.at + 1:
            self.act()


_faults: dict[int, _Fault] = {}
"""The faults by thread. An audit hook cannot be removed, so there is one for all tests."""


def _on_event(event: str, _: tuple[object, ...]) -> None:
    if event in OPERATIONS and (fault := _faults.get(threading.get_ident())) is not None:
        fault.on_operation()


sys.addaudithook(_on_event)


def run_killed(call: Callable[[], object], at: int) -> bool:
    """Run `call`, and kill it before its file operation `at`; return False if it ended before."""

    def kill() -> None:
        raise KilledAtFile

    _faults[threading.get_ident()] = _Fault(at, kill)
    try:
        call()
    except KilledAtFile:
        return True
    finally:
        del _faults[threading.get_ident()]
    return False


@dataclass
class FrozenCall:
    """A call in a thread of its own that is frozen before its file operation `at`. `error`: error
    with which it ended.
    """

    call: Callable[[], object]
    at: int
    error: Exception | None = None
    _frozen: threading.Event = field(default_factory=threading.Event)
    _thawed: threading.Event = field(default_factory=threading.Event)
    _stopped: threading.Event = field(default_factory=threading.Event)

    def start(self) -> bool:
        """Run the call until it is frozen; return False if it ended before."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._stopped.wait(WAIT_S), "the call neither ends nor reaches the operation"
        return self._frozen.is_set()

    def thaw(self) -> None:
        """Let the call continue to its end."""
        self._thawed.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the call does not end"

    def _run(self) -> None:
        _faults[threading.get_ident()] = _Fault(self.at, self._freeze)
        try:
            self.call()
        except Exception as error:  # compared by the test, in its own thread
            self.error = error
        finally:
            del _faults[threading.get_ident()]
            self._stopped.set()

    def _freeze(self) -> None:
        self._frozen.set()
        self._stopped.set()
        assert self._thawed.wait(WAIT_S), "the call is never thawed"
