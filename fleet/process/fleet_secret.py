"""The secret that the workers of a fleet share, which is never sent or logged, and the MAC that it
puts on a worker's record in Redis.

Redis does not authenticate the writer of a record: without a MAC, a process that can write to Redis
can make workers read memory of a process that is not their peer.
"""

import hashlib
import hmac
from collections.abc import Mapping
from pathlib import Path

from fleet.core.errors import ConfigError
from fleet.core.ids import WorkerId
from fleet.process.private import read_closed_file

SETTING = "security.fleet_secret"
MIN_SECRET_BYTES = 32
MAX_SECRET_BYTES = 1024 * 1024
KEY_ID, MAC = "key_id", "mac"
SIGNED = (
    "role",
    "stage",
    "transfer",
    "reach",
    "place",
    "protocol",
    "package",
    "checkpoint",
    "dtype",
    "page_size_tokens",
    "span_address",
    "span_token",
    "session_address",
    "session_token",
    KEY_ID,
)
"""Fields of a worker's record that other workers act on, and that the MAC covers. No such field
changes while the worker is registered.
"""
Record = Mapping[str, str | bytes]


class FleetSecret:
    """The secret of a fleet, from which one key is derived for each purpose."""

    def __init__(self, secret: bytes) -> None:
        self._mac_key = _derived(secret, b"fleet: MAC of a worker's record, 1")
        self.key_id = _derived(secret, b"fleet: id of the secret, 1").hex()[:16]

    def signed(self, worker: WorkerId, record: Record) -> dict[str, str | bytes]:
        """Return `record`, the Redis record of `worker`, with a MAC and the id of this secret
        added.
        """
        named = {**record, KEY_ID: self.key_id}
        return {**named, MAC: self._mac(worker, named)}

    def verifies(self, worker: WorkerId, record: Record) -> bool:
        """Return True if `record` was signed with this secret for `worker`, and its `SIGNED` fields
        are unchanged.
        """
        return hmac.compare_digest(_bytes(record.get(MAC, "")), self._mac(worker, record).encode())

    def connection_key(self, token: bytes) -> bytes:
        """Return the 32-byte key of connections to the process that registered `token`."""
        return hmac.new(
            self._mac_key, b"fleet: key of a span connection, 1" + token, hashlib.sha256
        ).digest()

    def _mac(self, worker: WorkerId, record: Record) -> str:
        # Each part with its length in front: no two records have the same bytes.
        parts = [_bytes(worker), *(_bytes(record.get(name, "")) for name in SIGNED)]
        message = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
        return hmac.new(self._mac_key, message, hashlib.sha256).hexdigest()


def span_connection_key(secret: FleetSecret | None, token: bytes) -> bytes:
    """Return the key of connections to the span worker that registered `token`. Without a secret,
    anyone who can read the token in Redis can connect.
    """
    if secret is not None:
        return secret.connection_key(token)
    return hashlib.sha256(b"fleet: key of a span connection, 1" + token).digest()


def _derived(secret: bytes, purpose: bytes) -> bytes:
    return hmac.new(secret, purpose, hashlib.sha256).digest()


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()


def read_fleet_secret(path: Path) -> FleetSecret:
    """Read the file that `security.fleet_secret` names. Raises: ConfigError if the file cannot be
    read, if other users can read it, or if the secret is too short.
    """
    secret = read_closed_file(path, SETTING, MAX_SECRET_BYTES)
    # Surrounding blanks are no part of the secret: editors add a line end. Random bytes may end in
    # blanks too, hence the half.
    stripped = secret.strip()
    if len(secret) < MIN_SECRET_BYTES or len(stripped) < MIN_SECRET_BYTES // 2:
        raise ConfigError(
            f"{SETTING}: {path} holds {len(stripped)} bytes, and at least {MIN_SECRET_BYTES} "
            "are needed; "
            f"run: openssl rand -hex 32 > {path}",
            param=SETTING,
        )
    return FleetSecret(stripped)
