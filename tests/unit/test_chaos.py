"""`fleet chaos` without a fleet: schedule, options, comparison of answers, and the load."""

import time
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.config import FleetConfig, load_config
from fleet.core.errors import BadInput
from fleet.lab.client.errors import StreamError
from fleet.lab.faults.answer import (
    Difference,
    ReceivedAnswer,
    first_difference,
    longest_gap_s,
    read_answer,
)
from fleet.lab.faults.clients import Gateways, ResumableStream
from fleet.lab.faults.errors import ChaosError
from fleet.lab.faults.load import ChaosLoad, Outcome
from fleet.lab.faults.options import SHORT_CREDIT, ChaosOptions, chaos_overrides, make_plan
from fleet.lab.faults.requests import is_sampled, make_bodies
from fleet.lab.faults.schedule import (
    CLIENTS,
    KINDS,
    LONG_LEASES,
    PROCESS_KINDS,
    REDIS,
    REDIS_KINDS,
    SHORT_LEASES,
    FaultKind,
    Moment,
    draw_faults,
)
from fleet.lab.faults.slow import SlowGateways, SlowReaders
from tests.support import REPO
from tests.unit.test_bench_run import CannedGateway, fake_gateway

ROLES = ("thinker", "talker", "conductor")
OPTIONS = ChaosOptions(seed=3, requests=4, concurrency=2, spacing_s=1.0)
CONFIG = FleetConfig()
SPLIT = load_config(REPO / "configs" / "talker_pd.yaml")


def events(text: str, pcm: bytes, *, end: str = "data: [DONE]\n\n") -> bytes:
    audio = b64encode(pcm).decode()
    return (
        f'data: {{"choices":[{{"delta":{{"content":"{text}"}}}}]}}\n\n'
        f'data: {{"choices":[{{"delta":{{"audio":{{"id":"a","data":"{audio}"}}}}}}]}}\n\n{end}'
    ).encode()


@settings(deadline=None)
@given(
    st.integers(0, 10_000),
    st.integers(1, 40),
    st.sampled_from([KINDS, PROCESS_KINDS, (FaultKind.KILL,), (FaultKind.STOP, FaultKind.TERM)]),
)
def test_schedule_is_fixed_by_its_seed_and_balanced(
    seed: int, kills: int, kinds: tuple[FaultKind, ...]
) -> None:
    faults = draw_faults(seed, kills, ROLES, kinds, 2.0)
    assert len(faults) == kills and faults == draw_faults(seed, kills, ROLES, kinds, 2.0)
    assert all(1.0 <= fault.pause_s <= 3.0 for fault in faults)
    for first in range(0, kills - len(ROLES) + 1, len(ROLES)):
        assert {fault.role for fault in faults[first : first + len(ROLES)]} == set(ROLES)
    whole_round = len(ROLES) * len(kinds)
    if kills >= whole_round:
        assert set(
            Counter((fault.role, fault.kind) for fault in faults[:whole_round]).values()
        ) == {1}


@given(st.integers(0, 10_000), st.integers(2, 40))
def test_every_other_fault_in_a_role_waits_for_its_moment(seed: int, kills: int) -> None:
    moments = {"thinker": Moment.HAND_OFF, "talker": Moment.SAVE}
    faults = draw_faults(seed, kills, ROLES, KINDS, 2.0, moments)
    for role in ROLES:
        assert {fault.moment for fault in faults if fault.role == role} <= {
            Moment.ANY,
            moments.get(role),
        }
        waits = [fault.moment is not Moment.ANY for fault in faults if fault.role == role]
        expected = [not waits[0], waits[0]] if waits and role != "conductor" else [False, False]
        assert all(wait == expected[at % 2 == 0] for at, wait in enumerate(waits))


