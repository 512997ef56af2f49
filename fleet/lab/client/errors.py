"""Errors of calls to the gateway's API; each message is one line."""

from collections.abc import Callable

from fleet.core.errors import FleetError


class ApiError(FleetError):
    """An API call failed; the message names the address and the cause."""

    code = "api_failed"


class ApiRefused(ApiError):
    """The gateway answered with a status other than 200. `retry_after_s`: pause that the gateway
    asks for before a retry, 0 if it names none.
    """

    def __init__(self, url: str, http_status: int, reason: str, retry_after_s: float = 0.0) -> None:
        super().__init__(f"{url} refused with status {http_status}: {reason}")
        self.http_status, self.retry_after_s = http_status, retry_after_s


class ApiUnreachable(ApiError):
    """No gateway listens at the address, or the connection to it broke."""


class ApiSilent(ApiUnreachable):
    """The gateway sent nothing until the time-out.

    The connection is left open, since closing the connection cancels the request. `close`: function
    that closes the connection.
    """

    def __init__(self, url: str, timeout_s: float, close: Callable[[], None]) -> None:
        super().__init__(f"{url} sent nothing for {timeout_s:g} s")
        self.close = close


class StreamError(ApiError):
    """A streamed answer carries an error, or stopped before its end."""
