"""A standby with real processes: the only worker of a stage is killed, and the answer resumes without a load."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import psutil
import pytest
from typer.testing import CliRunner

from fleet.cli.main import app
from fleet.config import load_config
from fleet.control import keys
from fleet.control.client import FleetClient
from fleet.control.connect import connect, text
from fleet.control.embedded import embedded_url
from fleet.core.ids import EdgeName, WorkerId, place_of
from fleet.graphs import DEFAULT_GRAPH, GRAPHS
from tests.harness import answer, answer_disturbed, assert_same, fake_spec_of, in_step
from tests.support import Running, run_cli, start_cli, wait_until

GRAPH = GRAPHS[DEFAULT_GRAPH]
STAGE = GRAPH.stages[1].name
START_S, PATIENCE_S = 90.0, 60.0
SETTINGS = (
    "engine=fake", "device=cpu", "transfer.kind=redis", "web.port=0", "lease.worker_ttl_s=3600",
    f"stages.{STAGE}.standby=1", *in_step(GRAPH),
)  # fmt: skip
NUM_TOKENS = 40


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Running]:
    with start_cli("up", *(word for setting in SETTINGS for word in ("--set", setting)), cwd=tmp_path) as running:
        running.wait_for(r"fleet: ready at http://\S+\n", timeout_s=START_S)
        running.wait_for(rf"worker {STAGE}@\S+ stands by\n", timeout_s=START_S)
        yield running


def shown(folder: Path) -> tuple[set[str], set[str]]:
    """Return (active, standby) workers of the stage, as `fleet status` reports them."""
    env = {"FLEET_CONFIG": str(folder / ".fleet" / "resolved.yaml")}
    seen = json.loads(run_cli("status", "--json", cwd=folder, env=env).stdout)
    of_stage = [worker for worker in seen["workers"] if worker["role"] == STAGE]
    by_standby = ({worker["id"] for worker in of_stage if worker["standby"] is standby} for standby in (False, True))
    return cast("tuple[set[str], set[str]]", tuple(by_standby))


async def test_standby_replaces_a_killed_worker_and_the_restarted_one_stands_by(fleet: Running, tmp_path: Path) -> None:
    (first,), (second,) = shown(tmp_path)
    config = load_config(tmp_path / ".fleet" / "resolved.yaml")
    url = embedded_url(config.redis_data_dir)
    client, control = await FleetClient.connect(url, config), connect(url)
    await client.start()
    owners: list[str] = []
    try:
        expected = await answer(client, fake_spec_of(config, num_tokens=NUM_TOKENS))
        spec = fake_spec_of(config, num_tokens=NUM_TOKENS)

        def owner() -> str:
            return text(control.hget(keys.task(spec.id, STAGE), "owner"))

        def kill(edge: EdgeName, index: int) -> None:
            if (edge, index) == (GRAPH.edges[0].name, 8):
                owners.append(owner())
                psutil.Process(place_of(WorkerId(owners[0]))[1]).kill()
                wait_until(lambda: owner() not in ("", owners[0]), "another owner", PATIENCE_S)
                owners.append(owner())

        assert_same(await answer_disturbed(client, spec, None, kill), expected)
    finally:
        await client.stop()
        control.close()
    assert owners == [first, second], "the standby was loaded, and had no task before"
    fleet.wait_for(rf"worker {STAGE}@\S+ stands by\n(?:.*\n)*.*worker {STAGE}@\S+ stands by\n", timeout_s=START_S)
    serving, (waiting,) = shown(tmp_path)
    assert serving == {second} and waiting not in (first, second)
    assert fleet.stop(timeout_s=30) == 0


def test_up_help_mentions_standby() -> None:
    done = CliRunner().invoke(app, ["up", "--help"], env={"COLUMNS": "140"})
    assert done.exit_code == 0 and "standby" in done.output
