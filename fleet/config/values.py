"""Validators of single values of a deployment file: type, range, form. Errors name the accepted
form.

Pydantic calls them before its own conversion, so that `true`, "8" and 8.0 are not accepted as
counts. Knows no field.
"""

import ipaddress
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard, cast
from urllib.parse import urlsplit

from pydantic import GetCoreSchemaHandler
from pydantic_core.core_schema import CoreSchema, no_info_before_validator_function

from fleet.core.errors import ConfigError
from fleet.drafts.figures.speculation import OFF
from fleet.graphs.base import FP8
from fleet.spans.protocol.layers import LayerSpan

MAX_PORT = 65535
_MAX_HOST_LEN = 253
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]*[A-Za-z0-9_])?"
_HOST = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")
_NUMERIC_HOST = re.compile(r"[0-9.]+")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
_DEFAULT_PORTS = {"http": 80, "https": 443}
ANY_ORIGIN = "*"
_GPU = re.compile(r"cuda(?::(?:0|[1-9][0-9]{0,2}))?")
_DEVICE = re.compile(rf"auto|cpu|{_GPU.pattern}")


class Limit:
    """Base of the validators of numbers, used in a field's annotation: `Annotated[int, Whole(1,
    256)]`.
    """

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return no_info_before_validator_function(self, handler(source))

    def __call__(self, value: object) -> object:
        """Return the value if it is an accepted number. Raises: ValueError naming the accepted
        numbers.
        """
        raise AssertionError("a kind of limit defines this")


@dataclass(frozen=True, slots=True)
class Whole(Limit):
    """Validator of a whole number from `low` to `high`, both included."""

    low: int
    high: int

    def __call__(self, value: object) -> int:
        if (
            isinstance(value, bool)
            or not isinstance(value, int)
            or not self.low <= value <= self.high
        ):
            raise ValueError(f"must be a whole number from {self.low} to {self.high}")
        return value


@dataclass(frozen=True, slots=True)
class Number(Limit):
    """Validator of a number from `low` to `high`, both included; with `above`, `low` itself is
    excluded.
    """

    low: float
    high: float
    above: bool = False

    def __call__(self, value: object) -> float:
        if (
            not is_number(value)
            or not self.low <= value <= self.high
            or (self.above and value == self.low)
        ):
            span = (
                f"above {self.low:g} and at most {self.high:g}"
                if self.above
                else f"from {self.low:g} to {self.high:g}"
            )
            raise ValueError(f"must be a number {span}")
        return float(value)


def is_number(value: object) -> TypeGuard[int | float]:
    """Return True for a finite number that is not a boolean."""
    return (
        isinstance(value, int)
        and not isinstance(value, bool)
        or isinstance(value, float)
        and math.isfinite(value)
    )


def number(value: object) -> int | float:
    if not is_number(value):
        raise ValueError("must be a number")
    return value


def scalar(value: object) -> str | int | float | bool:
    if not isinstance(value, str | bool) and not is_number(value):
        raise ValueError("must be text, a number, or true or false")
    return value


