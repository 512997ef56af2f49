"""The benchmark of layer spans: as a command at the small size, its targets, and what its processes
refuse.
"""

from pathlib import Path

import pytest

from fleet.config import load_config
from fleet.core.errors import FleetError
from fleet.lab.measure.main import run
from fleet.lab.measure.spans import (
    CEILINGS,
    FORWARD,
    ONE,
    REVERSE,
    SpanHops,
    SpansResult,
    SpanWork,
    arranged,
    halves,
    write_random,
)
from fleet.lab.measure.spans_process import span_group
from fleet.lab.measure.spans_protocol import Answer, Compute, ProcessMemory, ReadMemory
from fleet.lab.studies.too_large import SMALL, LimitedProcess, TooLargeResult
from tests.bench_reports import missed, run_bench

MIB = 2**20


@pytest.mark.one_in(11, "benchmarks")
def test_small_measurement_of_spans_reports_every_arrangement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "spans.png"
    result = run_bench(tmp_path, SpansResult, "spans", "--spans", "--small", "--png", str(picture))
    shown = capsys.readouterr().out
    assert "forward, computation only" in shown and picture.is_file()
    assert result.num_equal == result.num_answers > 0, "divided, the answers are the same"
    assert [work.is_prefill for work in result.works] == [True, False, False]
    for work in result.works:
        assert set(work.tokens_per_s) == {ONE, FORWARD, REVERSE, *CEILINGS.values()}
        assert all(speed > 0 for speeds in work.tokens_per_s.values() for speed in speeds)


@pytest.mark.one_in(11, "benchmarks")
def test_span_processes_have_the_weights_of_their_layers_in_memory(tmp_path: Path) -> None:
    write_random(tmp_path / "model", SMALL)
    base = load_config(None, ("graph=text",))
    config = arranged(base, tmp_path / "model", "0:1", "2:output")
    with span_group("spans", config, 1, []) as group:
        reply = group.anchor.run(Answer(num_requests=2, num_prompt=3, num_tokens=4))
        # One request may have several tokens when the other one has its first.
        assert 3 <= reply.num_decoded <= 6 and [len(ids) for ids in reply.answers] == [4, 4]
        assert len(reply.hop_s) == len(reply.passes) and min(reply.hop_s) > 0
        compute = Compute(passes=reply.passes, draws=reply.draws, row_width=reply.row_width)
        for process in (group.anchor, *group.workers):
            assert process.run(compute).seconds > 0
            memory = process.run(ReadMemory()).memory
            assert memory is not None and 0 < memory.weights <= memory.weight_files < memory.peak


def test_process_without_its_checkpoint_is_one_line(tmp_path: Path) -> None:
    config = arranged(load_config(None, ("graph=text",)), tmp_path / "none")
    with pytest.raises(FleetError, match=r"^whole: .*none"), span_group("whole", config, 0, []):
        pass


def work(name: str, *, is_prefill: bool, num_requests: int, **speeds: float) -> SpanWork:
    every = {
        ONE: 1.0,
        FORWARD: 1.0,
        REVERSE: 1.0,
        CEILINGS[FORWARD]: 1.0,
        CEILINGS[REVERSE]: 1.0,
    } | speeds
    # In the second round other processes took half of the time of each.
    tokens_per_s = {arrangement: (speed, speed / 2, speed) for arrangement, speed in every.items()}
    return SpanWork(
        name=name, is_prefill=is_prefill, num_requests=num_requests, tokens_per_s=tokens_per_s
    )


def result(*works: SpanWork, hop_s: float = 0.0005, num_equal: int = 2) -> SpansResult:
    return SpansResult(
        model="m",
        spans="0:1 and 2:output",
        works=works,
        num_equal=num_equal,
        num_answers=2,
        others_cores=0.0,
        hops=(SpanHops(num_workers=2, rounds_s=((2 * hop_s,) * 3, (hop_s,) * 3)),),
    )


def test_ratio_of_two_arrangements_is_that_of_the_same_round() -> None:
    changing = SpanWork(
        name="decode of 1",
        is_prefill=False,
        num_requests=1,
        tokens_per_s={ONE: (10.0, 4.0, 8.0), FORWARD: (9.0, 3.8, 8.0)},
    )
    assert changing.gain(FORWARD) == pytest.approx(0.95) and changing.median(ONE) == 8.0


def test_targets_of_spans_follow_the_median_of_the_rounds() -> None:
    prefill = work(
        "prefill",
        is_prefill=True,
        num_requests=1,
        forward=1.6,
        reverse=1.4,
        **{CEILINGS[FORWARD]: 1.8},
    )
    single = work("decode of 1", is_prefill=False, num_requests=1, forward=0.96, reverse=0.9)
    many = work("decode of 32", is_prefill=False, num_requests=32, forward=0.86, reverse=0.84)
    assert missed(result(prefill, single, many)) == [
        "prefill, reverse / one process",
        "decode of 1, reverse: time / one process",
        "decode of 32, reverse / ceiling",
    ]
    assert missed(result(hop_s=0.0007)) == ["hop, 2 span workers, p50"]
    assert missed(result(num_equal=1)) == ["differing answers"]


def too_large(
    *, weight_files: int, limited_speed: float = 0.0, lacking: int = 100
) -> TooLargeResult:
    memory = ProcessMemory(
        peak=500 * MIB, anonymous=100 * MIB, weight_files=weight_files * MIB, data=450 * MIB
    )
    return TooLargeResult(
        model="m",
        limit_bytes=600 * MIB,
        whole=memory,
        whole_speed=4.0,
        lacking_bytes=lacking * MIB,
        limited_speed=limited_speed,
        failure="no memory",
        processes=(LimitedProcess(span="0:1", planned_bytes=300 * MIB, memory=memory),),
        spans_speed=2.0,
        others_cores=0.0,
    )


def test_targets_of_a_too_large_model_are_memory_and_speed_under_the_limit() -> None:
    assert all(ratio.met for ratio in too_large(weight_files=305).targets())
    assert not any(
        ratio.met for ratio in too_large(weight_files=310, limited_speed=1.1, lacking=0).targets()
    )


def test_graph_of_several_stages_is_refused_for_spans(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--spans", "--set", "graph=qwen3_omni"]) == 1
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert "--set graph=text" in line


def test_model_of_one_layer_is_not_divided() -> None:
    assert halves(5) == ("0:1", "2:output")
    with pytest.raises(FleetError, match="two layers"):
        halves(1)
