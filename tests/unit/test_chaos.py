"""Chaos without a fleet: the schedule, the options, how answers are compared, listeners, and what the verdict says of them."""

import io
from base64 import b64encode
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from fleet.bench.chat import Recording
from fleet.chaos.answer import Broken, Difference, ReceivedAnswer, first_difference, longest_gap_s, read_answer
from fleet.chaos.clients import Gateways, Take
from fleet.chaos.errors import ChaosError
from fleet.chaos.faults import InjectedFault
from fleet.chaos.load import ChaosLoad, Outcome
from fleet.chaos.options import ChaosOptions, check
from fleet.chaos.pauses import gap_over_s
from fleet.chaos.plot import draw as draw_picture
from fleet.chaos.recovery import Recovery
from fleet.chaos.report import Run, Verdict, judge, show, write_json
from fleet.chaos.requests import is_drawn, make_bodies
from fleet.chaos.schedule import HOWS, How, draw
from fleet.chaos.watch import Residue
from fleet.config import FleetConfig, load_config
from fleet.reporting.machine import describe_machine
from tests.support import REPO
from tests.unit.test_bench_run import fake_gateway

ROLES = ("thinker", "talker", "conductor")
GIVEN = ChaosOptions(
    config=None, overrides=(), seed=3, requests=4, concurrency=2, kills=None, kills_per_role=None, roles="", how="",
    spacing_s=1.0, json=None, png=None,
)  # fmt: skip
CONFIG = FleetConfig()
SPLIT = load_config(REPO / "configs" / "talker_pd.yaml")


def events(text: str, pcm: bytes, *, end: str = "data: [DONE]\n\n") -> bytes:
    audio = b64encode(pcm).decode()
    return (
        f'data: {{"choices":[{{"delta":{{"content":"{text}"}}}}]}}\n\n'
        f'data: {{"choices":[{{"delta":{{"audio":{{"id":"a","data":"{audio}"}}}}}}]}}\n\n{end}'
    ).encode()


def recording(*pieces: tuple[float, bytes]) -> Recording:
    return Recording(prompt=0, sent_s=0.0, pieces=pieces)


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 40), st.sampled_from([HOWS, (How.KILL,), (How.STOP, How.TERM)]))
def test_a_seed_draws_one_schedule_that_treats_all_alike(seed: int, kills: int, hows: tuple[How, ...]) -> None:
    blows = draw(seed, kills, ROLES, hows, 2.0)
    assert len(blows) == kills and blows == draw(seed, kills, ROLES, hows, 2.0)
    assert all(1.0 <= blow.pause_s <= 3.0 for blow in blows)
    for first in range(0, kills - len(ROLES) + 1, len(ROLES)):
        assert {blow.role for blow in blows[first : first + len(ROLES)]} == set(ROLES)
    whole_round = len(ROLES) * len(hows)
    if kills >= whole_round:
        assert set(Counter((blow.role, blow.how) for blow in blows[:whole_round]).values()) == {1}


@given(st.integers(0, 10_000), st.integers(2, 40))
def test_every_other_blow_at_a_half_of_a_stage_waits_for_a_hand_off(seed: int, kills: int) -> None:
    blows = draw(seed, kills, ROLES, HOWS, 2.0, halves=("thinker", "talker"))
    for role in ROLES:
        waits = [blow.in_hand_off for blow in blows if blow.role == role]
        expected = [not waits[0], waits[0]] if waits and role != "conductor" else [False, False]
        assert all(wait == expected[at % 2 == 0] for at, wait in enumerate(waits))


def test_without_more_words_each_role_is_struck_in_each_way() -> None:
    options = check(GIVEN, CONFIG)
    assert options.roles == ("thinker", "talker", "code2wav", "conductor", "web")
    assert options.kills == 15 and options.hows == HOWS and not options.halves


