"""API keys: the file of keys, the commands that change it, and the ring of a gateway that follows
it.
"""

import logging
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from fleet.cli.keys import change_file
from fleet.cli.main import app
from fleet.config.api_keys import (
    ENVIRONMENT,
    SCOPES,
    ApiKey,
    KeyLimits,
    KeysFile,
    digest_of,
    encode_keys_file,
    read_keys_file,
)
from fleet.core.errors import FleetError
from web.http.key_ring import KeyRing

OWN = "the-key-of-the-environment"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def fleet_keys(path: Path, *arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(
        app, ["keys", *arguments, "--set", f"web.keys_file={path}"]
    )


def made(path: Path, *arguments: str) -> str:
    """Run a command that prints a key; return the key."""
    done = fleet_keys(path, *arguments)
    assert done.exit_code == 0, done.output
    return done.stdout.strip()


def names(ring: KeyRing, *keys: str) -> list[str | None]:
    callers = [ring.find(key.encode()) for key in keys]
    return [caller.name if caller is not None else None for caller in callers]


def test_added_key_is_printed_once_and_stored_as_digest(path: Path) -> None:
    key = made(path, "add", "phone", "--scope", "talk", "--scope", "watch", "--max-requests", "8")
    assert re.fullmatch(r"fk_[\w-]{43}", key)
    assert key not in path.read_text() and stat.S_IMODE(path.stat().st_mode) == 0o600
    (entry,) = read_keys_file(path).keys.values()
    assert entry.sha256 == digest_of(key.encode())
    assert (entry.scopes, entry.limits) == (("talk", "watch"), KeyLimits(max_requests=8))
    listed = fleet_keys(path, "list").stdout
    assert "phone" in listed and "talk, watch" in listed and key not in listed


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("add", "Phone"), "is no name of a key"),
        (("add", "a/b"), "is no name of a key"),
        (("add", "phone"), "fleet keys rotate phone"),
        (("add", "other", "--scope", "talks"), "did you mean talk"),
        (("remove", "phon"), "did you mean phone"),
        (("rotate", "nobody"), "no key 'nobody'"),
    ],
)
def test_refused_command_changes_nothing(
    path: Path, arguments: tuple[str, ...], reason: str
) -> None:
    made(path, "add", "phone")
    before = path.read_text()
    refused = fleet_keys(path, *arguments).exception
    assert isinstance(refused, FleetError) and reason in refused.message
    assert path.read_text() == before


def test_ring_follows_the_file_without_a_restart(path: Path) -> None:
    first = made(path, "add", "phone")
    ring = KeyRing(OWN, path)
    assert names(ring, first, OWN, "", "x") == ["phone", ENVIRONMENT, None, None]
    second = made(path, "add", "watcher", "--scope", "watch")
    assert names(ring, first, second) == ["phone", "watcher"]
    replaced = made(path, "rotate", "phone")
    assert names(ring, first, replaced) == [None, "phone"]
    assert fleet_keys(path, "remove", "phone").exit_code == 0
    assert names(ring, replaced, second, OWN) == [None, "watcher", ENVIRONMENT]


def test_former_key_is_accepted_for_the_overlap(path: Path) -> None:
    now = [0.0]
    first = made(path, "add", "phone", "--max-sessions", "2")
    second = made(path, "rotate", "phone", "--overlap-s", "60")
    entry = read_keys_file(path).keys["phone"]
    ring = KeyRing(None, path, lambda: now[0])
    now[0] = entry.former_until - 1
    assert names(ring, first, second) == ["phone", "phone"]
    former = ring.find(first.encode())
    assert former is not None and former.limits.max_sessions == 2
    now[0] = entry.former_until
    assert names(ring, first, second) == [None, "phone"]


@pytest.mark.parametrize("broken", ["", "{", '{"keys": {"Phone": {}}}', '{"key": {}}', "\udcff"])
def test_broken_file_keeps_the_last_good_keys(
    path: Path, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    key = made(path, "add", "phone")
    good, ring = path.read_text(), KeyRing(None, path)
    path.write_bytes(broken.encode(errors="surrogateescape"))
    with caplog.at_level(logging.ERROR):
        assert names(ring, key, key) == ["phone", "phone"]
    (line,) = caplog.messages
    assert "web.keys_file" in line and "the keys stay as they were" in line
    path.write_text(good.replace('"phone"', '"renamed"'))
    assert names(ring, key) == ["renamed"]
    path.unlink()
    assert names(ring, key) == ["renamed"]


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_file_that_others_can_write_is_refused(path: Path, mode: int) -> None:
    made(path, "add", "phone")
    path.chmod(mode)
    with pytest.raises(FleetError, match=f"run: chmod 600 {path}"):
        KeyRing(None, path)


def test_missing_file_is_refused_at_start_with_the_remedy(path: Path) -> None:
    with pytest.raises(FleetError, match="`fleet keys add NAME` creates it"):
        KeyRing(None, path)


def test_concurrent_commands_lose_no_key(path: Path) -> None:
    wanted = [f"key-{number}" for number in range(8)]
    path.write_text(encode_keys_file(KeysFile()))

    def add(name: str) -> None:
        entry = ApiKey(sha256=digest_of(name.encode()), scopes=SCOPES)
        change_file(path, lambda listed: listed.update({name: entry}))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, wanted))
    assert sorted(read_keys_file(path).keys) == wanted


def test_key_in_both_places_has_the_scopes_of_the_file(path: Path) -> None:
    entry = ApiKey(sha256=digest_of(OWN.encode()), scopes=("watch",))
    path.write_text(encode_keys_file(KeysFile(keys={"page": entry})))
    path.chmod(0o600)
    caller = KeyRing(OWN, path).find(OWN.encode())
    assert caller is not None and (caller.name, caller.scopes) == ("page", {"watch"})


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=6, unique=True), st.data())
def test_ring_finds_exactly_its_keys(
    tmp_path_factory: pytest.TempPathFactory, given_keys: list[bytes], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    entries = {
        f"key-{number}": ApiKey(sha256=digest_of(key), scopes=("talk",))
        for number, key in enumerate(given_keys)
    }
    path.write_text(encode_keys_file(KeysFile(keys=entries)))
    path.chmod(0o600)
    ring = KeyRing(None, path)
    tried = data.draw(st.sampled_from(given_keys) | st.binary(max_size=41))
    caller = ring.find(tried)
    wanted = f"key-{given_keys.index(tried)}" if tried in given_keys else None
    assert (caller.name if caller is not None else None) == wanted
