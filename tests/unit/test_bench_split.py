"""Results of the hand-off and interference benchmarks: parts of a total, compared deployments, and
the report.
"""

from pathlib import Path

import msgspec
import pytest

from fleet.config import FleetConfig, load_config
from fleet.core.hand_off import HandOff
from fleet.core.ids import StageName
from fleet.lab.measure.answer_timing import AnswerTiming
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.hand_off import PARTS, HandOffResult, StageHandOffs
from fleet.lab.measure.interference import Gap, Interference, LongPrompt, Side, gaps_of
from fleet.lab.measure.page_reads import PageReads
from fleet.lab.measure.serving import encode_call, stage_bounds
from fleet.lab.measure.split import (
    joining_overrides,
    num_workers,
    split_stages,
    splitting_overrides,
    with_checkpoint,
)
from tests.bench_reports import PNG, read_result, report_of, shown
from tests.support import REPO

LM = StageName("lm")
HAND_OFF = HandOff(
    prefilled_us=1_000,
    handed_us=2_000,
    claimed_us=2_500,
    opened_us=4_000,
    pulled_us=4_250,
    confirmed_us=6_250,
    resumed_us=6_500,
)
LATE = HandOff(
    prefilled_us=1_000, handed_us=2_000, claimed_us=3_000, opened_us=4_000, resumed_us=9_000
)
PAGES = PageReads(
    num_bytes=17_000_000,
    num_blocks=500,
    blocks_us=(4.0, 5.0, 6.0),
    plain_us=(3.0, 4.0, 9.0),
    copied_us=(40.0,),
)


def hand_offs(*measured: HandOff) -> HandOffResult:
    stage = StageHandOffs(stage=LM, hand_offs=measured, first=LATE)
    return HandOffResult(stages=(stage,), others_cores=0.5, pages=PAGES)


def side(name: str, *train_ms: float) -> Side:
    gaps = tuple(Gap(1.0 + number, ms / 1000) for number, ms in enumerate(train_ms))
    prompts = (LongPrompt(1.5, 0.2, 4000),)
    return Side(
        name=name,
        workers={name: 2},
        undisturbed=(Gap(0.1, 0.001),),
        disturbed=gaps,
        long_prompts=prompts,
        others_cores=0.0,
    )


def interference() -> Interference:
    return Interference(
        num_streams=2,
        num_tokens=4000,
        interval_s=0.5,
        together=side("together", 1.0, 20.0),
        split=side("split", 1.0, 5.0),
    )


def test_hand_off_parts_add_up_to_the_whole() -> None:
    (stage,) = hand_offs(HAND_OFF).stages
    parts = [part.p50 for part in stage.parts_ms.values() if part is not None]
    assert parts == [1.0, 0.5, 1.5, 0.25, 2.0, 0.25]
    whole = stage.whole_ms
    assert whole is not None and whole.p50 == sum(parts) == 5.5
    assert stage.first_ms == 8.0 and stage.num_recomputed == 0
    assert [begin for _, begin, _ in PARTS][1:] == [end for _, _, end in PARTS][:-1], (
        "the parts leave no gap"
    )


def test_recomputed_hand_off_lacks_parts_and_is_counted() -> None:
    (stage,) = hand_offs(HAND_OFF, LATE).stages
    counts = [part.count if part else 0 for part in stage.parts_ms.values()]
    assert counts == [2, 2, 2, 1, 1, 1]
    assert stage.num_recomputed == 1
    assert stage.whole_ms is not None and stage.whole_ms.count == 2


def test_hand_off_targets_check_median_and_page_ratio() -> None:
    of_time, of_pages = hand_offs(HAND_OFF, HAND_OFF, LATE).targets()
    assert (of_time.name, of_time.value, of_time.met) == ("hand-off p50, lm", 5.5, False)
    assert (of_pages.value, of_pages.met) == (0.8, True)


def test_gaps_are_within_one_answer_and_timed_at_their_end() -> None:
    timing = AnswerTiming(prompt=0, sent_s=10.0, text=(0.5, 0.75, 1.75), done_s=2.0)
    assert gaps_of(timing) == [Gap(10.75, 0.25), Gap(11.75, 1.0)]
    assert gaps_of(msgspec.structs.replace(timing, text=(0.5,))) == []


def test_interference_ratio_compares_p95() -> None:
    found = interference()
    assert found.split.disturbed_s is not None and found.together.disturbed_s is not None
    assert found.ratio == pytest.approx(
        found.split.disturbed_s.p95 / found.together.disturbed_s.p95
    )
    assert msgspec.structs.replace(found, split=side("split")).ratio is None


def configured(*overrides: str, file: str | None = None) -> FleetConfig:
    return load_config(REPO / "configs" / file if file else None, overrides)


def test_unsplit_deployment_is_split_in_every_stage_with_two_walks() -> None:
    plain = configured()
    split = configured(*splitting_overrides(plain))
    stages = plain.graph_declaration().stages
    assert split_stages(plain) == ()
    assert split_stages(split) == tuple(stage.name for stage in stages if len(stage.walks) > 1)
    assert splitting_overrides(split) == ()


@pytest.mark.parametrize("file", ["thinker_pd.yaml", "talker_pd.yaml", "both_pd.yaml"])
def test_joined_deployment_has_as_many_workers_and_no_split_stage(file: str) -> None:
    split = configured(file=file)
    joined = configured(*joining_overrides(split), file=file)
    assert split_stages(split) and not split_stages(joined)
    assert num_workers(joined) == num_workers(split)


def test_tiny_checkpoint_is_used_unless_one_is_named() -> None:
    assert with_checkpoint(configured(), ("a=1",)) == ("a=1", "checkpoint=tiny")
    assert with_checkpoint(configured("checkpoint=/models/x"), ()) == ()


def test_call_requests_only_media_of_the_graph() -> None:
    config = configured()
    body = msgspec.json.decode(
        encode_call("m", "Hello", config, stage_bounds(config, 5, 9), media=("text",))
    )
    assert body["modalities"] == ["text"] and "audio" not in body
    assert {bounds["temperature"] for bounds in body["fleet"].values()} == {0.0}
    with pytest.raises(BenchError, match="not with audio"):
        encode_call("m", "Hello", configured("graph=text"), {}, media=("audio",))


def test_report_shows_and_saves_hand_offs_and_interference(tmp_path: Path) -> None:
    found, measured = interference(), hand_offs(HAND_OFF, HAND_OFF, LATE)
    report = report_of(hand_offs=measured, interference=found)
    output = shown(report)
    for expected in (
        "hand-offs of lm",
        "1 recomputed",
        "block by block",
        "gaps while long",
        "KV blocks / plain",
    ):
        assert expected in output
    assert "measure again on a quiet machine" in output
    report.write(tmp_path / "out.json")

    assert read_result(tmp_path / "out.json", HandOffResult, "hand_offs") == measured
    assert msgspec.json.decode((tmp_path / "out.json").read_bytes())["met"] == {
        "hand-off p50, lm": False,
        "KV blocks / plain read": True,
    }
    report.draw(tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(PNG)
