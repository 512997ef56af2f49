"""Texts that are no valid deployment: YAML files, `--set` options and environment variables."""

from pathlib import Path

import pytest

from fleet.config import load_config
from fleet.config.settings import read_settings
from fleet.core.errors import ConfigError
from tests.unit.bad_config import MISSING_STAGE, Case, refusal_of

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{below}'] * 10)}]\n"
    for below, name in ("ab", "bc", "cd", "de", "ef", "fg", "gh", "hi")
)

YAML: tuple[Case, ...] = (
    ("nothing", "", "is empty; write {} into it to use all defaults"),
    ("comments alone", "# graph: text\n", "is empty; write {} into it to use all defaults"),
    ("a list", "- graph\n", "must be a mapping of keys to values, not a list"),
    ("a word", "graph", "must be a mapping of keys to values, not a single value"),
    (
        "a key twice",
        "web:\n  port: 1\n  host: h\n  port: 2",
        "web.port: given twice (lines 2 and 4); keep one",
    ),
    ("a key twice in a line", "web: {port: 1, port: 1}", "web.port: given twice; keep one"),
    ("a tab", "web:\n\tport: 1", "not valid YAML (line 2): a tab; indent with spaces"),
    (
        "an unfinished list",
        "graph: [",
        "not valid YAML (line 1): expected the node content, but found '<stream end>'",
    ),
    (
        "two documents",
        "graph: text\n---\ngraph: text\n",
        "not valid YAML (line 2): expected a single document in the stream, but found another "
        "document; keep one",
    ),
    (
        "a character that YAML has not",
        "graph: a\0b",
        "not valid YAML: the character '\\x00' is not allowed; remove it",
    ),
    (
        "a date that is none",
        "checkpoint: 2024-13-45",
        "not valid YAML (line 1): '2024-13-45' is no date and no number; put it in quotes",
    ),
    (
        "a key that is no text",
        "on: 1",
        "not valid YAML (line 1): 'on' as a key is not text; put it in quotes",
    ),
    (
        "a list as a key",
        "? [a]\n: 1",
        "not valid YAML (line 1): a list or a section as a key is not text; put it in quotes",
    ),
    (
        "an alias of nothing",
        "graph: *gone",
        "not valid YAML (line 1): found undefined alias 'gone'",
    ),
    (
        "an object",
        "graph: !!python/object:os.system x",
        "not valid YAML (line 1): could not determine a constructor for the tag "
        "'tag:yaml.org,2002:python/object:os.system'",
    ),
    (
        "aliases of aliases",
        BOMB,
        "not valid YAML: its aliases expand to more than 10000 values; write the values out",
    ),
    (
        "an alias of itself",
        "web: &a {port: *a}",
        "not valid YAML (line 1): an alias refers to a section that contains it; write the "
        "values out",
    ),
    (
        "brackets without end",
        "[" * 100,
        "not valid YAML (line 1): sections are nested more than 16 deep; a deployment has four "
        "levels",
    ),
)


@pytest.mark.parametrize(
    ("text", "message"), [case[1:] for case in YAML], ids=[name for name, _, _ in YAML]
)
def test_invalid_yaml_is_refused_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    assert refusal_of(tmp_path, text).message == f"x.yaml: {message}"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"graph: text\ncheckpoint: \xff\n", "x.yaml: is not UTF-8 (line 2); save it as UTF-8"),
        ("graph: text".encode("utf-16"), "x.yaml: is not UTF-8 (line 1); save it as UTF-8"),
        (
            b"#" * 2_000_000,
            "x.yaml: is larger than 1048576 bytes, which no deployment file is; check --config "
            "and FLEET_CONFIG",
        ),
    ],
    ids=["bytes of another encoding", "UTF-16", "a file of another kind"],
)
def test_bytes_that_are_not_a_configuration_are_refused(
    raw: bytes, message: str, tmp_path: Path
) -> None:
    assert refusal_of(tmp_path, raw).message == message


