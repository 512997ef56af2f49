"""The commands in README and reference pages work as written. A command is run, or only parsed if
it takes hours, root or a cluster.

`CHECKS` has a row for every command; a command without a row fails.
"""

import importlib.util
import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy
import pytest
import soundfile
from typer.testing import CliRunner

from fleet.cli.deployment import open_deployment
from fleet.cli.main import app
from fleet.config.settings import read_settings
from fleet.lab.measure.options import parse as parse_bench
from tests.support import REPO
from tests.web.conftest import Loaded, ServedGateway, bounded, serving

DOCUMENTS = (
    REPO / "README.md",
    *sorted((REPO / "fleet").glob("*.md")),
    *sorted((REPO / "fleet" / "docs").glob("*.md")),
    REPO / "fleet" / "checkpoints" / "pocket" / "README.md",
    REPO / "deploy" / "README.md",
)
LOCAL = "http://localhost:8000"
PROGRAMS = (
    "fleet|honcho|pip|curl|python3?|pytest|docker|uv|openssl|sudo|systemctl|systemd-analyze"
    "|kubectl|useradd|install|export"
)
FLAGS = (
    "--all --barge-in --check --engines --gpu --interference --keep --links --offline --once "
    "--precisions --read-only --small --span-hops "
    "--spans --speculation --too-large --training --transfer --twin --up --yes"
).split()
"""Options that take no value. After any other option, `--help` would be taken as its value, and the
command would run.
"""
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(rf"`((?:{PROGRAMS}) [^`\n]+|\./check[^`\n]*)`")


class DocumentedCommand(NamedTuple):
    """A command line as a document shows it, without comments."""

    document: str
    line: str

    @property
    def args(self) -> list[str]:
        return shlex.split(self.line)

    def __str__(self) -> str:
        return f"{self.document}: {self.line}"


class Check(NamedTuple):
    """Rule that checks the commands matching `pattern`. `run_by`: test files that run such commands
    with real processes.
    """

    pattern: str
    check: Callable[[DocumentedCommand, ServedGateway, Path], None]
    run_by: tuple[str, ...] = ()


def shell_commands(block: str) -> Iterator[str]:
    """Yield the commands of a shell block: lines are joined where a quote is open or a backslash
    ends them, and split at &&.
    """
    lines: list[str] = []
    for line in block.splitlines():
        lines.append(line)
        text = "\n".join(lines)
        try:
            tokens = shlex.split(text, comments=True)
        except ValueError:
            continue
        if text.endswith("\\"):
            continue
        lines.clear()
        if tokens:
            bare = text if "\n" in text else re.sub(r"\s+#.*$", "", text)
            yield from (part.strip() for part in bare.split(" && "))
    assert not lines, f"an open quote in {lines}"


@cache
def commands() -> tuple[DocumentedCommand, ...]:
    found: dict[str, DocumentedCommand] = {}
    for path in DOCUMENTS:
        text, name = path.read_text(), path.relative_to(REPO).as_posix()
        for language, block in FENCE.findall(text):
            if language == "sh":
                found |= {line: DocumentedCommand(name, line) for line in shell_commands(block)}
        found |= {line: DocumentedCommand(name, line) for line in SPAN.findall(FENCE.sub("", text))}
    return tuple(found.values())


def programs() -> list[tuple[str, str]]:
    return [
        (path.relative_to(REPO).as_posix(), block)
        for path in DOCUMENTS
        for language, block in FENCE.findall(path.read_text())
        if language == "python"
    ]


def run_in_process(command: DocumentedCommand, _gateway: ServedGateway, _folder: Path) -> None:
    done = CliRunner().invoke(app, command.args[1:])
    assert done.exit_code == 0, done.output


