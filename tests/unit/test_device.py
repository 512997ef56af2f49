"""What device a worker takes, and what it says of it: its own CPU anywhere; of a GPU what the driver says, else nothing."""

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from fleet.config import load_config
from fleet.core.ids import StageName
from fleet.worker.device import DeviceMonitor
from fleet.worker.main import build_options
from tests.support import wait_until

REFUSED = cast("type[Exception]", importlib.import_module("pynvml").NVMLError)


def test_a_worker_without_a_gpu_tells_its_cpu_alone() -> None:
    for device in ("cpu", "fake", ""):
        told = DeviceMonitor(device).read()
        assert list(told) == ["cpu_percent"] and int(told["cpu_percent"]) >= 0


def gpu(monkeypatch: pytest.MonkeyPatch, **answers: object) -> None:
    """A GPU that torch reaches, and its driver's answers."""

    def says(name: str) -> object:
        def call(index: int) -> object:
            assert index == 1
            answer = answers[name]
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call

    for name in answers:
        monkeypatch.setattr(torch.cuda, name, says(name))


def test_a_worker_on_a_gpu_tells_its_memory_and_how_busy_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    about = SimpleNamespace(name="a GPU", total_memory=100)
    gpu(monkeypatch, get_device_properties=about, device_memory_used=70, memory_reserved=30, utilization=88)
    gauge = DeviceMonitor("cuda:1")
    told = wait_until(lambda: gauge.read() if "gpu" in gauge.read() else None, "the driver's answer")
    gauge.close()
    assert told is not None and {name: value for name, value in told.items() if name != "cpu_percent"} == {
        "gpu": "a GPU", "gpu_total_bytes": 100, "gpu_used_bytes": 70, "gpu_own_bytes": 30, "gpu_percent": 88,
    }  # fmt: skip


def test_a_slice_of_a_gpu_has_no_number_for_how_busy_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    about = SimpleNamespace(name="a slice", total_memory=100)
    gpu(monkeypatch, get_device_properties=about, device_memory_used=7, memory_reserved=3, utilization=REFUSED(3))
    gauge = DeviceMonitor("cuda:1")
    told = wait_until(lambda: gauge.read() if "gpu" in gauge.read() else None, "the driver's answer")
    gauge.close()
    assert told is not None and "gpu_percent" not in told


def test_a_driver_that_cannot_be_asked_harms_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    about = SimpleNamespace(name="a GPU", total_memory=100)
    gpu(monkeypatch, get_device_properties=about, device_memory_used=RuntimeError("no driver"), memory_reserved=3, utilization=1)
    gauge = DeviceMonitor("cuda:1")
    wait_until(lambda: "no driver" in caplog.text, "the reason to be logged")
    assert list(gauge.read()) == ["cpu_percent"]


@pytest.mark.parametrize(("numerics", "device", "dtype"), [("fast", "cuda", "bfloat16"), ("invariant", "cpu", "float32")])
def test_auto_is_a_device_on_which_the_numerics_run(
    numerics: str, device: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options = build_options(load_config(None, (f"numerics={numerics}",)), StageName("thinker"), Path())
    assert (options.device, options.dtype) == (device, dtype)