@given(st.integers(0, 10_000), st.integers(1, 60))
def test_pauses_are_short_and_long_and_of_one_process_and_of_all_workers(
    seed: int, kills: int
) -> None:
    faults = draw_faults(seed, kills, ROLES, (FaultKind.PAUSE, FaultKind.HANG), 2.0)
    assert all(
        fault.leases == 0 and not fault.in_all_workers
        for fault in faults
        if fault.kind is FaultKind.HANG
    )
    for role in ROLES:
        pauses = [fault for fault in faults if fault.role == role and fault.kind is FaultKind.PAUSE]
        short = [SHORT_LEASES[0] <= pause.leases <= SHORT_LEASES[1] for pause in pauses]
        assert all(
            is_short or LONG_LEASES[0] <= pause.leases <= LONG_LEASES[1]
            for pause, is_short in zip(pauses, short, strict=True)
        )
        assert all(one != other for one, other in zip(short, short[1:], strict=False))
        combined = {
            (is_short, pause.in_all_workers) for pause, is_short in zip(pauses, short, strict=True)
        }
        if role == "conductor":
            assert not any(pause.in_all_workers for pause in pauses)
        elif len(pauses) >= 4:
            assert len(combined) == 4


def test_every_kind_of_fault_is_in_all() -> None:
    plan = make_plan(replace(OPTIONS, how="all"), CONFIG)
    assert set(plan.kinds) == set(PROCESS_KINDS) >= {FaultKind.PAUSE, FaultKind.HANG}
    assert set(plan.redis_kinds) == set(REDIS_KINDS) and plan.has_silent_gateways
    scheduled = Counter((fault.role, fault.kind) for fault in plan.schedule())
    assert all(scheduled[role, kind] == 1 for role in plan.roles for kind in PROCESS_KINDS)
    chosen = make_plan(replace(OPTIONS, how="hang,pause", roles="thinker"), CONFIG)
    assert chosen.kinds == (FaultKind.PAUSE, FaultKind.HANG) and not chosen.redis_kinds


def test_hang_is_refused_where_no_keeper_ends_it() -> None:
    config = load_config(None, ("lease.end_hung_processes=false",))
    with pytest.raises(ChaosError, match="--how hang: nothing ends a hung process in this fleet"):
        make_plan(replace(OPTIONS, how="hang"), config)


def test_plan_of_some_minutes_has_more_faults_than_fit_unless_their_number_is_given() -> None:
    plan = make_plan(replace(OPTIONS, minutes=30.0, how="all"), CONFIG)
    assert plan.limit_s == 1800 and plan.total_faults == len(plan.schedule()) == 1800
    assert make_plan(replace(OPTIONS, minutes=30.0, kills=7), CONFIG).total_faults == 7
    assert make_plan(OPTIONS, CONFIG).limit_s is None
    with pytest.raises(ChaosError, match="--minutes -1: give minutes"):
        make_plan(replace(OPTIONS, minutes=-1), CONFIG)


def test_default_plan_has_each_fault_kind_once_per_role() -> None:
    plan = make_plan(OPTIONS, CONFIG)
    assert plan.roles == ("thinker", "talker", "code2wav", "conductor", "web")
    assert plan.num_faults == 15 and plan.kinds == KINDS and not plan.moments and not plan.num_saved


def test_faults_of_redis_are_drawn_from_the_seed_beside_those_of_processes() -> None:
    plan = make_plan(replace(OPTIONS, how="kill,redis", kills_per_role=2), CONFIG)
    faults = plan.schedule()
    assert faults == plan.schedule() and len(faults) == plan.total_faults == 2 * 5 + 2 * len(
        REDIS_KINDS
    )
    assert Counter(fault.kind for fault in faults if fault.role == REDIS) == dict.fromkeys(
        REDIS_KINDS, 2
    )
    assert (
        faults
        != make_plan(
            replace(OPTIONS, how="kill,redis", kills_per_role=2, seed=4), CONFIG
        ).schedule()
    )
    assert 0 < sum(fault.role == REDIS for fault in faults[:16]) < 16, "the two are mixed"


def test_faults_of_redis_alone_have_no_target_among_processes() -> None:
    plan = make_plan(replace(OPTIONS, how="oom,tail", kills=4), CONFIG)
    assert [fault.role for fault in plan.schedule()] == [REDIS] * 4
    assert not plan.kinds and not plan.has_second_gateway
    assert make_plan(replace(OPTIONS, how="partition"), CONFIG).has_second_gateway