def test_of_a_split_stage_each_half_is_a_role_with_replicas_of_its_own() -> None:
    options = check(replace(GIVEN, kills_per_role=5), SPLIT)
    assert options.roles == ("thinker", "talker.prefill", "talker.decode", "code2wav", "conductor", "web")
    assert options.halves == ("talker.prefill", "talker.decode") and options.kills == 30
    fleet = load_config(REPO / "configs" / "talker_pd.yaml", options.overrides)
    assert {role.replicas for role in fleet.roles()} == {2}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"requests": 0}, "--requests 0: give a whole number of at least 1"),
        ({"kills": -1}, "--kills -1: give a whole number"),
        ({"kills_per_role": 0}, "--kills-per-role 0: give a whole number"),
        ({"kills": 3, "kills_per_role": 3}, "--kills-per-role counts the blows already; leave out --kills"),
        ({"concurrency": 65}, "--concurrency 65: this fleet admits 64 requests at a time; add --set limits.max_requests=65"),
        ({"spacing_s": -1.0}, "--spacing -1: give seconds"),
        ({"spacing_s": float("nan")}, "--spacing nan: give seconds"),
        ({"roles": "jobs"}, "--roles jobs: 'jobs' is not known; use one or more of thinker, talker, code2wav, conductor, web"),
        ({"how": "nuke"}, "--how nuke: 'nuke' is not known; use one or more of kill, stop, term"),
        ({"how": ","}, "--how ',': names nothing"),
        ({"json": Path("/nowhere/x.json")}, "--json /nowhere/x.json: there is no folder /nowhere"),
    ],
)
def test_an_option_that_will_not_do_is_named(changed: dict[str, object], said: str) -> None:
    with pytest.raises(ChaosError) as caught:
        check(replace(GIVEN, **changed), CONFIG)  # pyright: ignore[reportArgumentType]
    assert caught.value.message.startswith(said) and "\n" not in caught.value.message


def test_what_was_given_wins_over_what_chaos_adds() -> None:
    options = check(replace(GIVEN, overrides=("numerics=fast", "stages.thinker.replicas=3")), CONFIG)
    assert options.overrides.index("numerics=invariant") < options.overrides.index("numerics=fast")
    assert options.overrides.index("stages.thinker.replicas=2") < options.overrides.index("stages.thinker.replicas=3")


def test_requests_come_from_the_seed_alone_and_half_of_them_are_drawn() -> None:
    bodies = make_bodies("m", CONFIG, check(GIVEN, CONFIG))
    assert bodies == make_bodies("m", CONFIG, check(GIVEN, CONFIG))
    assert len(set(bodies)) == 4 and bodies != make_bodies("m", CONFIG, check(replace(GIVEN, seed=4), CONFIG))
    decoded = [msgspec.json.decode(body) for body in bodies]
    assert [body["temperature"] for body in decoded] == [0.0, 0.9, 0.0, 0.9]
    assert [is_drawn(number) for number in range(4)] == [False, True, False, True]
    assert all(body["modalities"] == ["text", "audio"] for body in decoded)
    assert all(body["stream_options"]["include_event_ids"] for body in decoded), "an answer is resumed from its last event id"
    assert ["temperature" in body["fleet"]["talker"] for body in decoded] == [True, False, True, False]


def test_an_answer_is_read_to_the_byte_however_it_was_cut() -> None:
    raw = events("né", b"\x01\x00\x02\x00")
    answer = read_answer(recording(*((0.1 * at, raw[at : at + 1]) for at in range(len(raw)))))
    assert (answer.text, answer.audio) == ("né".encode(), b"\x01\x00\x02\x00") and len(answer.chunks_s) == 1
    assert answer.stalled_s == 0


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (events("a", b"", end=""), "stopped before its end, after 2 events"),
        (events("a", b"", end='data: {"error":{"message":"3 workers died"}}\n\ndata: [DONE]\n\n'), "3 workers died"),
    ],
)
def test_a_stream_that_is_not_whole_is_no_answer(raw: bytes, said: str) -> None:
    with pytest.raises(Broken, match=said):
        read_answer(recording((0.1, raw)))


def answer(text: bytes = b"abc", audio: bytes = b"1234") -> ReceivedAnswer:
    return ReceivedAnswer(text=text, audio=audio, chunks_s=(0.1,))


@pytest.mark.parametrize(
    ("got", "difference"),
    [
        (answer(), None),
        (answer(audio=b"1294"), Difference(medium="audio", offset=2, expected_bytes=4, got_bytes=4, peak=6)),
        (answer(audio=b"12"), Difference(medium="audio", offset=2, expected_bytes=4, got_bytes=2)),
        (answer(text=b"abcd", audio=b""), Difference(medium="text", offset=3, expected_bytes=3, got_bytes=4)),
    ],
)
def test_the_first_byte_that_differs_is_found(got: ReceivedAnswer, difference: Difference | None) -> None:
    assert first_difference(answer(), got) == difference


def test_a_few_steps_of_a_sample_are_rounding_and_anything_else_is_not() -> None:
    def compared(ours: list[int], theirs: list[int], text: bytes = b"abc") -> Difference:
        a, b = (np.array(samples, "<i2").tobytes() for samples in (ours, theirs))
        found = first_difference(answer(audio=a), answer(text, b))
        assert found is not None
        return found

    assert compared([-32768, 5], [-32768, 3]).is_rounding
    assert compared([-32768, 5], [32767, 5]).peak == 65535, "the widest step does not overflow"
    assert not compared([0, 100], [0, 900]).is_rounding
    assert not compared([1, 2], [1]).is_rounding and not compared([1, 2], [1, 2], b"abd").is_rounding


