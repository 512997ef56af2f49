"""The scale benchmark with few streams for a short time: its report is correct, and a joining
second worker loses no chunk.
"""

import re
from pathlib import Path

import msgspec
import pytest

from fleet.config import load_config
from fleet.core.errors import ConfigError
from fleet.lab.measure.main import run
from fleet.lab.measure.options import parse
from fleet.lab.measure.scale import STEP_KEY, STEP_MS, counts_of, paced, specs_of
from fleet.lab.measure.scale_costs import STEPS, sizes_for
from fleet.lab.measure.scale_costs_result import Replay, ScaleCosts, Sizes
from fleet.lab.measure.scale_expected import expected_content
from fleet.lab.measure.scale_replay import AUDIO_BYTES, CODES_BYTES, GROUP, measure_replay
from fleet.lab.measure.scale_result import Ages, Joined, ScalePhase, ScaleResult, Window
from fleet.stages.fake import build
from fleet.telemetry.counts import BOUNDS_US, LatencyCounts
from tests.bench_reports import missed, report_of, run_bench, shown
from tests.stage_options import stage_options

FEW, MANY = 2, 3
LEAST_PACE = 0.8
"""Smallest accepted pace relative to the target, since a busy machine delays single rows. If chunks
carried rows of an additional edge, three streams would reach 2/3.
"""


def test_streams_option_sorts_and_removes_duplicates() -> None:
    assert counts_of(parse(["--scale"])) == [10, 300]
    repeated = ["--scale", "--streams", "300,10", "--streams", "40", "--streams", "10"]
    assert counts_of(parse(repeated)) == [10, 40, 300]


@pytest.mark.parametrize(
    "arguments", [["--streams", "0"], ["--streams", "10,x"], ["--scale-seconds", "0"]]
)
def test_scale_invalid_number_is_a_usage_error(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["--scale", *arguments]) == 2
    assert "is not a whole number" in capsys.readouterr().err