def test_span_workers_of_a_divided_stage_are_a_role_with_faults_in_saves() -> None:
    spans = ("graph=text", "stages.lm.spans={anchor: '0:0', workers: ['1:output']}")
    divided = load_config(None, spans)
    plan = make_plan(replace(OPTIONS, roles="lm,lm.span", kills_per_role=2), divided)
    assert plan.roles == ("lm", "lm.span") and plan.moments == {
        "lm": Moment.SAVE,
        "lm.span": Moment.SAVE,
    }
    assert plan.num_saved == 2 and plan.saved_stages == ("lm",)
    without = make_plan(replace(OPTIONS, roles="lm,lm.span", saves=0), divided)
    assert not without.moments and not without.saved_stages
    assert make_plan(replace(OPTIONS, saves=3), load_config(None, ("graph=text",))).moments == {
        "lm": Moment.SAVE
    }
    config = load_config(None, (*spans, *chaos_overrides(divided, ())))
    assert {role.name: role.replicas for role in config.roles()} == {"lm": 2, "lm.span": 2}


def test_halves_of_a_split_stage_are_roles_with_own_replicas() -> None:
    plan = make_plan(replace(OPTIONS, kills_per_role=5), SPLIT)
    assert plan.roles == (
        "thinker",
        "talker.prefill",
        "talker.decode",
        "code2wav",
        "conductor",
        "web",
    )
    assert (
        plan.moments == {"talker.prefill": Moment.HAND_OFF, "talker.decode": Moment.HAND_OFF}
        and plan.num_faults == 30
    )
    fleet = load_config(REPO / "configs" / "talker_pd.yaml", plan.options.overrides)
    assert {role.replicas for role in fleet.roles()} == {2}


def test_conversations_are_saved_only_where_a_stage_caches_them() -> None:
    for overrides in (("engine=fake",), ("graph=text", "lease.prefix_cache_s=0")):
        with pytest.raises(
            ChaosError,
            match="--saves 1: no stage of this fleet has conversations that can be saved",
        ):
            make_plan(replace(OPTIONS, saves=1), load_config(None, overrides))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"requests": 0}, "--requests 0: give a whole number of at least 1"),
        (
            {"kills": 3, "kills_per_role": 3},
            "--kills-per-role sets the number of faults; leave out --kills",
        ),
        (
            {"concurrency": 65},
            "--concurrency 65: this fleet admits 64 requests at a time; add --set "
            "limits.max_requests=65",
        ),
        ({"voice": -1}, "--voice -1: give a number of voice sessions"),
        ({"spacing_s": float("nan")}, "--spacing nan: give seconds"),
        (
            {"roles": "jobs"},
            "--roles jobs: 'jobs' is unknown; use one or more of thinker, talker, code2wav, "
            "conductor, web",
        ),
        ({"how": "nuke"}, "--how nuke: 'nuke' is unknown; use one or more of kill, stop, term"),
        ({"how": ","}, "--how ',': the list is empty"),
        ({"json": Path("/nowhere/x.json")}, "--json /nowhere/x.json: there is no folder /nowhere"),
    ],
)
def test_invalid_chaos_option_is_named_with_the_fix(
    changed: dict[str, object], message: str
) -> None:
    with pytest.raises((ChaosError, BadInput)) as caught:
        make_plan(replace(OPTIONS, **changed), CONFIG)  # pyright: ignore[reportArgumentType]
    assert caught.value.message.startswith(message) and "\n" not in caught.value.message


def test_user_overrides_win_over_chaos_overrides() -> None:
    plan = make_plan(
        replace(OPTIONS, overrides=("numerics=fast", "stages.thinker.replicas=3")), CONFIG
    )
    assert plan.options.overrides.index("numerics=invariant") < plan.options.overrides.index(
        "numerics=fast"
    )
    assert plan.options.overrides.index("stages.thinker.replicas=2") < plan.options.overrides.index(
        "stages.thinker.replicas=3"
    )


def test_requests_follow_from_the_seed_and_half_are_sampled() -> None:
    bodies = make_bodies("m", CONFIG, OPTIONS)
    assert bodies == make_bodies("m", CONFIG, OPTIONS)
    assert len(set(bodies)) == 4 and bodies != make_bodies("m", CONFIG, replace(OPTIONS, seed=4))
    decoded = [msgspec.json.decode(body) for body in bodies]
    assert [body["temperature"] for body in decoded] == [0.0, 0.9, 0.0, 0.9]
    assert [is_sampled(number) for number in range(4)] == [False, True, False, True]
    assert all(body["modalities"] == ["text", "audio"] for body in decoded)
    assert all(body["stream_options"]["include_event_ids"] for body in decoded), (
        "an answer is resumed from its last event id"
    )
    assert ["temperature" in body["fleet"]["talker"] for body in decoded] == [
        True,
        False,
        True,
        False,
    ]


