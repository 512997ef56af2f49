"""The API keys of a gateway: the keys of `web.keys_file`, which is read again whenever it changes,
and the key in FLEET_API_KEY. Knows no route.
"""

import hmac
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fleet.config.api_keys import (
    ENVIRONMENT,
    NO_LIMITS,
    SCOPES,
    SETTING,
    ApiKey,
    KeysFile,
    digest_of,
    read_keys_file,
)
from fleet.core.errors import ConfigError
from web.http.callers import ANYONE, ApiCaller

log = logging.getLogger("fleet.web")

KEY_ID_CHARS = 16


@dataclass(frozen=True, slots=True)
class _Digest:
    """Digest of a key that is accepted until `until` (seconds since 1970)."""

    sha256: str
    caller: ApiCaller
    until: float = float("inf")


class KeyRing:
    """Keys that a gateway accepts. Raises: ConfigError if `path` is not a valid file of keys.

    A file that cannot be read later leaves the keys as they were, with an error in the log: a
    mistake in it must not lock out every client.
    """

    def __init__(
        self, key: str | None, path: Path | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._path = path
        self._clock = clock
        self.is_required = key is not None or path is not None
        """True if clients must send a key; False admits all."""
        self._own = (
            () if key is None else tuple(_digests(ENVIRONMENT, _entry_of(digest_of(key.encode()))))
        )
        self._seen = self._stamp()
        self._digests = self._own if path is None else self._loaded(read_keys_file(path))

    def find(self, key: bytes) -> ApiCaller | None:
        """Return the caller to whom `key` belongs; None for a wrong key, and at a gateway without
        keys. Takes the same time for each key.
        """
        sha256, found = digest_of(key), None
        for digest in self._valid():
            if hmac.compare_digest(digest.sha256, sha256) and found is None:
                found = digest.caller
        return found

    def named(self, name: str) -> tuple[ApiCaller, str] | None:
        """Return the caller and the digest of the key with this name; None if no key has the name.
        After a rotation the new key is returned.
        """
        return next(
            ((each.caller, each.sha256) for each in self._valid() if each.caller.name == name), None
        )

    def maker_of(self, secret_name: str, key_id: str | None) -> ApiCaller | None:
        """Return the caller whose key created a client secret; None if that key is no longer
        accepted. `secret_name`: name of the key in the secret, "" for the key in FLEET_API_KEY or
        for a gateway without keys. `key_id`: id of the key; None accepts any key of that name.
        """
        if not self.is_required:
            return None if secret_name else ANYONE
        name = secret_name or ENVIRONMENT
        callers = (each.caller for each in self._valid() if each.caller.name == name)
        return next((each for each in callers if key_id in (None, each.key_id)), None)

    def _valid(self) -> Iterator[_Digest]:
        self._reread()
        now = self._clock()
        return (each for each in self._digests if now < each.until)

    def _reread(self) -> None:
        """Read the file again if it has changed."""
        stamp = self._stamp()
        if self._path is None or stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._digests = self._loaded(read_keys_file(self._path))
        except ConfigError as error:
            log.error("%s; the keys stay as they were", error.message)
        else:
            log.info("%s: read again, %d keys", SETTING, len(self._digests))

    def _loaded(self, file: KeysFile) -> tuple[_Digest, ...]:
        # A key that is in both places has the scopes that the file gives it.
        listed = (digest for name, key in file.keys.items() for digest in _digests(name, key))
        return (*listed, *self._own)

    def _stamp(self) -> tuple[int, int, int] | None:
        """Return inode, modification time and size of the file, by which changes are noticed; None
        if there is no file.
        """
        try:
            found = self._path.stat() if self._path is not None else None
        except OSError:
            return None
        return (found.st_ino, found.st_mtime_ns, found.st_size) if found is not None else None


def _entry_of(sha256: str) -> ApiKey:
    return ApiKey(sha256=sha256, scopes=SCOPES, limits=NO_LIMITS)


def _digests(name: str, key: ApiKey) -> Iterator[_Digest]:
    def caller(sha256: str) -> ApiCaller:
        return ApiCaller(
            name=name,
            scopes=frozenset(key.scopes),
            limits=key.limits,
            key_id=sha256[:KEY_ID_CHARS],
        )

    yield _Digest(key.sha256, caller(key.sha256))
    if key.former_sha256 is not None:
        yield _Digest(key.former_sha256, caller(key.former_sha256), key.former_until)