def port(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_PORT:
        raise ValueError(f"must be a port from 1 to {MAX_PORT}, or 0 for a free one")
    return value


def switch(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def text(value: object) -> str:
    """Accept printable text, not empty, without surrounding blanks."""
    if not isinstance(value, str):
        raise ValueError("must be text; put it in quotes")
    if not value.strip():
        raise ValueError("must not be empty")
    if value != value.strip() or not value.isprintable():
        raise ValueError("has surrounding blanks or unprintable characters; remove them")
    return value


def folder(value: object) -> Path:
    """Accept a path. `~` is refused: it would create a folder of that name."""
    path = value if isinstance(value, Path) else Path(text(value))
    if path.parts and path.parts[0].startswith("~"):
        raise ValueError("must be a full path; ~ is not expanded here")
    return path


def host(value: object) -> str:
    """Accept a host name or an IP address, without a port."""
    name = text(value)
    if not _is_host(name):
        raise ValueError(
            "must be a host name or an IP address alone, such as 127.0.0.1, 0.0.0.0 or localhost"
        )
    return name


def address(value: object) -> str:
    """Accept an IP address."""
    given = text(value)
    try:
        return str(ipaddress.ip_address(given))
    except ValueError:
        raise ValueError("must be an IP address, such as 203.0.113.7") from None


def endpoint(value: object) -> str:
    """Accept a host and a port, such as stun.example.org:3478."""
    name, _, number = text(value).rpartition(":")
    if not (number.isdecimal() and 0 < int(number) < 65_536 and _is_host(name)):
        raise ValueError("must be a host and a port, such as stun.example.org:3478")
    return f"{name}:{number}"


def network(value: object) -> str:
    """Accept an IP address, or a network in CIDR notation such as 10.0.0.0/8."""
    given = text(value)
    try:
        ipaddress.ip_network(given)
    except ValueError:
        raise ValueError(
            "must be an IP address or a network, such as 127.0.0.1 or 10.0.0.0/8"
        ) from None
    return given


def origin(value: object) -> str:
    """Accept the origin of a web page as browsers send it (RFC 6454), or `*`; return it in lower
    case.
    """
    given = text(value)
    if given == ANY_ORIGIN:
        return given
    if given == "null":
        raise ValueError(
            "null is the origin of files and sandboxed pages of any site; serve the page over "
            "http and list that"
        )
    scheme, _, rest = given.lower().partition("://")
    if not _SCHEME.fullmatch(scheme) or not rest:
        raise ValueError(
            "must be an origin with its scheme, such as https://app.example.com or "
            "http://localhost:3000, or *"
        )
    try:
        parts = urlsplit(f"//{rest}")
        name, port = parts.hostname or "", parts.port
    except ValueError:
        name, port = "", None
    if not _is_host(name):
        raise ValueError(
            "must be an origin: a scheme and one host, such as https://app.example.com; no * "
            "within it"
        )
    address = f"[{name}]" if ":" in name else name
    exact = f"{scheme}://{address}" + (
        f":{port}" if port not in (None, _DEFAULT_PORTS.get(scheme)) else ""
    )
    if given.lower() != exact:
        raise ValueError(
            f"must be an origin alone, without user, path or default port; write {exact}"
        )
    return exact


def url(value: object) -> str:
    """Accept an http or https URL without a fragment."""
    given = text(value)
    try:
        parts = urlsplit(given)
        has_host = _is_host(parts.hostname or "") and (parts.port or 1) > 0
    except ValueError:
        has_host, parts = False, urlsplit("")
    if parts.scheme not in ("http", "https") or not has_host or parts.fragment:
        raise ValueError(
            "must be an address that begins with http:// or https://, such as "
            "https://alerts.example.com/fleet"
        )
    return given


def service_url(value: object) -> str:
    """Accept an http or https URL without a query. A user name or password is refused, since these
    URLs are printed.
    """
    given = url(value)
    if urlsplit(given).query:
        raise ValueError("must be an address without ?, such as http://localhost:4318")
    if "@" in urlsplit(given).netloc:
        raise ValueError("has a name or password; put it into a file of headers")
    return given


def _is_host(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return (
            len(name) <= _MAX_HOST_LEN
            and not _NUMERIC_HOST.fullmatch(name)
            and _HOST.fullmatch(name) is not None
        )
    return True


def device(value: object) -> str:
    if isinstance(value, list | tuple):
        raise ValueError(
            "must be one device; a list of GPUs, one for each replica, is for stages.NAME.device"
        )
    name = text(value)
    if not _DEVICE.fullmatch(name):
        raise ValueError("must be auto, cpu, cuda or cuda:N, such as cuda:0")
    return name


def span(value: object) -> str:
    """Accept a span of layers, such as `0:13` or `14:output`."""
    notation = text(value)
    try:
        LayerSpan.parse(notation, "span")
    except ConfigError as error:
        raise ValueError(error.message.removeprefix("span: ")) from error
    return notation


AUTO = "auto"


def span_or_auto(value: object) -> str:
    """Accept a span of layers, or `auto`."""
    return AUTO if value == AUTO else span(value)


def drafter(value: object) -> object:
    """Return the name of a drafter unchanged, and `off` for False, since YAML reads an unquoted
    `off` as false. Unknown names are not refused here.
    """
    return OFF if value is False else value


def deployment_dtype(value: object) -> object:
    """Return a dtype unchanged, except for the precision of single stages, which is refused."""
    if value == FP8:
        raise ValueError("fp8 is for single stages with experts; set stages.NAME.dtype")
    return value


def worker_spans(value: object) -> object:
    """Accept a list of spans of layers, or `auto`, which becomes the list `[auto]`."""
    if value == AUTO:
        return (AUTO,)
    if (
        isinstance(value, list | tuple)
        and len(cast("Sequence[object]", value)) > 1
        and AUTO in value
    ):
        raise ValueError("auto stands for all spans of workers; write workers: auto, or each span")
    return value


def spans(value: object) -> object:
    """Accept a section about spans, or the short form `auto`, which becomes a section with
    `workers: auto`.
    """
    return {"workers": AUTO} if value == AUTO else value


def devices(value: object) -> str | tuple[str, ...]:
    """Accept one device, or a list of GPUs with one per replica."""
    if not isinstance(value, list | tuple):
        return device(value)
    names = tuple(cast("Sequence[object]", value))
    if not names or not all(isinstance(name, str) and _GPU.fullmatch(name) for name in names):
        raise ValueError(
            "must be a device, or a list of GPUs, one for each replica, such as [cuda:0, cuda:1]"
        )
    return cast("tuple[str, ...]", names)