def test_answer_is_decoded_equally_from_pieces_of_any_size() -> None:
    raw = events("né", b"\x01\x00\x02\x00")
    answer = read_answer([(0.1 * at, raw[at : at + 1]) for at in range(len(raw))])
    assert (answer.text, answer.audio) == ("né".encode(), b"\x01\x00\x02\x00") and len(
        answer.chunks_s
    ) == 1
    assert answer.stalled_s == 0


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (events("a", b"", end=""), "stopped before its end, after 2 events"),
        (
            events(
                "a", b"", end='data: {"error":{"message":"3 workers died"}}\n\ndata: [DONE]\n\n'
            ),
            "3 workers died",
        ),
    ],
)
def test_incomplete_or_failed_stream_is_refused(raw: bytes, message: str) -> None:
    with pytest.raises(StreamError, match=message):
        read_answer([(0.1, raw)])


def answer(text: bytes = b"abc", audio: bytes = b"1234") -> ReceivedAnswer:
    return ReceivedAnswer(text=text, audio=audio, chunks_s=(0.1,))


@pytest.mark.parametrize(
    ("got", "difference"),
    [
        (answer(), None),
        (
            answer(audio=b"1294"),
            Difference(medium="audio", offset=2, expected_bytes=4, received_bytes=4, peak=6),
        ),
        (
            answer(audio=b"12"),
            Difference(medium="audio", offset=2, expected_bytes=4, received_bytes=2),
        ),
        (
            answer(text=b"abcd", audio=b""),
            Difference(medium="text", offset=3, expected_bytes=3, received_bytes=4),
        ),
    ],
)
def test_first_difference_finds_the_first_differing_byte(
    got: ReceivedAnswer, difference: Difference | None
) -> None:
    assert first_difference(answer(), got) == difference


def test_difference_of_few_steps_is_rounding() -> None:
    def compared(ours: list[int], theirs: list[int], text: bytes = b"abc") -> Difference:
        a, b = (np.array(samples, "<i2").tobytes() for samples in (ours, theirs))
        found = first_difference(answer(audio=a), answer(text, b))
        assert found is not None
        return found

    assert compared([-32768, 5], [-32768, 3]).is_rounding
    assert compared([-32768, 5], [32767, 5]).peak == 65535, "the widest step does not overflow"
    assert not compared([0, 100], [0, 900]).is_rounding
    assert (
        not compared([1, 2], [1]).is_rounding and not compared([1, 2], [1, 2], b"abd").is_rounding
    )


def test_longest_gap_needs_two_chunks() -> None:
    assert longest_gap_s((0.5,)) is None
    assert longest_gap_s((0.0, 1.0, 1.5)) == 1.0


@contextmanager
def answering(stream: bytes) -> Iterator[CannedGateway]:
    with fake_gateway() as gateway:
        gateway.stream = stream
        gateway.gate.set()
        yield gateway


def request_once(
    gateway: CannedGateway, expected: ReceivedAnswer | None = None, *, may_forget: bool = False
) -> Outcome:
    load = ChaosLoad(
        Gateways([gateway.url]),
        [b"0"],
        [expected] if expected else None,
        may_forget=may_forget,
        once=True,
    )
    load.start(1, lambda: None)
    (outcome,) = load.finish()
    return outcome


def test_load_repeats_requests_and_compares_every_answer() -> None:
    with answering(events("abc", b"1234")) as gateway:
        learning = ChaosLoad(Gateways([gateway.url]), [b"0", b"1", b"2"], once=True)
        learning.start(2, lambda: None)
        assert [one.lost for one in learning.finish()] == ["", "", ""]
        assert sorted(gateway.bodies) == [b"0", b"1", b"2"]

        expected = [learning.answers[0], answer(audio=b"1235"), learning.answers[2]]
        load = ChaosLoad(Gateways([gateway.url]), [b"0", b"1", b"2"], expected)
        load.start(2, lambda: None)
        outcomes = load.finish()
    assert len(outcomes) >= 3 and {one.request for one in outcomes} == {0, 1, 2}
    for one in outcomes:
        assert not one.lost and (one.difference is not None) == (one.request == 1)


