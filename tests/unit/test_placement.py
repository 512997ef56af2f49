"""Devices of a stage's replicas, and the workers' shares of a GPU's memory."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fleet.cli.deployment import open_deployment
from fleet.cli.main import app
from fleet.cli.up import list_processes
from fleet.config import FleetConfig, StageConfig, load_config
from fleet.config.placement import for_role, place_workers
from tests.support import set_options


def settings_of(config: FleetConfig, role: str, replica: int = 1) -> StageConfig:
    """Return the settings with which one worker starts."""
    serves = config.role(role)
    return for_role(config, serves, replica).stage(serves.stage)


def test_replicas_take_the_devices_of_a_list_in_turn() -> None:
    config = load_config(None, ("stages.talker.device=[cuda:2, cuda:3]", "device=cuda:1"))
    assert [settings_of(config, "talker", replica).device for replica in (1, 2, 3, 4)] == [
        "cuda:2",
        "cuda:3",
    ] * 2
    assert [settings_of(config, "thinker", replica).device for replica in (1, 2)] == [
        "cuda:1",
        "cuda:1",
    ]


def test_halves_of_a_stage_have_lists_of_their_own() -> None:
    config = load_config(
        None,
        (
            "stages.thinker.split={prefill: {device: [cuda:0, cuda:1]}, decode: {device: cuda:2}}",
            "device=cuda:3",
        ),
    )
    devices = [settings_of(config, f"thinker.{half}", 2).device for half in ("prefill", "decode")]
    assert devices == ["cuda:1", "cuda:2"]
    assert settings_of(config, "talker").device == "cuda:3"


def test_started_workers_and_standby_ones_have_numbers_of_their_own() -> None:
    devices = "stages.talker.device=[cuda:0, cuda:1]"
    deployment = open_deployment(
        None, ["stages.talker.replicas=2", "stages.talker.standby=1", devices]
    )
    started = [
        each for each in list_processes(deployment, deployment.config) if "worker" in each[1]
    ]
    assert started == [
        ("thinker.1", ["worker", "thinker"]),
        *((f"talker.{n}", ["worker", "talker", "--replica", str(n)]) for n in (1, 2, 3)),
        ("code2wav.1", ["worker", "code2wav"]),
    ]
    placed = [(one.role.name, one.device, one.number) for one in place_workers(deployment.config)]
    assert placed == [
        ("thinker", "auto", 1),
        ("talker", "cuda:0", 2),
        ("talker", "cuda:1", 1),
        ("code2wav", "auto", 1),
    ]


@pytest.mark.parametrize(
    ("overrides", "shares"),
    [
        ((), {"thinker": 0.45, "talker": 0.45}),
        (("stages.thinker.gpu_memory_utilization=0.7",), {"thinker": 0.7, "talker": 0.2}),
        (
            ("stages.code2wav.gpu_memory_utilization=0.1",),
            {"thinker": 0.4, "talker": 0.4, "code2wav": 0.1},
        ),
        (
            ("stages.talker.device=cuda:1", "stages.talker.replicas=2"),
            {"thinker": 0.9, "talker": 0.45},
        ),
        (
            ("stages.talker.device=[cuda, cuda:1]", "stages.talker.standby=1"),
            {"thinker": 0.45, "talker": 0.45},
        ),
        (("stages.talker.device=cpu",), {"thinker": 0.9}),
    ],
    ids=[
        "two stages",
        "one share set",
        "a share without pages",
        "two GPUs",
        "a list over two GPUs",
        "a stage on a CPU",
    ],
)
def test_workers_without_a_share_divide_the_rest_of_their_gpu(
    overrides: tuple[str, ...], shares: dict[str, float]
) -> None:
    config = load_config(None, overrides)
    assert {
        role: settings_of(config, role).gpu_memory_utilization for role in shares
    } == pytest.approx(shares)


def test_each_gpu_is_divided_among_its_own_workers() -> None:
    config = load_config(
        None, ("stages.talker.device=[cuda:0, cuda:1]", "stages.talker.replicas=2")
    )
    shares = [settings_of(config, "talker", replica).gpu_memory_utilization for replica in (1, 2)]
    assert shares == pytest.approx([0.45, 0.9])


def test_halves_have_shares_of_their_own() -> None:
    split = "{prefill: {gpu_memory_utilization: 0.3}, decode: {}}"
    config = load_config(None, (f"stages.thinker.split={split}", "stages.talker.device=cuda:1"))
    shares = [
        settings_of(config, f"thinker.{half}").gpu_memory_utilization
        for half in ("prefill", "decode")
    ]
    assert shares == pytest.approx([0.3, 0.6])


def test_kept_worker_restarts_with_its_number(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept: list[list[str]] = []

    def keep(arguments: list[str], *_others: object) -> int:
        kept.append(arguments)
        return 0

    monkeypatch.setattr("fleet.cli.serve._keep_fenced", keep)
    options = set_options(f"data_dir={tmp_path}", "stages.talker.device=[cuda:0, cuda:1]")
    done = CliRunner().invoke(app, ["worker", "talker", "--keep", "--replica", "2", *options])
    assert done.exit_code == 0, done.output
    assert kept == [["worker", "talker", "--replica", "2", *options]]
