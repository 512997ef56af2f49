"""Limits of API keys in Redis: live requests, voice sessions and audio are counted once, over all
gateways, until their end.
"""

from typing import cast

import pytest

from fleet.config.api_keys import KeyLimits
from fleet.control import keys, scripts
from fleet.control.connect import run, text, texts
from fleet.core.ids import EdgeName, Epoch, RequestId, WorkerId
from fleet.core.request import AudioClip, RequestSpec
from tests.control_plane import GATEWAY, OTHER_GATEWAY, ROLE, STAGE, TEXT, Control

PHONE, PAGE = "phone", "page"
SPEECH = EdgeName("speech")


def submit(
    control: Control, request: str, limits: KeyLimits, key: str = PHONE, **fields: object
) -> list[str]:
    spec = RequestSpec(
        id=RequestId(request),
        graph="text",
        prompt_ids=(1,),
        outputs=(TEXT,),
        key=key,
        is_counted=True,
        **fields,  # pyright: ignore[reportArgumentType]
    )
    call = scripts.submit(
        spec,
        None,
        bound=100,
        stages=[STAGE],
        edges=[TEXT, SPEECH],
        audio=[SPEECH],
        gateway=GATEWAY,
        roles=[ROLE],
        limits=limits,
    )
    return texts(run(control.client, call))


def admitted(control: Control, limits: KeyLimits, key: str = PHONE) -> str:
    """Ask whether a request of the key would be admitted; return the first word of the answer."""
    call = scripts.admission(
        RequestId("asked"),
        bound=100,
        gateway=GATEWAY,
        roles=[ROLE],
        grace_us=0,
        key=key,
        limits=limits,
    )
    return control.run(call)


@pytest.fixture
def fleet(control: Control) -> Control:
    """A control plane with two gateways, a worker, and a request that counts towards no key."""
    control.register(OTHER_GATEWAY, "")
    return control


def live(control: Control) -> dict[bytes, bytes]:
    return cast("dict[bytes, bytes]", control.client.hgetall(keys.LIVE_KEYS))


def audio_ms(control: Control) -> dict[bytes, bytes]:
    """Return the audio that each key has used, which is stored for less than three days."""
    names = cast("list[bytes]", control.client.keys(keys.PREFIX + "key_audio:*"))
    assert all(0 < control.client.ttl(name) <= 2 * 86400 for name in names)
    return {
        field: value
        for name in names
        for field, value in cast("dict[bytes, bytes]", control.client.hgetall(name)).items()
    }


def test_key_has_no_more_live_requests_than_its_limit(fleet: Control) -> None:
    two = KeyLimits(max_requests=2)
    assert [submit(fleet, f"phone-{number}", two)[0] for number in range(3)] == [
        "ok",
        "ok",
        "key_limit",
    ]
    assert submit(fleet, "phone-3", two) == ["key_limit", "max_requests", "1"]
    assert admitted(fleet, two) == "key_limit" and admitted(fleet, two, PAGE) == "ok"
    assert submit(fleet, "page-1", two, PAGE)[0] == "ok"
    assert not fleet.client.exists(keys.request(RequestId("phone-3")))
    assert fleet.abort(RequestId("phone-0")) == "ok" != fleet.abort(RequestId("phone-0"))
    assert live(fleet) == {b"phone": b"1", b"page": b"1"}
    assert admitted(fleet, two) == submit(fleet, "phone-4", two)[0] == "ok"
    for request in ("phone-1", "phone-4", "page-1"):
        fleet.abort(RequestId(request))
    assert live(fleet) == {}


def test_requests_of_a_dead_gateway_are_released_when_they_are_abandoned(fleet: Control) -> None:
    one = KeyLimits(max_requests=1)
    assert submit(fleet, "phone-0", one)[0] == "ok"
    fleet.kill(GATEWAY)
    assert admitted(fleet, one) == "key_limit", "another gateway may continue the answer"
    assert fleet.run(scripts.abandon(fleet.leader, 0)) == "ok"
    assert live(fleet) == {} and admitted(fleet, one) == "ok"


def test_restored_request_counts_towards_its_key(fleet: Control) -> None:
    spec = RequestSpec(
        id=RequestId("phone-0"), graph="text", prompt_ids=(1,), key=PHONE, is_counted=True
    )
    call = scripts.restore(
        spec, None, epoch=Epoch(10**16), stages=[STAGE], edges=[TEXT], gateway=GATEWAY
    )
    assert fleet.run(call) == "ok" and live(fleet) == {b"phone": b"1"}


def test_request_that_is_not_counted_has_no_limit(fleet: Control) -> None:
    spec = RequestSpec(id=RequestId("phone-0"), graph="text", prompt_ids=(1,), key=PHONE)
    call = scripts.submit(
        spec, None, bound=9, stages=[STAGE], edges=[TEXT], gateway=GATEWAY, roles=[ROLE]
    )
    assert fleet.run(call) == "ok" and live(fleet) == {}
    assert admitted(fleet, KeyLimits(max_requests=1)) == "ok"