def test_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(b"\xef\xbb\xbfgraph: text\n")
    assert load_config(tmp_path / "x.yaml").graph == "text"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("web.port", "--set 'web.port': write KEY=VALUE, such as --set web.port=8001"),
        ("=1", "--set '=1': write KEY=VALUE, such as --set web.port=8001"),
        (
            "web..port=1",
            "--set 'web..port=1': a part of the key is empty; write KEY as in web.port",
        ),
        ("web.=1", "--set 'web.=1': a part of the key is empty; write KEY as in web.port"),
        (
            "web.port=[",
            "--set web.port: '[' is not a YAML value: expected the node content, but found "
            "'<stream end>'",
        ),
        (
            "web.port=",
            "--set web.port: must be a port from 1 to 65535, or 0 for a free one (got '')",
        ),
        ("web.prot=1", "--set web.prot: unknown key; did you mean web.port?"),
        (
            "retention_s.x=1",
            "--set 'retention_s.x=1': retention_s is a value, not a section; set retention_s "
            "itself",
        ),
        (
            "stages.talker={replicas: 0}",
            "--set stages.talker.replicas: must be a whole number from 1 to 256 (got 0)",
        ),
        (
            "web={port: 1, port: 2}",
            "--set web.port: '{port: 1, port: 2}' is not a YAML value: given twice; keep one",
        ),
        (
            "redis.port=8000",
            "--set redis.port: 8000 is also web.port; choose another port for one of them",
        ),
        (
            "web.port=6399",
            "x.yaml: redis.port: 6399 is also web.port; choose another port for one of them",
        ),
        ("stages.vocoder.replicas=1", f"--set stages.vocoder: {MISSING_STAGE}"),
        (
            "lease.worker_ttl_s=1e3",
            "--set lease.worker_ttl_s: must be a number from 0.1 to 3600 (got '1e3')",
        ),
    ],
)
def test_invalid_override_is_refused_in_one_line(
    override: str, message: str, tmp_path: Path
) -> None:
    text = "retention_s: 60\nredis: {port: 6399}\n"
    assert refusal_of(tmp_path, text, override).message == message


def test_override_sets_a_key_of_an_empty_section(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("web:\n")
    assert load_config(path, ("web.port=8001",)).web.port == 8001


NO_SCHEME = (
    "it begins with neither redis:// nor rediss:// nor redis+sentinel:// nor "
    "redis+cluster:// nor unix://"
)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        (
            "elsewhere:6379",
            NO_SCHEME,
        ),
        (
            "http://:secret@elsewhere",
            NO_SCHEME,
        ),
        ("redis://", "it names no host"),
        ("redis://:secret@:6379", "it names no host"),
        ("redis://elsewhere:port", "its port is not a number from 1 to 65535"),
        ("redis://elsewhere:70000", "its port is not a number from 1 to 65535"),
        ("redis://elsewhere:0", "its port is not a number from 1 to 65535"),
        ("redis://elsewhere:6379/fleet", "the part after the port is not a database number"),
        ("redis+cluster://elsewhere:6379,elsewhere/1", "a cluster has only database 0"),
        ("unix://", "it names no socket"),
    ],
)
def test_invalid_redis_address_is_explained_without_its_password(url: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings({"REDIS_URL": url})
    assert (
        caught.value.message == f"REDIS_URL: not a Redis address ({why}); write redis://HOST:PORT"
    )


@pytest.mark.parametrize(
    "url",
    [
        "redis://h",
        "redis://:p@h:6379/3",
        "rediss://[::1]:1/",
        "redis+cluster://h,i:1/0",
        "unix:///run/redis.sock?db=1",
    ],
)
def test_valid_redis_address_is_used_unchanged(url: str) -> None:
    assert read_settings({"REDIS_URL": url}).redis_url == url


@pytest.mark.parametrize("port", ["eighty", "65536", "-1", "80.5", " 80", "²"])
def test_invalid_port_in_the_environment_is_refused(port: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings({"FLEET_PORT": port})
    assert (
        caught.value.message
        == f"FLEET_PORT: {port!r} is not a port; use a number from 1 to 65535, or 0 for a free one"
    )