@pytest.mark.timeout(900)
@pytest.mark.one_in(6, "commands that take minutes")
def test_scale_run_reports_complete_answers_and_a_joined_worker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A scale run with real processes and a real Redis reports complete answers and the worker that
    joined; speed is not checked.
    """
    picture = tmp_path / "out.png"
    arguments = ("--scale", "--streams", f"{FEW},{MANY}", "--scale-seconds", "1")
    scale = run_bench(tmp_path, ScaleResult, "scale", *arguments, "--png", str(picture))
    shown_lines = capsys.readouterr().out
    assert re.search(rf"complete answers +{FEW} of {FEW} +{MANY} of {MANY}", shown_lines)
    assert [phase.streams for phase in scale.phases] == [FEW, MANY]
    joined = scale.joined
    windows = (*(phase.window for phase in scale.phases), joined.alone, joined.together)
    roles = {role.name for role in load_config(None).roles()}
    for window in windows:
        assert window.seconds >= 1
        assert window.chunks > 0
        assert set(window.cpu_s) == {"redis", "conductor", *roles}
        assert window.cost_us == pytest.approx(
            sum(window.cost_of_us(name) for name in window.cpu_s)
        )
        for ages in (window.between_workers, window.to_gateway):
            assert ages is not None
            assert 0 < ages.p50_us <= ages.p99_us
    assert (joined.slots, joined.streams, joined.broken) == (2, MANY, ())
    assert all(phase.broken == () for phase in scale.phases)
    assert picture.is_file()
    costs = scale.costs
    assert costs is not None
    assert costs.sizes == sizes_for(MANY)
    assert min(costs.rejoin_s, costs.take_over_s, costs.watch_ms) > 0
    for replay in costs.replays:
        assert replay.tensor_bytes < replay.payload_bytes < replay.append_only_bytes
    assert costs.lapsed_leases == 0
    assert costs.replays[-1].targets[0].met, "audio is written once"
    pace = windows[1].chunks_per_s / scale.real_time_per_s(MANY)
    assert pace > LEAST_PACE
    assert (
        joined.together.chunks_per_s / joined.alone.chunks_per_s > LEAST_PACE * MANY / joined.slots
    )


@pytest.mark.parametrize("size", [CODES_BYTES, AUDIO_BYTES])
def test_bytes_and_commands_per_chunk_are_within_their_targets(size: int) -> None:
    replay = measure_replay(2 * GROUP, STEPS, size)
    assert [ratio.name for ratio in replay.targets if not ratio.met] == []


def test_each_stream_has_its_own_content_on_each_edge() -> None:
    config = paced(load_config(None), FEW, step_ms=0)
    specs = specs_of(config, FEW, seconds=1)
    one, other = expected_content(config, specs).values()
    assert set(one) == set(config.graph_declaration().media)
    assert all(one[edge] != other[edge] for edge in one)
    assert expected_content(config, specs[:1])[specs[0].id] == one


@pytest.mark.parametrize("graph", ["qwen3_omni", "text"])
def test_stream_appends_one_chunk_per_step_over_its_edges(graph: str) -> None:
    """A stream appends one chunk per step over the edges of plain answers; the edges of captures
    are not included.
    """
    config = paced(load_config(None, (f"graph={graph}",)), FEW)
    (spec,) = specs_of(config, 1, seconds=1)
    edges = config.graph_declaration().edges_for(spec.outputs)
    assert len(edges) < len(config.graph_declaration().edges)
    assert {config.policy_of(edge).size(index) for edge in edges for index in (0, 100)} == {
        len(edges)
    }
    assert result().real_time_per_s(300) == 300 * 1000 / STEP_MS == 3750


def result(
    *,
    p99_us: int = 40_000,
    cost_s: float = 1.0,
    redis_us: float = 59.0,
    broken: tuple[str, ...] = (),
    costs: ScaleCosts | None = None,
) -> ScaleResult:
    def window(chunks: int, cpu_s: float) -> Window:
        ages = Ages(count=chunks, p50_us=1000, p99_us=p99_us)
        return Window(
            seconds=1.0,
            chunks=chunks,
            between_workers=ages,
            to_gateway=ages,
            cpu_s={"redis": chunks * redis_us / 1e6, "conductor": cpu_s},
            generator_cores=0.1,
            others_cores=0.0,
        )

    phases = (
        ScalePhase(streams=10, window=window(125, 0.125)),
        ScalePhase(streams=300, window=window(3750, cost_s * 3.75), broken=broken),
    )
    joined = Joined(
        role="a",
        slots=150,
        streams=300,
        alone=window(1875, 1.0),
        together=window(3750, 1.0),
        start_s=1.0,
    )
    return ScaleResult(
        graph="g", step_ms=80, num_edges=4, phases=phases, joined=joined, costs=costs
    )


def test_scale_targets_follow_the_measured_numbers() -> None:
    assert all(ratio.met for ratio in result().targets())
    assert missed(result(p99_us=51_000)) == [
        "hop p99 at 300 streams, between workers",
        "hop p99 at 300 streams, worker to gateway",
    ]
    assert missed(result(cost_s=1.4)) == ["CPU per chunk, 300 streams / 10"]
    assert missed(result(redis_us=61)) == ["CPU of Redis per chunk, 300 streams"]
    assert missed(result(broken=("r: lost",))) == ["incomplete answers"]


def test_most_streams_in_time_are_the_largest_count_that_meets_pace_and_age() -> None:
    assert result().most_in_time == 300
    assert result(p99_us=51_000).most_in_time == 0
    slow = result()
    late = msgspec.structs.replace(slow.phases[1], streams=400)
    assert msgspec.structs.replace(slow, phases=(slow.phases[0], late)).most_in_time == 10


def costs_of(
    *,
    take_over_s: float = 4.0,
    lapsed_leases: int = 0,
    watch_ms: float = 90.0,
    logged_bytes: float = 700.0,
    commands: float = 7.0,
) -> ScaleCosts:
    replay = Replay(
        streams=3,
        chunks=60,
        tensor_bytes=64,
        payload_bytes=160,
        redis_us=80,
        append_only_bytes=logged_bytes,
        commands=commands,
    )
    return ScaleCosts(
        sizes=Sizes(answers=3000, waiting=15_000),
        rejoin_s=1.0,
        take_over_s=take_over_s,
        lapsed_leases=lapsed_leases,
        watch_ms=watch_ms,
        replays=(replay,),
    )


@pytest.mark.parametrize(
    ("costs", "names"),
    [
        (costs_of(), []),
        (costs_of(take_over_s=5.1), ["take-over of 3000 answers"]),
        (costs_of(lapsed_leases=1), ["lapsed leases meanwhile"]),
        (costs_of(watch_ms=101), ["conductor's turn with 15000 waiting grants"]),
        (costs_of(commands=7.3), ["commands per chunk of 64 bytes"]),
        (costs_of(logged_bytes=705), ["append-only file per chunk of 64 bytes"]),
    ],
)
def test_targets_of_costs_without_workers_follow_the_measured_numbers(
    costs: ScaleCosts, names: list[str]
) -> None:
    assert missed(result(costs=costs)) == names


def test_sizes_of_costs_are_proportional_below_300_streams() -> None:
    assert sizes_for(300) == sizes_for(1000) == Sizes(answers=3000, waiting=15_000)
    assert sizes_for(30) == Sizes(answers=300, waiting=1500)
    assert sizes_for(1) == Sizes(answers=10, waiting=50)


def test_single_stream_count_has_no_cost_ratio(tmp_path: Path) -> None:
    one = msgspec.structs.replace(result(), phases=result().phases[1:])
    assert not [ratio for ratio in one.targets() if "CPU per chunk" in ratio.name]
    report = report_of(scale=one)
    output = shown(report)
    assert "12.5 chunks/s per stream" in output
    assert "300 streams for 150 slots of a" in output
    report.draw(tmp_path / "x.png")
    assert (tmp_path / "x.png").is_file()


@pytest.mark.parametrize("step_ms", ["soon", True, -1])
def test_fake_engine_invalid_step_time_is_refused(step_ms: str | int | bool) -> None:
    graph = load_config(None).graph_declaration()
    with pytest.raises(ConfigError, match="is no number of milliseconds"):
        build(stage_options(graph.stages[0].name, Path(), extra={STEP_KEY: step_ms}))


def test_hop_counts_add_up_and_survive_encoding() -> None:
    counts = LatencyCounts()
    for age_us in (-5, 0, 100, 101, 1_000, 50_000, 99_000_000):
        counts.add(age_us)
    assert counts.total == 7
    assert counts.percentile_us(0) == counts.percentile_us(40) == BOUNDS_US[0] == 100
    assert counts.percentile_us(100) == BOUNDS_US[-1]
    median = counts.percentile_us(50)
    assert median is not None and 101 <= median <= 101 * 1.13
    assert LatencyCounts.decode(counts.encoded()) == counts
    assert LatencyCounts.decode("") == LatencyCounts()
    assert (counts + counts) - counts == counts
    assert LatencyCounts().percentile_us(99) is None
