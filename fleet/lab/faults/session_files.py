"""Saving and loading of conversations as `fleet session` does, and comparison of the files. Injects
nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from fleet.config import FleetConfig
from fleet.control import keys
from fleet.control.connect import connect, text
from fleet.core.errors import BadInput
from fleet.core.ids import StageName
from fleet.core.request import session_name
from fleet.worker.process.peers import read_peer_access
from fleet.worker.sessions.client import SessionClient, SessionFile, named_outages

PATIENCE_S = 2.0
"""Longest wait in seconds for an answer from Redis, as in `fleet session`."""


class SessionFiles:
    """Saves and loads conversations of one fleet; each call opens its own connections. Thread-safe.

    Raises: FleetError with the cause; OSError for a file that cannot be read or written.
    """

    def __init__(self, redis_url: str, config: FleetConfig) -> None:
        self._redis_url, self._config = redis_url, config
        self._secret = read_peer_access(config).secret

    @contextmanager
    def _client(self) -> Iterator[SessionClient]:
        with connect(self._redis_url, patience_s=PATIENCE_S) as client:
            yield SessionClient(client, self._config, self._secret)

    def processes_of(self, stage: str, name: str) -> tuple[str, ...]:
        """Return the ids of the worker that caches the conversation `name` and of the span workers
        of its route. Raises: NotFound.
        """
        with connect(self._redis_url, patience_s=PATIENCE_S) as client:
            worker = SessionClient(client, self._config, self._secret).worker_of(
                StageName(stage), session_name(name), name
            )
            with named_outages():
                route = text(client.hget(keys.worker(worker), "route")) or "[]"
        return worker, *(hop for hop, _ in msgspec.json.decode(route, type=list[tuple[str, str]]))

    def save(self, stage: str, name: str, file: Path) -> int:
        """Save the conversation `name` to a file, and return its number of cached positions."""
        with self._client() as client:
            saved = client.save(StageName(stage), session_name(name), name)
        saved.write(file)
        return saved.info.num_rows

    def load(self, stage: str, name: str, file: Path) -> None:
        with self._client() as client:
            client.load(StageName(stage), session_name(name), SessionFile.read(file))


def damage_of(file: Path, expected: Path | None = None) -> str:
    """Return what is wrong with a saved session file, "" if nothing. `expected`: a file that must
    have the same keys and values.
    """
    try:
        found = SessionFile.read(file)
    except BadInput as error:
        return error.message
    return "" if expected is None else _difference(file, found, SessionFile.read(expected))


def _difference(file: Path, found: SessionFile, expected: SessionFile) -> str:
    if found.info != expected.info:
        return f"{file}: has {found.info}, not {expected.info}"
    if different := [
        name for name, part in expected.parts.items() if found.parts.get(name) != part
    ]:
        return (
            f"{file}: its parts {', '.join(sorted(different))} are not those of the "
            "undisturbed session"
        )
    return ""
