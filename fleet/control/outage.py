"""Outages of Redis: the errors that mean one, their remedies, and one user's outage with its log
lines and pauses. Sends nothing.

Redis is away while it does not answer, and while it refuses writes because its memory or disk is
full, replicas are missing, or it is not the primary. Such an error says nothing about the request
or the worker that met it.
"""

import logging
import re
import time
from collections.abc import Callable

from redis.backoff import EqualJitterBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

log = logging.getLogger(__name__)

FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 1.0
QUIET_S = 1.0
"""Seconds for which an unanswered Redis is not logged: it may restart, or have been started
together with this process.
"""
REFUSALS = {
    "OOM": "its memory is full: raise its maxmemory, or wait until ended requests expire "
    "(retention_s)",
    "MISCONF": "it cannot save its data: free disk space on its host, and read its log",
    "NOREPLICAS": "it has fewer replicas than its min-replicas-to-write: start them, or lower "
    "that setting",
}
"""Error codes with which Redis refuses a write but keeps its data, each with the remedy. A refused
script wrote nothing.
"""
ABSENCES = {
    "LOADING": "it loads its data: wait until it has",
    "READONLY": "it is a replica: point REDIS_URL at the primary, or promote it",
    "MASTERDOWN": "it is a replica without its primary: start the primary, or promote it",
    "UNBLOCKED": "it became a replica: point REDIS_URL at the primary, or promote it",
    "CLUSTERDOWN": "its cluster does not serve: repair it",
    "TRYAGAIN": "its cluster moves keys: wait until it has",
    "BUSY": "it runs a long script of another client: end that with SCRIPT KILL",
}
"""Error codes after which the next Redis to serve may lack the last writes, as after a restart,
each with the remedy.
"""
CODE = re.compile(r"""(?:^|@user_script: ?\d+: -|pipeline caused error: \(['"])([A-Z]{3,}) """)
"""Pattern of the code in an error reply. Redis 6.2 puts the code after the position in a script,
and redis-py after the command of a pipeline.
"""
KEY_DELETED = "the stream key no longer exists"
"""Text of Redis 6.2's UNBLOCKED error for a read of a deleted inbox, which is not an outage."""


def code_of(error: Exception) -> str:
    """Return the code of an error reply of Redis, also if it was raised inside a script; "" for any
    other error.
    """
    code = getattr(error, "status_code", None)
    if code and code != "ERR":
        return str(code)
    found = CODE.search(str(error))
    return found[1] if found else ""


def refuses_writes(error: Exception) -> bool:
    """Return True if Redis answers and keeps its data, but refuses writes for now: leases and
    stored state remain valid.
    """
    return code_of(error) in REFUSALS


def is_away(error: Exception) -> bool:
    """Return True if the error only means that Redis cannot be used for now, so that the same call
    may succeed later.
    """
    if isinstance(error, RedisConnectionError | RedisTimeoutError):
        return True
    code = code_of(error)
    return code in REFUSALS or (code in ABSENCES and KEY_DELETED not in str(error))


def cause_of(error: RedisError) -> str:
    """Return what is wrong with Redis and the remedy, for messages and log lines."""
    code = code_of(error)
    remedy = REFUSALS.get(code) or ABSENCES.get(code)
    if remedy is None:
        return f"Redis does not answer ({error})"
    return (
        f"Redis {'refuses writes' if code in REFUSALS else 'cannot be used'} ({code}), since "
        f"{remedy}"
    )


class Outage:
    """The time during which `user` (for example "the conductor") cannot use Redis. For one thread
    or event loop.

    An outage is logged once it has lasted `quiet_s` (immediately for a refusal of writes), when its
    cause changes, and when it ends, however many tries fail. `cause`: cause and remedy; "" without
    an outage.
    """

    def __init__(
        self, user: str, *, quiet_s: float = QUIET_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._user = user
        self._quiet_s = quiet_s
        self._clock = clock
        self._backoff = EqualJitterBackoff(cap=MAX_PAUSE_S, base=FIRST_PAUSE_S)
        self._num_failures = 0
        self._began_s = 0.0
        self._logged: str | None = None
        """Code of the last logged error; None if this outage has not been logged."""
        self.cause = ""

    def add(self, error: RedisError) -> float:
        """Record a failed try. Return the pause before the next try in seconds, which grows and has
        jitter.
        """
        code, now_s = code_of(error), self._clock()
        if not self.cause:
            self._began_s = now_s
        self.cause = cause_of(error)
        if code != self._logged and (code in REFUSALS or now_s - self._began_s >= self._quiet_s):
            self._logged = code
            log.warning("%s; %s waits and tries again", self.cause, self._user)
        return self.pause_s()

    def pause_s(self) -> float:
        """Count a failed try of any cause, without a log line. Return the pause before the next try
        in seconds.
        """
        self._num_failures = min(self._num_failures + 1, 10)
        return self._backoff.compute(self._num_failures)

    def end(self) -> None:
        """Record a successful call, which ends the outage."""
        self._num_failures = 0
        self.cause = ""
        if self._logged is not None:
            self._logged = None
            log.warning(
                "Redis serves %s again, after %.1f s", self._user, self._clock() - self._began_s
            )