def test_the_longest_gap_needs_two_chunks() -> None:
    assert longest_gap_s((0.5,)) is None
    assert longest_gap_s((0.0, 1.0, 1.5)) == 1.0


def test_listeners_go_on_until_told_and_compare_every_answer() -> None:
    with fake_gateway() as gateway:
        gateway.stream = events("abc", b"1234")
        gateway.gate.set()
        learning = ChaosLoad(Gateways([gateway.url]), [b"0", b"1", b"2"])
        learning.start(2, lambda: None, once=True)
        assert [one.lost for one in learning.finish()] == ["", "", ""]
        assert sorted(gateway.bodies) == [b"0", b"1", b"2"]

        expected = [learning.learnt[0], answer(audio=b"1235"), learning.learnt[2]]
        load = ChaosLoad(Gateways([gateway.url]), [b"0", b"1", b"2"], expected)
        load.start(2, lambda: None)
        outcomes = load.finish()
    assert len(outcomes) >= 3 and {one.request for one in outcomes} == {0, 1, 2}
    for one in outcomes:
        assert not one.lost and (one.difference is not None) == (one.request == 1)


def test_every_answer_is_asked_for_once_more_and_must_stand() -> None:
    with fake_gateway() as gateway:
        gateway.stream, gateway.again = events("abc", b"1234"), events("abc", b"1934")
        gateway.gate.set()
        load = ChaosLoad(Gateways([gateway.url]), [b"0"], [answer()])
        load.start(1, lambda: None, once=True)
        (outcome,) = load.finish()
        assert not outcome.lost and outcome.difference is None
        assert outcome.changed is not None and outcome.changed.offset == 1

        gateway.again = events("abc", b"1234", end="")
        load = ChaosLoad(Gateways([gateway.url]), [b"0"], [answer()])
        load.start(1, lambda: None, once=True)
        (outcome,) = load.finish()
    assert outcome.lost.startswith("heard whole, but not when asked once more: the stream stopped before its end")


def test_a_request_that_is_refused_is_lost() -> None:
    with fake_gateway() as gateway:
        gateway.status, gateway.stream = 503, b'{"error":{"message":"no worker serves lm"}}'
        gateway.gate.set()
        load = ChaosLoad(Gateways([gateway.url]), [b"0"])
        load.start(1, lambda: None, once=True)
        (outcome,) = load.finish()
    assert "status 503: no worker serves lm" in outcome.lost


def test_an_event_that_came_in_part_is_forgotten_and_the_last_id_kept() -> None:
    whole = b"data: first\n\nid: 2.0\ndata: second\n\n"
    take = Take(sent_s=0.0, reached_s=0.0, pieces=[(0.1, whole[:30]), (0.2, whole[30:] + b"id: 4.0\nda"), (0.3, b"ta: th")])
    take.cut()
    assert b"".join(piece for _, piece in take.pieces) == whole and take.last_id == "2.0"
    nothing = Take(sent_s=0.0, reached_s=0.0, pieces=[(0.1, b"data: fi")])
    nothing.cut()
    assert not nothing.pieces and nothing.last_id == ""


LAPSED = Recovery(found="lapsed", fenced_s=1.0, granted_s=1.1, claimed_s=1.2, requests=("req-1",))
HIT = InjectedFault(
    role="talker", how=How.STOP, victim="talker@h:1:a", requests=("req-1",), at_s=2.0, until_s=5.0, whole_s=6.0, after=LAPSED
)
WHOLE = (
    Outcome(request=0, id="req-0", sent_s=0.0, ended_s=1.0, chunks_s=(0.2, 0.3)),
    Outcome(request=1, id="req-1", sent_s=1.0, ended_s=9.0, chunks_s=(0.2, 3.2, 3.4)),
)


def verdict(
    disturbed: tuple[Outcome, ...] = WHOLE,
    hits: tuple[InjectedFault, ...] = (HIT,),
    residue: Residue | None = None,
    blows: int = 1,
    replicas: int = 2,
    numerics: str = "invariant",
) -> Verdict:
    run = Run(
        began="2026-01-01T00:00:00+0000", command=("chaos",), machine=describe_machine(), model="m", numerics=numerics,
        seed=0, requests=2, concurrency=2, replicas={"talker": replicas}, standby={},
    )  # fmt: skip
    return judge(run, WHOLE[:1], disturbed, hits, blows, residue or Residue())


def test_pauses_are_those_of_whom_a_blow_caught_and_are_not_judged() -> None:
    said = verdict()
    assert said.passed and said.caught == 1
    assert said.pauses_caught.gap_s is not None and said.pauses_caught.gap_s.high == 3.0
    assert said.pauses_undisturbed.gap_s is not None and said.pauses_undisturbed.gap_s.high == pytest.approx(0.1)


