"""Choice of a worker's device, and the device monitor's numbers: CPU use, and what a GPU's driver
reports.
"""

import importlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from fleet.config import load_config
from fleet.core.errors import ConfigError
from fleet.core.ids import StageName
from fleet.engine.torch.build import open_device
from fleet.stages.builders import build_options
from fleet.worker.main import run_worker
from fleet.worker.process.device import DeviceMonitor
from tests.support import wait_until

REFUSED = cast("type[Exception]", importlib.import_module("pynvml").NVMLError)


def test_monitor_without_gpu_reports_cpu_only() -> None:
    for device in ("cpu", "fake", ""):
        vitals = DeviceMonitor(device).read()
        assert list(vitals) == ["cpu_percent"] and int(vitals["cpu_percent"]) >= 0


def gpu_monitor(monkeypatch: pytest.MonkeyPatch, **answers: object) -> DeviceMonitor:
    """Return the monitor of a GPU as torch sees it; `answers`: values that its driver returns."""

    def answering(answer: object) -> Callable[[int], object]:
        def call(index: int) -> object:
            assert index == 1
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call

    answers = {
        "get_device_properties": SimpleNamespace(name="a GPU", total_memory=100),
        "memory_reserved": 30,
        **answers,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answering(answer))
    return DeviceMonitor("cuda:1")


@pytest.mark.parametrize(
    ("utilization", "reported"),
    [(88, {"gpu_percent": 88}), (REFUSED(3), {})],
    ids=["whole GPU", "MIG slice without utilisation"],
)
def test_monitor_on_gpu_reports_memory_and_utilisation(
    monkeypatch: pytest.MonkeyPatch, utilization: object, reported: dict[str, int]
) -> None:
    monitor = gpu_monitor(monkeypatch, device_memory_used=70, utilization=utilization)
    vitals = wait_until(
        lambda: monitor.read() if "gpu" in monitor.read() else None, "the driver's answer"
    )
    monitor.close()
    assert vitals is not None and {
        name: value for name, value in vitals.items() if name != "cpu_percent"
    } == {
        "gpu": "a GPU",
        "gpu_total_bytes": 100,
        "gpu_used_bytes": 70,
        "gpu_own_bytes": 30,
        **reported,
    }


def test_monitor_survives_failing_driver(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monitor = gpu_monitor(monkeypatch, device_memory_used=RuntimeError("no driver"), utilization=1)
    wait_until(lambda: "no driver" in caplog.text, "the reason to be logged")
    assert list(monitor.read()) == ["cpu_percent"]


@pytest.mark.parametrize(
    ("numerics", "device", "dtype"), [("fast", "cuda", "bfloat16"), ("invariant", "cpu", "float32")]
)
def test_auto_device_supports_the_numerics(
    numerics: str, device: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options = build_options(
        load_config(None, (f"numerics={numerics}",)), StageName("thinker"), Path()
    )
    assert (options.device, options.dtype) == (device, dtype)


def test_invariant_stage_on_a_gpu_computes_in_bfloat16_without_drafts() -> None:
    config = load_config(None, ("numerics=invariant", "device=cuda"))
    for stage in config.graph_declaration().stages:
        options = build_options(config, stage.name, Path(), is_here=False)
        assert (options.device, options.dtype) == ("cuda", "bfloat16")
        assert options.speculation is None


@pytest.mark.parametrize(
    ("stage", "change", "field"),
    [("lm", {"device": "cuda"}, "device"), ("lm", {"dtype": "bfloat16"}, "dtype")],
)
def test_worker_refuses_what_is_not_invariant(
    stage: str, change: dict[str, str], field: str
) -> None:
    config = load_config(None, ("graph=text", "numerics=invariant")).model_copy(update=change)
    with pytest.raises(ConfigError, match=f"stages.{stage}.{field}: numerics: invariant"):
        build_options(config, StageName(stage), Path(), is_here=False)


@pytest.mark.parametrize("capability", [(7, 5), (9, 0)])
def test_invariant_numerics_need_a_gpu_that_multiplies_bfloat16(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    opening = partial(open_device, device="cuda", dtype="bfloat16", numerics="invariant", threads=1)
    if capability == (7, 5):
        with pytest.raises(ConfigError, match=r"compute capability 8.0, and cuda has 7.5"):
            opening()
    else:
        assert opening().needs_kernels and torch.backends.cudnn.deterministic


@pytest.mark.parametrize(
    ("role", "given", "found"),
    [("code2wav", "", "1"), ("talker", "", None), ("code2wav", "0", "0")],
)
def test_code2wav_gives_way_on_a_shared_gpu(
    role: str, given: str, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "CUDA_MPS_CLIENT_PRIORITY"
    environment = {name: given} if given else dict[str, str]()
    monkeypatch.setattr(os, "environ", environment)
    with pytest.raises(ConfigError):
        run_worker(load_config(None, ("device=cpu",)), role, "", Path("missing"))
    assert environment.get(name) == found