def test_every_answer_is_read_again_and_must_not_change() -> None:
    with answering(events("abc", b"1234")) as gateway:
        gateway.again = events("abc", b"1934")
        outcome = request_once(gateway, answer())
        assert not outcome.lost and outcome.difference is None
        assert outcome.changed is not None and outcome.changed.offset == 1

        gateway.again = events("abc", b"1234", end="")
        outcome = request_once(gateway, answer())
    assert outcome.lost.startswith(
        "complete, but not when it was read once more: the stream stopped before its end"
    )


def test_refused_request_is_lost() -> None:
    with answering(b'{"error":{"message":"max_tokens: too many"}}') as gateway:
        gateway.status = 400
        assert "status 400: max_tokens: too many" in request_once(gateway).lost


def test_incomplete_event_is_dropped_and_last_id_set() -> None:
    whole = b"data: first\n\nid: 2.0\ndata: second\n\n"
    stream = ResumableStream(
        sent_s=0.0,
        reached_s=0.0,
        pieces=[(0.1, whole[:30]), (0.2, whole[30:] + b"id: 4.0\nda"), (0.3, b"ta: th")],
    )
    stream.drop_incomplete()
    assert b"".join(piece for _, piece in stream.pieces) == whole and stream.last_id == "2.0"
    nothing = ResumableStream(sent_s=0.0, reached_s=0.0, pieces=[(0.1, b"data: fi")])
    nothing.drop_incomplete()
    assert not nothing.pieces and nothing.last_id == ""


def test_answer_that_redis_forgot_is_lost_unless_the_faults_may_cause_it() -> None:
    with answering(events("abc", b"")) as gateway:
        gateway.again_status = 404
        expected = read_answer([(0.1, gateway.stream)])
        lost = request_once(gateway, expected)
        assert (
            lost.lost.startswith("complete, but not when it was read once more:")
            and not lost.unread
        )
        unread = request_once(gateway, expected, may_forget=True)
        assert unread.unread and not unread.lost and not unread.difference
        gateway.again_status = 500
        assert request_once(gateway, expected, may_forget=True).lost, "another failure counts"
    options = [
        replace(OPTIONS, how=how)
        for how in ("kill", "readonly,partition", "oom", "tail", "failover")
    ]
    assert [make_plan(each, CONFIG).may_forget for each in options] == [
        False,
        False,
        True,
        True,
        True,
    ]


def test_slow_readers_are_a_kind_of_their_own_and_one_of_all() -> None:
    slow = make_plan(replace(OPTIONS, how="slow", kills_per_role=3), CONFIG)
    assert [(fault.role, fault.kind) for fault in slow.schedule()] == [
        (CLIENTS, FaultKind.SLOW)
    ] * 3
    assert not slow.kinds and not slow.redis_kinds and slow.num_readers == 16 + 2
    assert SHORT_CREDIT in slow.options.overrides
    every = make_plan(replace(OPTIONS, how="all"), CONFIG)
    assert Counter(fault.kind for fault in every.schedule()) == {
        **dict.fromkeys(PROCESS_KINDS, len(every.roles)),
        **dict.fromkeys((*REDIS_KINDS, FaultKind.SLOW), 1),
    }
    some = make_plan(replace(OPTIONS, how="kill,redis", kills=12), CONFIG)
    assert not some.num_slow and SHORT_CREDIT not in some.options.overrides
    few = make_plan(replace(OPTIONS, how="slow"), load_config(None, ("limits.max_requests=10",)))
    assert few.num_readers == 10 - OPTIONS.concurrency, "the fleet must admit them all"


def test_slow_readers_read_little_until_they_hurry_and_every_byte_is_compared() -> None:
    with answering(events("abc", b"1234")) as gateway:
        expected = read_answer([(0.1, gateway.stream)])
        for answers, differ in (([expected], False), ([answer(audio=b"1235")], True)):
            slow = SlowReaders(lambda: SlowGateways([gateway.url]), [b"0"], answers, 3)
            hurried_s, requests = slow.read(time.perf_counter, slow_s=0.2)
            assert hurried_s <= time.perf_counter() and requests == ["req-1"] * 3
            assert [outcome.request for outcome in slow.outcomes] == [0] * 3
            assert [bool(outcome.difference) for outcome in slow.outcomes] == [differ] * 3
            assert not any(outcome.lost for outcome in slow.outcomes)
