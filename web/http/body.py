"""Reading of request bodies, with a limit for each body and for the memory of all bodies. Knows no
route.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import Request
from starlette.types import Scope

from fleet.core.errors import BadInput, InputTooLarge
from web.http.errors import BodiesTooLarge

_STATE_KEY = "fleet_bodies"
MIB = 1024 * 1024


class BodyMemory:
    """Memory that the bodies of all requests take, limited to `web.body_memory_mib`. A request
    frees its share at its end, also after an error.
    """

    def __init__(self, max_mib: int) -> None:
        self._max_mib = max_mib
        self.num_bytes = 0

    def reserve(self, num_bytes: int) -> None:
        """Count `num_bytes` of a body. Raises: BodiesTooLarge beyond the limit."""
        if self.num_bytes + num_bytes > self._max_mib * MIB:
            raise BodiesTooLarge(
                f"the requests under way have bodies of {self.num_bytes} bytes already, and "
                "web.body_memory_mib allows "
                f"{self._max_mib} MiB; try again shortly, or send a smaller body"
            )
        self.num_bytes += num_bytes

    def free(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes

    @contextmanager
    def track(self, scope: Scope) -> Iterator[None]:
        """Count the body of the request of `scope` within this context, and free its memory at the
        end.
        """
        memory = scope["state"][_STATE_KEY] = RequestBodyMemory(self)
        try:
            yield
        finally:
            memory.free()


class RequestBodyMemory:
    """Share of `BodyMemory` that one request takes."""

    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self._num_bytes = 0

    def reserve(self, num_bytes: int) -> None:
        """Count `num_bytes` of the request's body. Raises: BodiesTooLarge if all bodies together
        are beyond the limit.
        """
        self._memory.reserve(num_bytes)
        self._num_bytes += num_bytes

    def free(self) -> None:
        self._memory.free(self._num_bytes)
        self._num_bytes = 0


def body_memory_of(scope: Scope) -> RequestBodyMemory:
    return scope["state"][_STATE_KEY]


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Read and return the body of a request.

    Raises: InputTooLarge as soon as the body is known to be longer than `max_bytes`; BodiesTooLarge
    if the bodies of all requests take too much memory; BadInput; ClientDisconnect.
    """
    declared = request.headers.get("content-length", "0")
    if not declared.isdigit():
        raise BadInput("content-length: not a number")
    if int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    memory = body_memory_of(request.scope)
    async for piece in request.stream():
        if len(body) + len(piece) > max_bytes:
            raise _too_large(max_bytes)
        memory.reserve(len(piece))
        body += piece
    return bytes(body)


def _too_large(max_bytes: int) -> InputTooLarge:
    return InputTooLarge(f"the body is larger than {max_bytes} bytes, this server's limit")
