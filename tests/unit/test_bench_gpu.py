"""The device benchmark: as a command at the small size, its expectations, and the bytes that a step
reads.
"""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace

from fleet.core.errors import ConfigError
from fleet.core.ids import StageName
from fleet.engine.torch.experts import Experts, ExpertWeights, grouped_experts, looped_experts
from fleet.graphs import DEFAULT_GRAPH, get_graph
from fleet.lab.measure import gpu_run
from fleet.lab.measure.gpu import (
    GpuResult,
    MeasuredChoice,
    MemoryUse,
    Prefill,
    PublishedRate,
    SpeechRun,
    StageSteps,
)
from fleet.lab.measure.gpu_run import BATCHES, MAX_BATCH, ratios_of
from fleet.lab.measure.main import run
from fleet.lab.measure.measurement import Context
from fleet.lab.measure.weight_reads import WeightReads
from fleet.models.qwen3_omni.full_size import published_config, weight_shapes
from fleet.models.random_weights import RandomWeightReader
from fleet.stages.full_size import Expected
from tests.bench_reports import read_result, report_of, shown
from tests.support import REPO, cli_env

ON_A_BARE_MACHINE = """
import socket, sys
from importlib.machinery import PathFinder

ABSENT = (
    "av cryptography honcho httptools matplotlib multipart nixl onnxruntime prometheus_client "
    "redis rq soundfile soxr starlette "
    "uvicorn uvloop vllm websockets"
).split()

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in ABSENT else super().find_spec(name, path, target)

def refuse(*args, **kwargs):
    raise OSError("there is no network here")

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
socket.socket.connect = socket.getaddrinfo = refuse
from fleet.cli.main import main
main()
"""
"""Program that runs `fleet` without a network and without the libraries that only a fleet needs."""
LM, CODEC = StageName("lm"), StageName("codec")