def parse_fleet(command: DocumentedCommand, _gateway: ServedGateway, _folder: Path) -> None:
    """Parse the command's options, and check the configuration file that it names."""
    args = command.args[1:]
    assert not args[-1].startswith("--") or args[-1] in FLAGS
    if args[0] == "bench":
        assert parse_bench(args[1:])
        return
    done = CliRunner().invoke(app, [*args, "--help"])
    assert done.exit_code == 0, done.output
    values = {
        name: [args[at + 1] for at, arg in enumerate(args) if arg == name]
        for name in ("--config", "--set")
    }
    config = Path(values["--config"][0]) if values["--config"] else None
    if config is None or not config.parts[0] == ".fleet":
        open_deployment(config, values["--set"])


def run_curl(command: DocumentedCommand, gateway: ServedGateway, folder: Path) -> None:
    assert LOCAL in command.line
    line = command.line.replace(LOCAL, gateway.url).replace(
        "curl ", "curl -sS --fail-with-body ", 1
    )
    done = subprocess.run(
        ["bash", "-ec", line], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def run_shell(command: DocumentedCommand, _gateway: ServedGateway, folder: Path) -> None:
    subprocess.run(
        ["bash", "-ec", command.line], cwd=folder, check=True, capture_output=True, timeout=60
    )


def parse_shell(command: DocumentedCommand, _gateway: ServedGateway, _folder: Path) -> None:
    """Check the command's syntax, and that the repository files it names exist."""
    subprocess.run(["bash", "-n", "-c", command.line], check=True, capture_output=True)
    named = re.findall(r"(?<![\w/.-])(?:deploy|configs|tests|fleet|\.)/[\w./-]+", command.line)
    missing = [
        path
        for path in named
        if not (REPO / path).exists() and path not in ("deploy/.env", "./.venv/bin/activate")
    ]
    assert missing == []


def install(command: DocumentedCommand, _gateway: ServedGateway, _folder: Path) -> None:
    """Compare a `pip install` with pyproject.toml: it installs an extra of Fleet, or a dependency
    in the pinned version.
    """
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    wanted = next(arg for arg in command.args[2:] if not arg.startswith("-"))
    if wanted.startswith("."):
        extra = re.fullmatch(r"\.(?:\[(\w+)\])?", wanted)
        assert extra is not None and (
            extra[1] is None or extra[1] in project["optional-dependencies"]
        )
    elif "==" in wanted:
        assert wanted in project["dependencies"]
    else:
        assert wanted == "uv" or importlib.util.find_spec(wanted) is not None


def start_procfile(_command: DocumentedCommand, gateway: ServedGateway, folder: Path) -> None:
    """Parse each command of the Procfile instead of starting it."""
    for line in (REPO / "Procfile").read_text().splitlines():
        parse_fleet(DocumentedCommand("Procfile", line.partition(": ")[2]), gateway, folder)


def read_environment(command: DocumentedCommand, _gateway: ServedGateway, folder: Path) -> None:
    printed = subprocess.run(
        ["bash", "-ec", f"{command.line}; env -0"],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    variables = dict(entry.split("=", 1) for entry in printed.split("\0") if "=" in entry)
    read_settings(
        {name: value for name, value in variables.items() if name in ("REDIS_URL", "FLEET_API_KEY")}
    )


def find_module(command: DocumentedCommand, _gateway: ServedGateway, _folder: Path) -> None:
    assert importlib.util.find_spec(command.args[2]) is not None


CHECKS = (
    Check(r"fleet( [\w-]+)* --help|fleet config .*", run_in_process),
    Check(
        r"(?s)fleet (up|scale|status|redis|jobs|dead-letters) ?.*",
        parse_fleet,
        ("tests/e2e/test_up.py", "tests/e2e/test_cli.py"),
    ),
    Check(r"fleet (worker|conductor|web) ?.*", parse_fleet, ("tests/e2e/test_supervision.py",)),
    Check(r"fleet pocket|fleet (chaos|bench) ?.*", parse_fleet, ("tests/e2e/test_chaos.py",)),
    Check(r"fleet pocket (demo|train|steps|eval) ?.*", parse_fleet, ("tests/e2e/test_pocket.py",)),
    Check(r"fleet cert ?.*", parse_fleet, ("tests/web/test_tls.py",)),
    Check(r"fleet doctor ?.*", parse_fleet, ("tests/e2e/test_doctor.py",)),
    Check(r"fleet spans plan ?.*", parse_fleet, ("tests/unit/test_spans_plan_command.py",)),
    Check(r"fleet keys ?.*", parse_fleet, ("tests/unit/test_api_keys.py",)),
    Check(r"fleet draft ?.*", parse_fleet, ("tests/e2e/test_speculation.py",)),
    Check(r"fleet models ?.*", parse_fleet, ("tests/e2e/test_models_command.py",)),
    Check(r"fleet train ?.*", parse_fleet, ("tests/e2e/test_training.py",)),
    Check(r"fleet batch .*", parse_fleet, ("tests/e2e/test_batches.py",)),
    Check(r"fleet session ?.*", parse_fleet, ("tests/oracle/test_span_sessions.py",)),
    Check(r"honcho start", start_procfile),
    # The graph of this file's gateway gives no times; another file sends the request.
    Check(
        r"(?s)curl .*timestamp_granularities.*",
        parse_shell,
        ("tests/web/test_timed_transcription.py",),
    ),
    Check(r"(?s)curl .*", run_curl),
    Check(r"pip install .*", install),
    Check(
        r"python3 -m venv \.venv|\. \.venv/bin/activate|\./check( [\w/.-]+( -k \w+)?)?", parse_shell
    ),
    Check(r"python -m tests\.[\w.]+ .*", find_module),
    Check(r"python -m web\.fields_page .*", find_module, ("tests/web/test_field_types.py",)),
    Check(r"pytest .*", parse_shell, ("tests/e2e/test_attack.py",)),
    Check(r"python -m pytest .*", parse_shell),
    Check(r"bash tests/vllm/run\.sh", parse_shell),
    Check(r"openssl rand .*", run_shell),
    Check(r"openssl (req|x509) .*", parse_shell, ("tests/e2e/test_deployed_redis.py",)),
    Check(r"export .*", read_environment),
    # These need root, a container engine, a cluster or a package index.
    Check(
        r"(useradd|install|systemctl|sudo|systemd-analyze|docker|kubectl|uv|/opt/\S+|python3 -m "
        r"venv /opt/\S+) ?.*",
        parse_shell,
    ),
    Check(r"\(umask 077; .*\)", parse_shell),
)


@pytest.fixture(scope="module")
def pocket(loaded: Loaded) -> Iterator[ServedGateway]:
    with serving(bounded(loaded, model_name="pocket")) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for files of the commands, with an audio file for commands that read one."""
    folder = tmp_path_factory.mktemp("commands")
    soundfile.write(folder / "speech.mp3", numpy.zeros(24_000, numpy.float32), 24_000, format="WAV")
    return folder


@pytest.mark.parametrize("command", commands(), ids=str)
def test_documented_command_works(
    command: DocumentedCommand, pocket: ServedGateway, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPO)
    for name in ("REDIS_URL", "FLEET_CONFIG", "FLEET_PORT", "FLEET_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    check = next((row for row in CHECKS if re.fullmatch(row.pattern, command.line)), None)
    assert check is not None, f"{command}: add a row to CHECKS"
    assert [path for path in check.run_by if not (REPO / path).is_file()] == []
    check.check(command, pocket, folder)


@pytest.mark.parametrize(("document", "program"), programs(), ids=[name for name, _ in programs()])
def test_documented_program_runs(
    document: str,
    program: str,
    pocket: ServedGateway,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(program.replace(LOCAL, pocket.url), document, "exec"), {})
    assert all(os.path.getsize(path) for path in os.listdir())


def test_every_check_is_used() -> None:
    assert [
        row.pattern
        for row in CHECKS
        if not any(re.fullmatch(row.pattern, command.line) for command in commands())
    ] == []
