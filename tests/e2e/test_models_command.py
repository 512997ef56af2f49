"""`fleet models` as processes: consent, a killed download, two at the same time, and what
`fleet up` says meanwhile.
"""

import re
import signal
from pathlib import Path

import pytest

from tests.hub_server import serving_hub, small_model
from tests.support import run_cli, set_options, start_cli, wait_until

WEIGHTS = "model.safetensors"
pytestmark = pytest.mark.one_file_in(10, "processes")


def test_models_command_asks_continues_after_a_kill_and_downloads_once(tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    deployment = set_options("graph=text", "checkpoint=some/model", f"hub_cache={folder}")
    with serving_hub() as hub:
        commit = hub.publish("some/model", small_model())
        env = {"HF_ENDPOINT": hub.url, "HF_TOKEN_PATH": "/nowhere", "HF_HOME": str(tmp_path)}
        refused = run_cli("models", "fetch", *deployment, cwd=tmp_path, env=env)
        assert refused.returncode == 1 and refused.stderr.splitlines() == [
            "fleet: --yes: there is no terminal to ask at whether to download; add --yes"
        ]
        assert f"some/model  licence mit, commit {commit}" in refused.stdout
        assert re.search(r"262kB  model\.safetensors\n", refused.stdout)
        assert re.search(rf"263kB in all, 263kB to download, into {folder}\n", refused.stdout)
        assert hub.sent == [] and not folder.exists()

        hub.hold_after[WEIGHTS] = 100_000
        command = ("models", "fetch", "--yes", *deployment)
        with start_cli(*command, cwd=tmp_path, env=env) as first:
            wait_until(
                lambda: any(part.stat().st_size > 90_000 for part in folder.rglob("*.incomplete")),
                "a part of the weights to be on disk",
            )
            first.stop(signal.SIGKILL)
        missing = run_cli("up", *deployment, cwd=tmp_path, env=env)
        assert missing.returncode == 1 and "\n" not in missing.stderr.strip()
        assert "some/model is not in" in missing.stderr
        assert "run `fleet models fetch --config FILE`" in missing.stderr

        with (
            start_cli(*command, cwd=tmp_path, env=env) as second,
            start_cli(*command, cwd=tmp_path, env=env) as third,
        ):
            for running in (second, third):
                running.wait_for("kB to download")
            hub.release.set()
            for running in (second, third):
                assert running.process.wait(timeout=30) == 0
                running.wait_for(
                    rf"some/model: 100% 263k of 263k, \S+B/s, \S+ left\n"
                    rf"fleet: some/model is complete: {folder}/.*/{commit}\n$",
                    timeout_s=5,
                )
        assert [start > 90_000 for start in hub.starts_of(WEIGHTS)] == [False, True]

    listed = run_cli("models", "list", *deployment, cwd=tmp_path, env=env)
    assert listed.stdout == (
        f"checkpoint: some/model\n  complete: {folder}/models--some--model/snapshots/{commit}\n"
    )