def test_audio_of_prompt_and_answer_counts_once_at_the_end(fleet: Control) -> None:
    clip = AudioClip(offset_samples=0, num_samples=24_000, rate_hz=16_000)
    ten = KeyLimits(audio_s_per_day=4)
    assert submit(fleet, "phone-0", ten, audio=(clip,), audio_hz=24_000)[0] == "ok"
    # Two seconds and a half of answer, as `append` counts them: items, bytes, rows, time.
    fleet.client.hset(keys.task(RequestId("phone-0"), STAGE), f"written:{SPEECH}", "3|99|60000|1")
    assert audio_ms(fleet) == {} and admitted(fleet, ten) == "ok"
    for _ in range(2):
        fleet.abort(RequestId("phone-0"))
    assert audio_ms(fleet) == {b"phone": b"4000"}
    refused = submit(fleet, "phone-1", ten)
    assert refused[:2] == ["key_limit", "audio_s_per_day"] and 0 < int(refused[2]) <= 86400
    assert admitted(fleet, ten) == "key_limit" and admitted(fleet, ten, PAGE) == "ok"
    assert admitted(fleet, KeyLimits(audio_s_per_day=5)) == "ok"


def hold(
    control: Control,
    session: str,
    owner: str,
    limits: KeyLimits,
    *,
    holder: WorkerId = GATEWAY,
    bound: int = 1,
) -> list[object]:
    call = scripts.hold_voice(session, holder, 60_000, owner, new=True, bound=bound, limits=limits)
    return cast("list[object]", run(control.client, call))


def save(control: Control, session: str, epoch: object, **fields: bytes) -> str:
    call = scripts.save_voice(session, int(text(epoch)), 60_000, PHONE, fields, ())
    return control.run(call)


def test_sessions_of_a_key_and_its_secrets_are_bounded_together(fleet: Control) -> None:
    two = KeyLimits(max_sessions=2)
    assert len(hold(fleet, "a", PHONE, two)) == 4
    assert len(hold(fleet, "b", f"{PHONE}/1a2b", two, holder=OTHER_GATEWAY)) == 4
    for owner in (PHONE, f"{PHONE}/3c4d"):
        assert hold(fleet, "c", owner, two) == [b"key_limit", b"max_sessions", 1]
    assert hold(fleet, "c", f"{PHONE}/1a2b", KeyLimits()) == [b"full"]
    assert len(hold(fleet, "d", PAGE, two)) == 4, "another key has its own limit"
    assert fleet.run(scripts.end_voice("b", None)) == "ok"
    assert len(hold(fleet, "c", PHONE, two)) == 4


def test_sessions_without_a_client_or_gateway_make_room(fleet: Control) -> None:
    one = KeyLimits(max_sessions=1)
    epoch = hold(fleet, "a", PHONE, one)[0]
    assert save(fleet, "a", epoch, away_us=b"10") == "ok"
    assert hold(fleet, "b", PHONE, one, holder=OTHER_GATEWAY)[3] == [b"a"]
    assert save(fleet, "a", epoch) == "stale"
    assert len(hold(fleet, "c", PHONE, one)) == 3
    fleet.kill(OTHER_GATEWAY)
    assert hold(fleet, "c", PHONE, one)[3] == [b"b"]


def test_time_of_a_session_counts_as_audio_while_its_client_is_there(fleet: Control) -> None:
    limits = KeyLimits(audio_s_per_day=10)
    epoch, voice = hold(fleet, "a", PHONE, limits)[0], keys.voice("a")

    def pass_time(seconds: int) -> None:
        counted_us = int(fleet.client.hget(voice, "counted_us") or 0)
        fleet.client.hset(voice, "counted_us", counted_us - seconds * 1_000_000)

    pass_time(100)
    assert save(fleet, "a", epoch) == "ok" and audio_ms(fleet) == {}, "it is only queued"
    save(fleet, "a", epoch, state=b"x")
    pass_time(6)
    assert save(fleet, "a", epoch) == "ok" and 6000 <= int(audio_ms(fleet)[b"phone"]) < 16_000
    save(fleet, "a", epoch, away_us=b"1")
    pass_time(100)
    again = cast(
        "list[object]",
        run(fleet.client, scripts.hold_voice("a", GATEWAY, 60_000, PHONE, new=False, bound=1)),
    )[0]
    assert int(audio_ms(fleet)[b"phone"]) < 16_000, "nobody was there"
    pass_time(6)
    assert save(fleet, "a", epoch) == "stale", "the former holder counts nothing"
    assert fleet.run(scripts.end_voice("a", int(text(again)))) == "ok"
    assert int(audio_ms(fleet)[b"phone"]) >= 12_000
    assert hold(fleet, "b", PHONE, limits)[:2] == [b"key_limit", b"audio_s_per_day"]
