"""Reading of weights directly into place, without a second copy in memory."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fleet.core.errors import ConfigError
from fleet.models import checkpoint
from fleet.models.checkpoint import CheckpointReader
from fleet.worker.process.load_progress import LoadProgress

KIB = 1024
NUM_WEIGHTS, WEIGHT_BYTES, LIMIT_BYTES = 32, 512 * KIB, 2048 * KIB


def reader(folder: Path) -> CheckpointReader:
    return CheckpointReader(folder, device=torch.device("cpu"), dtype=torch.float32)


def resident_bytes(file: Path) -> int:
    """Return the bytes of a mapped file that count as this process's resident memory."""
    total, here = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            here = line.endswith(str(file))
        elif here and line.startswith("Rss:"):
            total += int(line.split()[1]) * KIB
    return total


def test_weights_are_copied_out_of_their_file_which_does_not_stay_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.safetensors"
    written = {
        f"expert.{n}": torch.full((WEIGHT_BYTES // 4,), float(n)) for n in range(NUM_WEIGHTS)
    }
    save_file(written, file)
    monkeypatch.setattr(checkpoint, "MAX_MAPPED_BYTES", LIMIT_BYTES)
    weights = reader(tmp_path)
    resident: list[int] = []
    out = weights.empty((NUM_WEIGHTS, WEIGHT_BYTES // 4))
    for number, place in enumerate(out):
        weights.read_into(place, f"expert.{number}")
        resident.append(resident_bytes(file))
    assert torch.equal(out, torch.stack(list(written.values())))
    # the last weight, and pages that the kernel read ahead
    assert 0 < max(resident) <= LIMIT_BYTES + 3 * WEIGHT_BYTES
    assert weights.names == list(written)


def test_joined_and_stacked_weights_equal_those_read_one_by_one(tmp_path: Path) -> None:
    written = {
        "q": torch.randn(4, 3).half(),
        "k": torch.randn(2, 3).half(),
        "v": torch.randn(2, 3).half(),
    }
    save_file(written, tmp_path / "model.safetensors")
    weights = reader(tmp_path)
    assert torch.equal(weights.joined(["q", "k", "v"]), torch.cat(list(written.values())).float())
    assert torch.equal(
        weights.stacked(["k", "v"]), torch.stack([written["k"], written["v"]]).float()
    )


def test_progress_is_the_share_of_the_expected_weights(tmp_path: Path) -> None:
    save_file(
        {"a": torch.zeros(4, 3), "b": torch.zeros(4), "other": torch.zeros(100)},
        tmp_path / "model.safetensors",
    )
    weights, shares = reader(tmp_path), list[float]()
    weights.report_to(shares.append, ["a", "b"])
    weights.get("a")
    weights.get("b")
    assert shares == [0.75, 1.0]


def test_loading_is_logged_at_most_every_few_seconds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    time_s, passed = 0.0, list[float]()
    progress = LoadProgress("thinker", passed.append, clock=lambda: time_s)
    for percent in range(0, 100, 5):
        time_s += 1.0
        progress(percent / 100)
    assert caplog.messages == [
        "loading thinker: 25 % of its weights after 5 s",
        "loading thinker: 50 % of its weights after 10 s",
        "loading thinker: 75 % of its weights after 15 s",
    ]
    assert passed == [percent / 100 for percent in range(0, 100, 5)]


def test_weight_of_another_shape_than_configured_is_refused_by_name(tmp_path: Path) -> None:
    save_file({"down": torch.zeros(4, 3)}, tmp_path / "model.safetensors")
    weights = reader(tmp_path)
    with pytest.raises(
        ConfigError, match=r"down has the shape \(4, 3\), the configuration means \(4, 5\)"
    ):
        weights.read_into(weights.empty((4, 5)), "down")
