"""Announcement of a starting worker, so that requests wait for it. Its keeper makes the
announcement until the worker's process takes over, before it loads.
"""

import logging
import os
import signal
import socket
import threading
import time
from types import FrameType, TracebackType
from typing import Self

from redis.exceptions import RedisError

from fleet.config.roles import Role
from fleet.control import scripts
from fleet.control.connect import connect_for_a_call, run
from fleet.control.outage import Outage
from fleet.process.parent_death import keeper_pid

log = logging.getLogger(__name__)

RENEW_S = 2.0
LEASE_S = 10.0
"""Lifetime of an announcement in seconds. Several renewals long, because a loading process may hold
the interpreter lock for seconds.
"""
MAX_LOADING_S = 1800.0
"""Seconds after which a start counts as hung and is no longer announced."""
TIMEOUT_S = 2.0


def place_here(pid: int) -> str:
    """Return the name of a process of this host in announcements: `host:pid`."""
    return f"{socket.gethostname()}:{pid}"


class StartAnnouncement:
    """Announcement that this process is a starting worker of `role`, from `__enter__` until
    `joined` or until the process ends.

    Takes over the announcement of the keeper that started the process, if there is one. A thread
    renews the announcement, and retries while Redis is away.
    """

    def __init__(self, redis_url: str, role: Role) -> None:
        self._redis_url = redis_url
        self._role = role
        self._place = place_here(os.getpid())
        self._began = time.monotonic()
        self._over = threading.Event()
        self._outage = Outage("the announcement of this worker's start")
        self._loaded: float | None = None
        self._thread = threading.Thread(target=self._renew, name="starting", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(failed=kind is not None and issubclass(kind, Exception))

    def loaded(self, share: float) -> None:
        """Announce from now on that this share of the weights (0 to 1) is loaded."""
        self._loaded = share

    def joined(self) -> None:
        """End the announcement because the worker is registered. Later calls do nothing."""
        self._end(took_us=int((time.monotonic() - self._began) * 1e6))

    def end_by(self, signum: signal.Signals) -> None:
        """Install a handler for a signal that ends this process: the handler first ends the
        announcement, as a start that was stopped.
        """

        def end(_signum: int, _frame: FrameType | None) -> None:
            self._end()
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)

        signal.signal(signum, end)

    def _end(self, took_us: int | None = None, *, failed: bool = False) -> None:
        if not self._over.is_set():
            self._over.set()
            self._thread.join(timeout=2 * TIMEOUT_S)
            self._send(
                scripts.end_start(self._role.name, self._place, took_us=took_us, failed=failed)
            )

    def _renew(self) -> None:
        configured = self._role.replicas + self._role.standby
        keeper = place_here(keeper_pid())
        while True:
            percent = None if self._loaded is None else int(100 * self._loaded)
            call = scripts.announce_start(
                self._role.name,
                self._place,
                int(LEASE_S * 1e6),
                instead_of=keeper,
                workers=configured,
                loaded_percent=percent,
            )
            self._send(call)
            if self._over.wait(RENEW_S):
                return
            if time.monotonic() - self._began > MAX_LOADING_S:
                line = (
                    "this worker has been loading for more than %.0f s; requests no longer "
                    "wait for it"
                )
                log.error(line, MAX_LOADING_S)
                return

    def _send(self, call: scripts.Call) -> None:
        try:
            with connect_for_a_call(self._redis_url, TIMEOUT_S) as client:
                run(client, call)
        except RedisError as error:
            self._outage.add(error)
        else:
            self._outage.end()
