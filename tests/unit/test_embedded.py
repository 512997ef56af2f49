"""Address, password and folder permissions of the embedded Redis."""

import os
import stat
from pathlib import Path

import pytest
from redis.connection import parse_url

from fleet.cli.deployment import check_data_dir
from fleet.cli.deployment import secure_data_dir as secure_deployment
from fleet.cli.environment import USES, without_secrets
from fleet.config import load_config
from fleet.control import embedded
from fleet.control.embedded import embedded_url, make_password, read_password, secure_data_dir
from fleet.core.errors import ConfigError


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def short_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Short temporary folder in place of /tmp; Fleet's folder in it is named after this user."""
    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.setattr(embedded, "SHORT_PATHS", folder)
    return folder / f"fleet-{os.geteuid()}"


@pytest.mark.parametrize("name", ["plain", "a b", "50%", "%20", "who@host", "a#b?c=d", "größe"])
def test_address_leads_to_the_socket_in_the_data_folder(tmp_path: Path, name: str) -> None:
    assert parse_url(embedded_url(tmp_path / name))["path"] == str(tmp_path / name / "redis.sock")


def test_path_that_fits_is_not_shortened(short_paths: Path) -> None:
    room = embedded.MAX_SOCKET_PATH_BYTES - len("/redis.sock")
    fits = Path("/" + "d" * (room - 1))
    assert (
        parse_url(embedded_url(fits))["path"] == f"{fits}/redis.sock" and not short_paths.exists()
    )
    too_long = parse_url(embedded_url(Path(f"{fits}d")))["path"]
    assert (
        Path(too_long).parent.parent == short_paths
        and os.readlink(Path(too_long).parent) == f"{fits}d"
    )


def test_path_that_is_no_text_is_reached_by_another_one(short_paths: Path, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    path = parse_url(embedded_url(folder))["path"]
    assert (
        Path(path).parent.parent == short_paths and Path(path).parent.resolve() == folder.resolve()
    )


def test_short_path_is_the_same_each_time_and_another_for_another_folder(
    short_paths: Path, tmp_path: Path
) -> None:
    first, second = tmp_path / ("a" * 120), tmp_path / ("b" * 120)
    assert embedded_url(first) == embedded_url(first) != embedded_url(second)
    assert mode(short_paths) == 0o700 and len(list(short_paths.iterdir())) == 2


def test_short_path_of_a_folder_that_is_gone_is_removed_later(
    short_paths: Path, tmp_path: Path
) -> None:
    gone, new, existing = (tmp_path / (name * 120) for name in "abc")
    existing.mkdir()
    for folder in (gone, new, existing):
        embedded_url(folder)
    for link in short_paths.iterdir():
        if os.readlink(link) != str(new):
            os.utime(link, (1, 1), follow_symlinks=False)
    embedded_url(tmp_path / ("d" * 120))
    assert {os.readlink(link)[-1] for link in short_paths.iterdir()} == set("bcd")


@pytest.mark.parametrize("how", ["open to others", "a link", "a file"])
def test_folder_of_short_paths_that_is_not_this_users_alone_is_refused(
    short_paths: Path, tmp_path: Path, how: str
) -> None:
    if how == "open to others":
        short_paths.mkdir()
        short_paths.chmod(0o755)
    elif how == "a link":
        short_paths.symlink_to(tmp_path)
    else:
        short_paths.write_text("")
    with pytest.raises(ConfigError) as refused:
        embedded_url(tmp_path / ("a" * 120))
    assert refused.value.param == "redis.data_dir" and f"{short_paths}, " in refused.value.message


def test_short_path_that_leads_elsewhere_is_refused(short_paths: Path, tmp_path: Path) -> None:
    folder = tmp_path / ("a" * 120)
    embedded_url(folder)
    (link,) = short_paths.iterdir()
    link.unlink()
    link.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="leads to another folder"):
        embedded_url(folder)


def test_password_is_made_once_and_only_a_plain_file_counts(tmp_path: Path) -> None:
    assert read_password(tmp_path) is None
    password = make_password(tmp_path)
    assert len(password) >= 32 and make_password(tmp_path) == password == read_password(tmp_path)
    assert mode(tmp_path / "password") == 0o600 and [path.name for path in tmp_path.iterdir()] == [
        "password"
    ]
    other = tmp_path / "other"
    other.mkdir()
    (other / "password").symlink_to(tmp_path / "password")
    assert read_password(other) is None, "it could lead to any file of this user"
    with pytest.raises(ConfigError, match="remove it"):
        make_password(other)


