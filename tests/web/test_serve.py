"""The gateway as a process with a real Redis: start without workers, stop, and failures at the
start.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support import REPO, cli_env, free_port, wait_until
from tests.web.conftest import ASK, Loaded

pytestmark = pytest.mark.one_file_in(3, "gateways under load")

PROGRAM = """
import json
import sys
from pathlib import Path
from fleet.config.schema import FleetConfig
from fleet.config.settings import EnvironmentSettings
from web.serve import run
config = FleetConfig.model_validate(json.loads(sys.argv[1]))
settings = EnvironmentSettings(redis_url=None, config_path=None, api_key=None, port=None)
run(config, settings, sys.argv[2], Path(sys.argv[3]))
"""


def start(loaded: Loaded, redis_url: str, port: int) -> subprocess.Popen[str]:
    return start_with(json.dumps({"web": {"port": port, "model_name": "omni"}}), loaded, redis_url)


def start_with(config: str, loaded: Loaded, redis_url: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, config, redis_url, str(loaded.checkpoint)],
        cwd=REPO,
        env=cli_env(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def running(loaded: Loaded, redis_url: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"

    with start(loaded, redis_url, port) as process:
        wait_until(lambda: answers(url), "the gateway to answer", timeout_s=30)
        yield process, url
        process.kill()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def test_readiness_without_workers_names_missing_roles(
    running: tuple[subprocess.Popen[str], str],
) -> None:
    _, url = running
    ready = httpx.get(f"{url}/ready")
    assert ready.status_code == 503 and ready.json()["missing"] == ["thinker", "talker", "code2wav"]
    refused = httpx.post(f"{url}/v1/chat/completions", json=ASK)
    assert refused.status_code == 503 and "thinker" in refused.json()["error"]["message"]
    assert "no worker of thinker accepts tasks" in httpx.get(url).text


def test_sigterm_ends_open_streams_and_exits_with_zero(
    running: tuple[subprocess.Popen[str], str],
) -> None:
    process, url = running
    with httpx.stream("GET", f"{url}/console/events?page=x") as events:
        lines = events.iter_lines()
        assert next(lines) == "id: 1"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0
    output, _ = process.communicate()
    assert "console http://localhost:" in output and "Traceback" not in output


def test_used_port_is_reported_in_one_line(
    loaded: Loaded, running: tuple[subprocess.Popen[str], str]
) -> None:
    _, url = running
    second = start(loaded, "redis://127.0.0.1:1", int(url.rpartition(":")[2]))
    output, _ = second.communicate(timeout=30)
    assert second.returncode == 1 and len(output.splitlines()) == 1
    assert "Address already in use" in output and "web.port" in output


def test_checkpoint_without_tokenizer_is_reported_in_one_line(
    loaded: Loaded, redis_url: str, tmp_path: Path
) -> None:
    empty = Loaded(checkpoint=tmp_path, config=loaded.config, frontend=loaded.frontend)
    process = start(empty, redis_url, 0)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 1 and len(output.splitlines()) == 1 and "tokenizer.json" in output