@pytest.mark.one_in(11, "benchmarks")
def test_small_measurement_needs_no_network_and_no_library_of_a_fleet(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    arguments = ("bench", "--gpu", "--small", "--check", "--json", str(out))
    command = [sys.executable, "-c", ON_A_BARE_MACHINE, *arguments]
    done = subprocess.run(
        command, env=cli_env(), cwd=REPO, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "fleet bench: warm-up" in done.stderr, "progress"
    for expected in ("decode steps", "prefill of one request", "answers together", "memory"):
        assert expected in done.stdout
    result = read_result(out, GpuResult, "gpu")
    stages = [stage.name for stage in get_graph(DEFAULT_GRAPH).stages]
    assert [(each.stage, each.batch) for each in result.steps] == [
        (name, batch) for name in stages for batch in BATCHES
    ]
    assert all(min(each.served_s) > 0 for each in result.steps)
    with_experts = [each for each in result.steps if each.invariant_s]
    assert [(each.stage, each.batch) for each in result.rounded] == [
        (each.stage, each.batch) for each in with_experts
    ]
    assert len(with_experts) == (len(stages) - 1) * len(BATCHES)
    for whole, rounded in zip(with_experts, result.rounded, strict=True):
        assert 0 < rounded.weight_bytes < whole.weight_bytes
    assert (
        list(result.memory.weight_bytes) == stages and min(result.memory.weight_bytes.values()) > 0
    )
    assert [run.concurrency for run in (*result.singles, result.together)] == [1] * len(
        result.singles
    ) + [MAX_BATCH]
    for speech in (*result.singles, result.together):
        assert 0 < min(speech.first_audio_s) and max(speech.first_audio_s) < speech.seconds
        assert speech.audio_s == pytest.approx(speech.concurrency * result.singles[0].audio_s)
    by_batch = result.steps_of(stages[0])
    assert (
        0
        < by_batch[1].weight_bytes
        < by_batch[32].weight_bytes
        < result.memory.weight_bytes[stages[0]]
    ), "chosen experts"
    assert 0 < by_batch[1].kv_bytes < by_batch[32].kv_bytes
    assert result.small and result.ratios == (), "the expectations are those of the full size"


def test_gpu_measurement_without_a_gpu_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(["--gpu"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fleet bench: --gpu: no CUDA device") and "--small" in line


def test_gpu_with_too_little_memory_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(device: torch.device, context: Context, *, small: bool) -> GpuResult:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 768 MiB.\nSee the documentation"
        )

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_run, "measure", measure)
    assert run(["--gpu"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "Tried to allocate 768 MiB" in line and "80 GB" in line


@pytest.mark.parametrize(
    "arguments",
    [
        ["--small"],
        ["--gpu", "--up"],
        ["--gpu", "--hop"],
        ["--gpu", "--png", "x.png"],
        ["--gpu", "--set", "graph=text"],
    ],
)
def test_gpu_measurement_is_refused_beside_other_options(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    assert "--gpu" in capsys.readouterr().err


def test_published_size_has_the_bytes_of_the_published_checkpoint() -> None:
    shapes = weight_shapes(published_config())
    assert round(sum(2 * math.prod(shape) for shape in shapes.values()) / 1e9, 1) == 70.5


def reader(**shapes: tuple[int, ...]) -> RandomWeightReader:
    def fill(name: str, weight: torch.Tensor) -> None:
        weight.normal_(generator=torch.Generator().manual_seed(len(name)))

    return RandomWeightReader(shapes, fill, device=torch.device("cpu"), dtype=torch.float32)


def test_random_weights_are_made_in_place_and_counted() -> None:
    weights = reader(first=(4, 3), second=(2, 3))
    both = weights.joined(["first", "second"])
    assert torch.equal(both[:4], reader(first=(4, 3)).get("first"))
    assert weights.num_bytes == both.nbytes and weights.names == ["first", "second"]
    assert weights.holds(both[1]) and not weights.holds(both.clone())
    with pytest.raises(ConfigError, match="random weights: no weight third"):
        weights.get("third")


@pytest.mark.parametrize("experts", [grouped_experts, looped_experts])
def test_bytes_read_are_those_of_chosen_experts_and_embedded_rows(experts: Experts) -> None:
    weights = reader(gate_up=(8, 8, 16), down=(8, 16, 4), table=(50, 16), head=(50, 16))
    matrices = ExpertWeights(gate_up=weights.get("gate_up"), down=weights.get("down"))
    table, head = weights.get("table"), weights.get("head")
    chosen = torch.tensor([[0, 3], [3, 5], [5, 0]])
    shares = torch.full((3, 2), 0.5)
    with torch.inference_mode(), WeightReads(weights.holds) as reads:
        rows = F.embedding(torch.tensor([1, 2, 3]), table)
        assert reads.num_bytes == rows.nbytes
        rows = experts(rows, chosen, shares, matrices)
        assert reads.num_bytes == rows.nbytes + 3 * (
            matrices.gate_up[0].nbytes + matrices.down[0].nbytes
        )
        before = reads.num_bytes
        for _ in range(2):
            F.linear(rows, head)
    assert reads.num_bytes == before + 2 * head.nbytes


def steps(stage: StageName, batch: int, served_ms: float, eager_ms: float = 0.0) -> StageSteps:
    return StageSteps(
        stage=stage,
        batch=batch,
        served_s=(served_ms / 1000,) * 3,
        eager_s=(eager_ms / 1000,) * 3 if eager_ms else (),
        weight_bytes=0 if stage == CODEC else 3 << 30,
        kv_bytes=0 if stage == CODEC else 1 << 30,
    )


def full_result() -> GpuResult:
    single = SpeechRun(concurrency=1, first_audio_s=(0.09,), seconds=1.0, audio_s=10.0)
    together = SpeechRun(concurrency=32, first_audio_s=(0.2,) * 32, seconds=2.0, audio_s=320.0)
    return GpuResult(
        model="a model",
        small=False,
        device="a device",
        dtype="bfloat16",
        build_s=20.0,
        warm_up_s=30.0,
        copy_bytes_per_s=float(1 << 40),
        steps=(
            replace(steps(LM, 1, 10.0, 25.0), invariant_s=(0.0125,)),
            steps(LM, 8, 11.0, 50.0),
            steps(LM, 32, 15.0, 90.0),
            *(steps(CODEC, batch, 5.0) for batch in BATCHES),
        ),
        prefills=(Prefill(rows=32, step_s=(0.02,)),),
        singles=(single, single),
        together=together,
        published=(
            PublishedRate(concurrency=1, audio_s_per_s=12.0),
            PublishedRate(concurrency=32, audio_s_per_s=114.0),
        ),
        published_source="others",
        memory=MemoryUse(
            weight_bytes={LM: 1 << 30, CODEC: 1 << 20}, peak_bytes=1 << 31, is_device=True
        ),
        rounded=(steps(LM, 8, 7.0),),
    )


def test_expectations_are_of_steps_prompts_first_audio_and_throughput() -> None:
    expected = Expected(
        step_ms={(LM, 1): 3.5, (LM, 32): 16.0},
        prefill_ms={32: 20.0, 64: 1.0},
        first_audio_ms=100.0,
        audio_s_per_s={1: 20.0, 32: 150.0},
        invariant_share={(LM, 1): 0.9, (LM, 32): 0.9},
    )
    ratios = ratios_of(full_result(), expected)
    assert [(ratio.name, round(ratio.value, 2), ratio.met) for ratio in ratios] == [
        ("lm, 1 request: step", 10.0, False),
        ("lm, 32 requests: step", 15.0, True),
        ("prompt of 32 positions", 20.0, True),
        ("first audio", 90.0, True),
        ("lm, 1 request: speed of invariant numerics", 0.8, False),
        ("audio seconds per second, 1 together", 10.0, False),
        ("audio seconds per second, 32 together", 160.0, True),
    ]


def test_report_shows_which_implementations_were_measured_and_chosen() -> None:
    choices = (
        MeasuredChoice(key="step of 1 rows", candidate="torch", outcome=0.31, is_chosen=False),
        MeasuredChoice(key="step of 1 rows", candidate="fused", outcome=0.12, is_chosen=True),
        MeasuredChoice(
            key="step of 2 rows", candidate="fused", outcome="no kernel", is_chosen=False
        ),
    )
    lines = [
        line.split()
        for line in shown(report_of(gpu=replace(full_result(), choices=choices))).splitlines()
    ]
    assert ["step", "of", "1", "rows", "torch", "0.31"] in lines
    assert ["step", "of", "1", "rows", "fused", "0.12", "yes"] in lines
    assert ["step", "of", "2", "rows", "fused", "no", "kernel"] in lines


def test_report_shows_rates_beside_the_best_published() -> None:
    lines = [line.split() for line in shown(report_of(gpu=full_result())).splitlines()]
    assert ["1", "90", "10", "12"] in lines
    assert ["32", "200", "160", "114"] in lines
    assert ["lm", "1", "10", "25", "2.5", "4096", "3.91", "39%"] in lines
    assert ["codec", "32", "5", "-", "-", "-", "-", "-"] in lines
    assert ["lm", "1", "12.5", "0.8"] in lines, "invariant"
    assert ["lm", "8", "7", "-", "-", "4096", "3.91", "56%"] in lines, "in 8 bits"
