"""Decorator for Redis calls that retry while Redis is unreachable, as the fleet's own processes do.
Knows no key.
"""

import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from redis.exceptions import RedisError

from fleet.control.outage import is_away
from fleet.core.errors import RedisUnreachable

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")

AWAY_S = 120.0
"""Time without an answer from Redis after which the run is aborted. A failover takes seconds."""
RETRY_S = 0.1


def patiently(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorate a read-only method so that it is repeated while Redis is unreachable. Raises: the
    last connection error after `AWAY_S`; other errors immediately.
    """

    @wraps(method)
    def repeat(self: S, *args: P.args, **options: P.kwargs) -> T:
        pause, deadline_s = threading.Event(), time.monotonic() + AWAY_S
        while True:
            try:
                return method(self, *args, **options)
            except (RedisError, RedisUnreachable) as error:
                away = isinstance(error, RedisUnreachable) or is_away(error)
                if not away or time.monotonic() > deadline_s:
                    raise
            pause.wait(RETRY_S)

    return repeat
