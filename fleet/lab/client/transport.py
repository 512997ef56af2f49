"""HTTP connections to one gateway, one per call. Handles paths and bytes; does not interpret their
content.
"""

import http.client
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import urlsplit

import msgspec

from fleet.lab.client.errors import ApiError, ApiRefused, ApiSilent, ApiUnreachable

READ_BYTES = 1 << 16
SMALL_BUFFER_BYTES, SMALL_SEGMENT_BYTES = 4096, 536
TIMEOUT_S = 600.0


class ErrorMessage(msgspec.Struct, frozen=True):
    """The error object of the API, reduced to the field that error messages of this client show."""

    message: str = "no reason given"


class _Refusal(msgspec.Struct, frozen=True):
    error: ErrorMessage


class OpenResponse:
    """A response whose body is still arriving, on its own connection. Every error but `ApiSilent`
    closes the connection.
    """

    def __init__(
        self,
        url: str,
        connection: http.client.HTTPConnection,
        timeout_s: float,
        method: str,
        path: str,
        body: bytes | None,
        headers: dict[str, str],
    ) -> None:
        """Send the request and wait for the response status. Raises: ApiRefused, ApiUnreachable,
        ApiSilent.
        """
        self._url = url
        self._connection = connection
        self._timeout_s = timeout_s
        with self._mapped_errors():
            connection.request(method, path, body, headers)
            self._response = connection.getresponse()
            if self._response.status not in (200, 201):
                retry_after_s = _seconds(self._response.getheader("retry-after", ""))
                raise ApiRefused(
                    self._url, self._response.status, _reason(self._response.read()), retry_after_s
                )
        self.request_id = self._response.getheader("x-request-id", "")

    def read(self, most_bytes: int = READ_BYTES) -> bytes:
        """Return the next bytes of the body as they arrive, b"" at its end. Raises: ApiUnreachable,
        ApiSilent.
        """
        with self._mapped_errors():
            return self._response.read1(most_bytes)

    def read_all(self) -> bytes:
        """Return the rest of the body, and close the connection. Raises: ApiUnreachable,
        ApiSilent.
        """
        with self._mapped_errors():
            body = self._response.read()
        self.close()
        return body

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def _mapped_errors(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise ApiSilent(self._url, self._timeout_s, self.close) from error
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise _unreachable(self._url, error) from error
        except BaseException:
            self.close()
            raise


class Transport:
    """Address of a gateway and the API key for it; opens a connection per call. Thread-safe.
    `timeout_s`: read time-out of `call`. Raises: ApiError if `url` is not an address.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ApiError(f"{url!r} is not an address; write http://HOST:PORT", param="url")
        try:
            self.port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise ApiError(f"{url!r}: {error}", param="url") from error
        self.url = f"{parts.scheme}://{parts.netloc}"
        self.headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._secure = parts.scheme == "https"
        self._host = parts.hostname
        self._path = parts.path.rstrip("/")

    @property
    def websocket_url(self) -> str:
        return f"{'wss' if self._secure else 'ws'}://{self._host}:{self.port}{self._path}"

    def open(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        small_buffers: bool = False,
    ) -> OpenResponse:
        """Send a request and return its response once the status has arrived. `headers`: replace
        the default headers, which declare JSON. `small_buffers`: if True, the kernels at both ends
        hold some KiB of the response, not megabytes (plain HTTP only).

        Raises: ApiRefused, ApiUnreachable, ApiSilent.
        """
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        content = {"content-type": "application/json"} if body is not None else {}
        every_header = {**content, **self.headers, **(headers or {})}
        connection = kind(self._host, self.port, timeout=timeout_s)
        if small_buffers and not self._secure:
            connection.sock = self._small_socket(timeout_s)
        return OpenResponse(
            self.url, connection, timeout_s, method, self._path + path, body, every_header
        )

    def _small_socket(self, timeout_s: float) -> socket.socket:
        """Return a connected socket with a small receive buffer and small TCP segments. The
        gateway's kernel sizes its send buffer by the segment size.
        """
        try:
            family, *_, address = socket.getaddrinfo(
                self._host, self.port, type=socket.SOCK_STREAM
            )[0]
            wire = socket.socket(family, socket.SOCK_STREAM)
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SMALL_SEGMENT_BYTES)
            wire.settimeout(timeout_s)
            wire.connect(address)
        except OSError as error:
            raise _unreachable(self.url, error) from error
        return wire

    def call(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """Send a request and return the whole body of its response. Raises: ApiRefused,
        ApiUnreachable.
        """
        try:
            return self.open(method, path, body, headers, timeout_s=self._timeout_s).read_all()
        except ApiSilent as error:
            error.close()
            raise


def _seconds(header: str) -> float:
    """Parse a Retry-After header to seconds; 0 for a date, which a proxy may send."""
    return float(header) if header.isdecimal() else 0.0


def _reason(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_Refusal).error.message
    except msgspec.DecodeError:
        return ErrorMessage().message


def _unreachable(url: str, error: Exception) -> ApiUnreachable:
    if isinstance(error, ConnectionRefusedError | socket.gaierror):
        return ApiUnreachable(
            f"nothing answers at {url}; start a fleet with `fleet up`", param="url"
        )
    return ApiUnreachable(
        f"the connection to {url} broke: {str(error) or type(error).__name__}", param="url"
    )
