"""Priority of a request, by the header `x-fleet-priority`. Knows no route."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from starlette.datastructures import Headers
from starlette.types import Scope

PRIORITY_HEADER, BACKGROUND = "x-fleet-priority", "background"
_is_background: ContextVar[bool] = ContextVar("fleet_is_background", default=False)


@contextmanager
def prioritized(scope: Scope) -> Iterator[None]:
    """Set the priority of model requests within this context, and in tasks that begin in it:
    background if the header in `scope` says so, otherwise the usual priority.
    """
    asked = Headers(scope=scope).get(PRIORITY_HEADER, "")
    token = _is_background.set(asked.strip().lower() == BACKGROUND)
    try:
        yield
    finally:
        _is_background.reset(token)


def is_background() -> bool:
    """Return True if the current request has background priority; False outside of requests."""
    return _is_background.get()
