"""API keys: what each may do, and the file that lists them (`web.keys_file`).

The file has the SHA-256 digest of each key and never the key. A key is 32 random bytes, so that its
digest cannot be reversed by trying. Knows no gateway.
"""

import hashlib
import os
import stat
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec

from fleet.core.errors import ConfigError

SETTING = "web.keys_file"
Scope = Literal["talk", "watch", "operate"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
"""`talk`: use the model. `watch`: read the console, the fleet API and metrics. `operate`: change
the fleet, and end what belongs to other keys.
"""
ENVIRONMENT = "FLEET_API_KEY"
"""Environment variable of a key that has all scopes and no limits. The variable's name is also the
name of the key; keys in the file have names without capital letters.
"""
ACTING_FOR_HEADER = "x-fleet-acting-for"
"""Header with the name of the API key on whose behalf a request is sent. The key of the sender must
have the scope `operate`.
"""
NAME = r"[a-z0-9][a-z0-9_-]{0,39}"
MAX_FILE_BYTES = 1024 * 1024

_Limit = Annotated[int, msgspec.Meta(ge=1, le=10**9)]
_Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
_Name = Annotated[str, msgspec.Meta(pattern=rf"^{NAME}\Z")]


class KeyLimits(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Limits of a key over all gateways; None: no limit.

    `max_requests`: requests in progress at one time. `max_sessions`: voice sessions that are open
    or queued at one time. `audio_s_per_day`: seconds of audio in prompts and answers, and of voice
    sessions, per UTC day.
    """

    max_requests: _Limit | None = None
    max_sessions: _Limit | None = None
    audio_s_per_day: _Limit | None = None


NO_LIMITS = KeyLimits()


class ApiKey(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Entry of a key. `made`: UTC date on which the key was made or last rotated. `former_sha256`:
    digest of the key before the last rotation, which is accepted until `former_until` (seconds
    since 1970); None if no former key is accepted.
    """

    sha256: _Digest
    scopes: tuple[Scope, ...]
    limits: KeyLimits = NO_LIMITS
    made: str = ""
    former_sha256: _Digest | None = None
    former_until: int = 0


class KeysFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys by name. Names are safe in a cookie, in a Redis key and in a log line."""

    keys: dict[_Name, ApiKey] = {}


_decoder = msgspec.json.Decoder(KeysFile)


def digest_of(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def read_keys_file(path: Path) -> KeysFile:
    """Read the file of keys. Raises: ConfigError if it cannot be read, is not valid, or can be
    written by other users.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            raw = file.read(MAX_FILE_BYTES)
    except OSError as error:
        raise _refusal(
            path, f"cannot be read: {error.strerror or error}; `fleet keys add NAME` creates it"
        ) from error
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _refusal(
            path, f"can be written by other users (mode {mode:04o}); run: chmod 600 {path}"
        )
    try:
        return _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _refusal(path, f"is not a file of keys: {error}") from error


def encode_keys_file(file: KeysFile) -> str:
    return msgspec.json.format(msgspec.json.encode(file), indent=2).decode() + "\n"


def _refusal(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"{SETTING}: {path} {reason}", param=SETTING)