def test_a_gap_belongs_to_the_blow_that_fell_before_its_end() -> None:
    one = Outcome(request=0, sent_s=10.0, ended_s=20.0, chunks_s=(1.0, 2.0, 5.0, 6.0))
    assert gap_over_s(one, 12.5, 14.0) == 3.0 and gap_over_s(one, 15.5, 16.5) == 1.0
    assert gap_over_s(one, 16.5, 20.0) is None and gap_over_s(one, 0.0, 10.5) is None


def test_what_came_long_after_the_work_was_taken_up_again_is_a_gap_and_no_pause() -> None:
    late = Outcome(request=1, id="req-1", sent_s=1.0, ended_s=30.0, chunks_s=(0.2, 1.5, 2.0, 3.0, 5.1, 6.0, 16.0))
    (kind,) = verdict(disturbed=(late,)).kinds
    assert kind.pause_s is not None and kind.gap_s is not None
    assert (kind.pause_s.high, kind.gap_s.high) == pytest.approx((2.1, 10.0))


def test_pauses_are_told_by_the_kind_of_blow_and_by_who_found_out() -> None:
    died = msgspec.structs.replace(
        HIT, how=How.KILL, at_s=4.25, until_s=4.25, after=msgspec.structs.replace(LAPSED, found="died")
    )
    said = verdict(hits=(HIT, died), blows=2)
    assert [(kind.role, kind.signal, kind.found, kind.struck) for kind in said.kinds] == [
        ("talker", "SIGSTOP", "lapsed", 1), ("talker", "SIGKILL", "died", 1)
    ]  # fmt: skip
    assert [kind.gap_s.high for kind in said.kinds if kind.gap_s] == pytest.approx([3.0, 0.2])
    assert [kind.pause_s.high for kind in said.kinds if kind.pause_s] == pytest.approx([3.0, 0.2])
    assert [(kind.role, kind.found, kind.hits, kind.alone) for kind in said.findings] == [
        ("", "lapsed", 1, False), ("", "died", 1, False)
    ]  # fmt: skip
    assert said.struck_roles == {"talker": {"SIGSTOP": 1, "SIGKILL": 1}}
    assert (said.answered_greedy, said.answered_drawn) == (1, 1)
    assert [kind.alone for kind in verdict(replicas=1).kinds] == [True]


DIFFERENCE = Difference(medium="audio", offset=7, expected_bytes=9, got_bytes=9)


@pytest.mark.parametrize(
    ("failed", "line"),
    [
        (verdict((*WHOLE, Outcome(request=3, sent_s=0, ended_s=2.5, lost="no end"))), "request 3 was lost after 2.5 s: no end"),
        (verdict((Outcome(request=4, sent_s=0, ended_s=1, difference=DIFFERENCE),)), "request 4 differs in its audio"),
        (
            verdict((Outcome(request=5, sent_s=0, ended_s=1, changed=DIFFERENCE),), numerics="fast"),
            "request 5 was told otherwise when asked once more, in its audio from byte 7 on",
        ),
        (verdict(residue=Residue(num_keys=1, keys=("fleet:x (no row)",))), "key without an end: fleet:x (no row)"),
        (verdict(residue=Residue(arena_slots=2)), "arena slots left"),
        (verdict(hits=(msgspec.structs.replace(HIT, whole_s=None),)), "not whole again after SIGSTOP to talker@h:1:a"),
        (verdict(blows=3), "2 blows were not struck"),
    ],
)
def test_each_fault_alone_fails_the_run_and_is_told(failed: Verdict, line: str, tmp_path: Path) -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    show(failed, console)
    said = console.export_text()
    assert not failed.passed and "chaos failed" in said and line in said
    write_json(failed, tmp_path / "verdict.json")
    assert msgspec.json.decode((tmp_path / "verdict.json").read_bytes(), type=Verdict) == failed
    draw_picture(failed, tmp_path / "verdict.png")
    assert (tmp_path / "verdict.png").read_bytes().startswith(b"\x89PNG")


def test_where_numerics_are_fast_differences_are_counted_by_kind_and_not_judged() -> None:
    rounded = msgspec.structs.replace(DIFFERENCE, peak=2)
    differ = [Outcome(request=at, sent_s=0, ended_s=1, difference=one) for at, one in enumerate((rounded, rounded, DIFFERENCE))]
    said = verdict((*WHOLE, *differ), numerics="fast")
    console = Console(width=160, record=True, file=io.StringIO())
    show(said, console)
    assert said.passed and "differs in its" not in console.export_text(clear=False)
    assert "2 of 5 answers differ in the last bits of samples, 1 went another way" in console.export_text()