def test_folder_and_files_of_an_older_version_are_closed_to_others(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "appendonlydir").mkdir(parents=True)
    files = [
        data / "server.lock",
        data / "dump.rdb",
        data / "appendonlydir" / "appendonly.aof.1.incr.aof",
    ]
    for path in files:
        path.write_text("")
        path.chmod(0o644)
    for path in (data, data / "appendonlydir"):
        path.chmod(0o755)
    secure_data_dir(data)
    assert {mode(path) for path in files} == {0o600} and {
        mode(data),
        mode(data / "appendonlydir"),
    } == {0o700}


def test_folder_with_other_things_keeps_its_mode_and_one_that_others_write_to_is_refused(
    tmp_path: Path,
) -> None:
    """A folder with other files (a home or project folder, or /tmp) keeps its mode, since it must
    not be closed to its users; a folder that others may write to is refused.
    """
    (tmp_path / "notes").write_text("")
    (tmp_path / "notes").chmod(0o644)
    tmp_path.chmod(0o755)
    secure_data_dir(tmp_path)
    assert (mode(tmp_path), mode(tmp_path / "notes")) == (0o755, 0o644)
    for writable in (0o775, 0o1777):
        tmp_path.chmod(writable)
        with pytest.raises(ConfigError, match="other users may write into"):
            secure_data_dir(tmp_path)
        assert mode(tmp_path) == writable


@pytest.mark.parametrize(
    ("content", "closed"),
    [((), True), (("redis", "jobs", "resolved.yaml"), True), (("src",), False)],
)
def test_data_folder_is_closed_where_all_in_it_is_fleets_own(
    tmp_path: Path, content: tuple[str, ...], closed: bool
) -> None:
    folder = tmp_path / "data"
    for name in content:
        (folder / name).mkdir(parents=True)
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)
    assert secure_deployment(load_config(None, (f"data_dir={folder}",))) == folder
    assert mode(folder) == (0o700 if closed else 0o755)
    new = secure_deployment(load_config(None, (f"data_dir={tmp_path / 'new'}",)))
    assert mode(new) == 0o700


def test_each_command_keeps_the_secrets_it_uses_and_all_that_is_none() -> None:
    plain = {
        "PATH": "/bin",
        "HF_HOME": "/h",
        "HF_TOKEN_PATH": "/h/token",
        "TOKENIZERS_PARALLELISM": "false",
        "UCX_IB_PKEY": "1",
        "CUDA_VISIBLE_DEVICES": "0",
        "HTTPS_PROXY": "http://proxy:3128",
        "PWD": "/here",
        "DATABASE_URL": "postgres://db/x",
        "GPG_KEY": "A035",
        "FLEET_CONFIG": "/c",
        "KEY_REPEAT": "1",
    }
    secrets = {
        "HF_TOKEN": "x",
        "OPENAI_API_KEY": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "PGPASSWORD": "x",
        "github_token": "x",
        "APIKEY": "x",
        "GOOGLE_APPLICATION_CREDENTIALS": "x",
        "BROKER_URL": "amqp://u:p@q/",
        "SENTRY_DSN": "https://u:p@s/1",
        "http_proxy": "http://u:p@proxy:3128",
        "MYSQL_PWD": "x",
        "GITHUB_PAT": "x",
        "REDISCLI_AUTH": "x",
    }
    of_fleet = {"FLEET_API_KEY": "k", "REDIS_URL": "redis://:p@h"}
    for used in USES.values():
        assert without_secrets(plain | secrets | of_fleet, used) == plain | {
            name: of_fleet[name] for name in used
        }
    assert all(
        ("FLEET_API_KEY" in used) == (command in ("web", "jobs")) for command, used in USES.items()
    )


def test_data_folder_replaceable_by_other_users_is_refused(tmp_path: Path) -> None:
    check_data_dir(tmp_path)
    tmp_path.chmod(0o777)
    (tmp_path / "resolved.yaml").touch()
    check_data_dir(tmp_path)  # it is closed when it is served
    (tmp_path / "of-others").touch()
    with pytest.raises(ConfigError, match="data_dir: other users can replace the entries of"):
        check_data_dir(tmp_path)
    tmp_path.chmod(0o1777)
    check_data_dir(tmp_path)
