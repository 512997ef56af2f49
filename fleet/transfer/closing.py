"""Close of a NIXL agent, on a thread of its own, since it may never return.

A peer that is killed while it writes a message into an agent's shared memory leaves an incomplete
entry. NIXL's progress thread then calls `ucp_worker_arm` again and again, and never reads the
request to end (NIXL 1.5.1, UCX 1.23). NIXL's bindings destroy an agent with the GIL held, so that
such a close would stop every Python thread. The destructor is therefore called through `ctypes`,
which releases the GIL. Knows neither peers nor slots.
"""

import ctypes
import logging
import struct
import threading
import time
from collections.abc import Callable
from functools import cache

log = logging.getLogger(__name__)

CLOSE_S = 5.0
"""Longest time that a caller waits for a close; a close takes some milliseconds."""
DESTRUCTOR = "_ZN9nixlAgentD1Ev"
"""C++ symbol of `nixlAgent::~nixlAgent()`, which the bindings link to."""
LAYOUT = struct.Struct("2P P 2P P B")
"""Memory of a Python object for a C++ object, in pybind11 since version 2.2
(`pybind11::detail::instance`, simple layout): object head, address of the C++ object, its owning
pointer, weak references, flags.
"""
SIZE_BYTES, WEAKREFS_OFFSET, FLAGS_OFFSET = 56, 40, 48
OWNED, SIMPLE, HAS_HOLDER = 1, 2, 4


class AgentClosing:
    """Close of one agent, begun by the constructor on a new thread. The thread ends with the
    process if the close never returns.

    `is_done` becomes True when nothing can write to memory for the agent any more. `began_s` is a
    time of `time.monotonic`.
    """

    def __init__(self, name: str, close: Callable[[], None]) -> None:
        self.name = name
        self.began_s = time.monotonic()
        self._done = threading.Event()
        threading.Thread(target=self._run, args=(close,), name="nixl-close", daemon=True).start()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the close; return False, and log it, if it has not ended within `timeout_s`."""
        if self._done.wait(max(0.0, timeout_s)):
            return True
        log.warning(
            "the NIXL agent %s has not closed within %.1f s; its memory stays reserved",
            self.name,
            time.monotonic() - self.began_s,
        )
        return False

    def _run(self, close: Callable[[], None]) -> None:
        close()
        self._done.set()


def destroy(agent: object, bindings: object) -> None:
    """Destroy a NIXL agent without holding the GIL. The caller's reference must be the only one,
    and must not be used afterwards.

    Where the layout of the bindings is unknown, nothing happens here: the agent is destroyed, with
    the GIL held, when the caller drops the reference.
    """
    destructor, address = _destructor(getattr(bindings, "__file__", "")), _address_of(agent)
    if destructor is None or not address:
        return
    # The holder would destroy the C++ object again; without it, pybind11 only frees the memory.
    flags = ctypes.c_uint8.from_address(id(agent) + FLAGS_OFFSET)
    flags.value &= ~HAS_HOLDER
    destructor(address)


def _address_of(agent: object) -> int:
    """Return the address of the C++ object behind a pybind11 object; 0 if its layout is unknown."""
    kind = type(agent)
    if (kind.__basicsize__, kind.__weakrefoffset__) != (SIZE_BYTES, WEAKREFS_OFFSET):
        return 0
    _, _, value, holder, _, _, flags = LAYOUT.unpack(ctypes.string_at(id(agent), LAYOUT.size))
    expected = OWNED | SIMPLE | HAS_HOLDER
    return value if value == holder and flags & expected == expected else 0


@cache
def _destructor(library: str) -> "Callable[[int], object] | None":
    """Return the destructor of agents from the bindings' library, or None if it has none."""
    try:
        function = getattr(ctypes.CDLL(library), DESTRUCTOR) if library else None
    except (OSError, AttributeError):
        function = None
    if function is None:
        log.warning(
            "NIXL's bindings have no %s; an endless close would stop the process", DESTRUCTOR
        )
        return None
    function.argtypes, function.restype = [ctypes.c_void_p], None
    return function
