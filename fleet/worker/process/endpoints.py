"""Addresses at which workers accept connections, as fields of their records in Redis. Opens no
connection.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fleet.control.connect import text
from fleet.process.fleet_secret import FleetSecret, span_connection_key
from fleet.spans.net.addresses import SpanAddress, address_text, parse_address

Service = Literal["span", "session"]
TOKEN_BYTES = 32


def new_token() -> bytes:
    """Return a random token for a process to register; the key of connections to the process is
    derived from it.
    """
    return secrets.token_bytes(TOKEN_BYTES)


def endpoint_fields(service: Service, address: SpanAddress, token: bytes) -> dict[str, str | bytes]:
    """Return the fields of a worker's record that other processes need to connect to one of its
    services.
    """
    return {f"{service}_address": address_text(address), f"{service}_token": token}


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The address of a worker's service, and the key of connections to it."""

    address: SpanAddress
    key: bytes


def endpoint_of(
    service: Service, record: Mapping[str, bytes], secret: FleetSecret | None
) -> Endpoint | None:
    """Return the endpoint of a service from a worker's record; None if the worker has no such
    service. The caller has verified the record's MAC.
    """
    address, token = (
        parse_address(text(record.get(f"{service}_address"))),
        record.get(f"{service}_token"),
    )
    if address is None or token is None:
        return None
    return Endpoint(address=address, key=span_connection_key(secret, token))
