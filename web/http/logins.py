"""Logins of browsers. A login is a random token in a cookie, valid at every gateway until the login
ends or expires.

Redis stores a MAC of the token under the API key. So data of Redis grant no access, and a changed
key ends every login. Knows no route.
"""

import hashlib
import hmac
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from secrets import token_urlsafe

from fleet.control.client import LoginStore
from fleet.core.clock import now_us
from fleet.core.errors import RedisUnreachable

KEEP_S = 7 * 24 * 3600
"""Seconds after which an unused login expires."""
RENEW_S = 3600
"""Seconds after which a login in use is renewed."""
CACHE_S = 3.0
"""Seconds for which a valid login is cached. A login that was ended at another gateway may be
accepted here for as long.
"""
MAX_CACHED = 1024
TOKEN_BYTES = 32


class Logins:
    """Logins under one API key; a gateway without a key has no logins. Every coroutine may raise
    RedisUnreachable.
    """

    def __init__(
        self, store: LoginStore, api_key: str | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._key = api_key.encode() if api_key is not None else None
        self._clock = clock
        self._cached_until: OrderedDict[str, float] = OrderedDict()
        self._num_ended = 0

    async def begin(self) -> str:
        """Store a new login and return its token."""
        token = token_urlsafe(TOKEN_BYTES)
        with _without_redis_address():
            await self._store.add(self._mac("login", token), KEEP_S)
        return token

    async def is_valid(self, token: str) -> bool:
        """Return True if `token` belongs to a login that has not ended. Renews the login if an hour
        has passed since its last renewal.
        """
        if self._key is None or not token:
            return False
        name = self._mac("login", token)
        if self._clock() < self._cached_until.get(name, 0.0):
            return True
        num_ended = self._num_ended
        with _without_redis_address():
            left_us = (await self._store.ends_us(name) or 0) - now_us()
            if left_us <= 0:
                return False
            if left_us < (KEEP_S - RENEW_S) * 1_000_000:
                await self._store.renew(name, KEEP_S)
        if num_ended == self._num_ended:  # otherwise this login may have ended since Redis was read
            self._cache(name)
        return True

    async def end(self, token: str) -> None:
        """End the login with this token, if there is such a login."""
        if self._key is None or not token:
            return
        name = self._mac("login", token)
        with _without_redis_address():
            await self._store.remove(name)
        self._num_ended += 1
        self._cached_until.pop(name, None)

    def csrf_token(self, token: str) -> str:
        """Return the CSRF token of the login `token`, which the console's pages send with every
        change; pages of other sites cannot read it.
        """
        return self._mac("csrf", token)

    def _cache(self, name: str) -> None:
        self._cached_until[name] = self._clock() + CACHE_S
        self._cached_until.move_to_end(name)
        if len(self._cached_until) > MAX_CACHED:
            self._cached_until.popitem(last=False)

    def _mac(self, purpose: str, token: str) -> str:
        assert self._key is not None, "a gateway without a key has no logins"
        return hmac.new(self._key, f"fleet {purpose} {token}".encode(), hashlib.sha256).hexdigest()


@contextmanager
def _without_redis_address() -> Iterator[None]:
    """Replace the message of RedisUnreachable by one without the address of Redis, since clients
    without a key may read it.
    """
    try:
        yield
    except RedisUnreachable as error:
        reason = (
            "Redis does not answer, so no login can be checked; try again shortly, or send "
            "the API key as Bearer"
        )
        raise RedisUnreachable(reason) from error
