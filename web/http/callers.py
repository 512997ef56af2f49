"""The API key with which a request was sent: its name, scopes and limits. Knows no route and no
file.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

from starlette.types import Scope

from fleet.config import api_keys
from fleet.config.api_keys import ENVIRONMENT, NO_LIMITS, SCOPES, KeyLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiCaller:
    """Sender of a request. `name`: name of the API key; "" at a gateway without keys. `key_id`:
    first characters of the key's digest, which change when the key is replaced under the same name.
    `is_counted`: True if requests count towards `limits`; requests within a voice session do not,
    since the session has limits of its own.
    """

    name: str = ""
    scopes: frozenset[api_keys.Scope] = frozenset(SCOPES)
    limits: KeyLimits = NO_LIMITS
    key_id: str = ""
    is_counted: bool = True

    def may(self, *scopes: api_keys.Scope) -> bool:
        """Return True if the key has one of `scopes`."""
        return not self.scopes.isdisjoint(scopes)

    def in_session(self) -> "ApiCaller":
        """Return the caller for the requests of a voice session, which do not count towards the
        key's limits.
        """
        return replace(self, is_counted=False)

    @property
    def listed_name(self) -> str:
        """Name of a key of `web.keys_file`; "" for other callers."""
        return "" if self.name == ENVIRONMENT else self.name


ANYONE = ApiCaller()
"""Every client of a gateway without keys."""
UNCHECKED_SECRET = ApiCaller(scopes=frozenset[api_keys.Scope]({"talk"}))
"""Client with a short-lived client secret, before the route has checked it."""
METRICS_READER = ApiCaller(scopes=frozenset[api_keys.Scope]({"watch"}))
"""Every client of `/metrics` with `web.open_metrics`."""
_STATE_KEY = "fleet_caller"
_current: ContextVar[ApiCaller] = ContextVar("fleet_caller", default=ANYONE)


def set_caller(scope: Scope, caller: ApiCaller | None) -> None:
    scope.setdefault("state", {})[_STATE_KEY] = caller


def caller_of(scope: Scope) -> ApiCaller | None:
    """Return the caller of a request; None if a request to an open path was accepted without a
    valid key.
    """
    return scope.get("state", {}).get(_STATE_KEY)


@contextmanager
def acting_as(caller: ApiCaller) -> Iterator[None]:
    """Let `caller` be the sender of the model's requests within this context, and in tasks that
    begin in it.
    """
    token = _current.set(caller)
    try:
        yield
    finally:
        _current.reset(token)


def current_caller() -> ApiCaller:
    """Return the caller in whose context the code runs; `ANYONE` outside of requests."""
    return _current.get()
