"""Logins of browsers. A login is the name of an API key and a random token in a cookie, valid at
every gateway until the login ends or expires.

Redis stores a MAC of the token under the digest of the key. So data of Redis grant no access, and
every login of a key ends when the key is removed or replaced. Knows no route.
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
from web.http.callers import ApiCaller
from web.http.key_ring import KeyRing

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
    """Browser logins, each with an API key of the gateway; a gateway without keys has no logins.
    Every coroutine may raise RedisUnreachable.
    """

    def __init__(
        self, store: LoginStore, keys: KeyRing, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._keys = keys
        self._clock = clock
        self._cached_until: OrderedDict[str, float] = OrderedDict()
        self._num_ended = 0

    async def begin(self, key_name: str) -> str:
        """Store a new login with the key of this name and return its token."""
        token = f"{key_name}.{token_urlsafe(TOKEN_BYTES)}"
        name = self._mac("login", token)
        assert name is not None, "the key was accepted"
        with _without_redis_address():
            await self._store.add(name, KEEP_S)
        return token

    async def caller_of(self, token: str) -> ApiCaller | None:
        """Return the caller whose login `token` is, or None if the login has ended. Renews the
        login if an hour has passed since its last renewal.
        """
        found = self._keys.named(_key_name(token))
        name = self._mac("login", token)
        if found is None or name is None:
            return None
        if self._clock() < self._cached_until.get(name, 0.0):
            return found[0]
        num_ended = self._num_ended
        with _without_redis_address():
            left_us = (await self._store.ends_us(name) or 0) - now_us()
            if left_us <= 0:
                return None
            if left_us < (KEEP_S - RENEW_S) * 1_000_000:
                await self._store.renew(name, KEEP_S)
        if num_ended == self._num_ended:  # otherwise this login may have ended since Redis was read
            self._cache(name)
        return found[0]

    async def end(self, token: str) -> None:
        """End the login with this token, if there is such a login."""
        name = self._mac("login", token)
        if name is None:
            return
        with _without_redis_address():
            await self._store.remove(name)
        self._num_ended += 1
        self._cached_until.pop(name, None)

    def csrf_token(self, token: str) -> str:
        """Return the CSRF token of the login `token`, which the console's pages send with every
        change; pages of other sites cannot read it. Return "" if the login's key is not accepted
        any more.
        """
        return self._mac("csrf", token) or ""

    def _cache(self, name: str) -> None:
        self._cached_until[name] = self._clock() + CACHE_S
        self._cached_until.move_to_end(name)
        if len(self._cached_until) > MAX_CACHED:
            self._cached_until.popitem(last=False)

    def _mac(self, purpose: str, token: str) -> str | None:
        """Return a MAC of a token under the digest of its key; None if there is no such key."""
        found = self._keys.named(_key_name(token))
        if found is None:
            return None
        message = f"fleet {purpose} {token}".encode()
        return hmac.new(found[1].encode(), message, hashlib.sha256).hexdigest()


def _key_name(token: str) -> str:
    return token.partition(".")[0]


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
