"""Voice sessions in Redis: a session has one holder at a time, and belongs to the credential that
opened it; the number of sessions per client secret is bounded across the fleet.
"""

from typing import cast

import redis

from fleet.control import keys, scripts
from fleet.control.connect import pairs, run, text
from fleet.core.ids import WorkerId
from tests.control_plane import GATEWAY, OTHER_GATEWAY, Control

KEEP_MS = 60_000


def hold(
    control: Control,
    session: str,
    owner: str = "",
    *,
    new: bool = False,
    holder: WorkerId = GATEWAY,
    bound: int = 1,
) -> list[object]:
    call = scripts.hold_voice(session, holder, KEEP_MS, owner, new=new, bound=bound)
    return cast("list[object]", run(control.client, call))


def save(
    control: Control,
    session: str,
    epoch: object,
    fields: dict[str, bytes],
    gone: tuple[str, ...] = (),
    *,
    owner: str = "",
) -> str:
    return control.run(scripts.save_voice(session, int(text(epoch)), KEEP_MS, owner, fields, gone))


def end(control: Control, session: str, epoch: object = None) -> str:
    return control.run(scripts.end_voice(session, None if epoch is None else int(text(epoch))))


def test_voice_session_passes_to_its_next_holder_and_refuses_the_first(control: Control) -> None:
    assert not hold(control, "sess_1"), "the session does not exist yet"
    epoch, *_ = hold(control, "sess_1", new=True)
    assert not hold(control, "sess_1", new=True), "a session id is opened once"
    assert save(control, "sess_1", epoch, {"state": b"a", "clip:1": b"b"}) == "ok"
    assert save(control, "sess_1", epoch, {"state": b"c"}, ("clip:1",)) == "ok"
    next_epoch, _, fields, _ = hold(control, "sess_1", holder=OTHER_GATEWAY)
    assert int(text(next_epoch)) > int(text(epoch))
    held = pairs(fields)
    assert (
        held["state"] == b"c" and "clip:1" not in held and held["holder"] == OTHER_GATEWAY.encode()
    )
    assert (
        save(control, "sess_1", epoch, {"state": b"late"})
        == end(control, "sess_1", epoch)
        == "stale"
    )
    assert save(control, "sess_1", next_epoch, {"view": b"x"}) == "ok"
    assert hold(control, "sess_1")


def test_ended_voice_session_is_unknown_to_all_gateways(control: Control) -> None:
    epoch, *_ = hold(control, "sess_1", new=True)
    assert end(control, "sess_1") == "ok", "the API needs no epoch"
    assert save(control, "sess_1", epoch, {"state": b"late"}) == "stale" and not hold(
        control, "sess_1", holder=OTHER_GATEWAY
    )
    assert end(control, "sess_1") == "stale"


def test_voice_session_expires(control: Control) -> None:
    assert hold(control, "sess_1", new=True)
    client: redis.Redis = control.client
    kept_ms = client.pttl(keys.voice("sess_1"))
    assert isinstance(kept_ms, int) and 0 < kept_ms <= KEEP_MS
    assert client.zcard(keys.VOICES) == 1


def test_save_at_a_higher_epoch_than_that_of_redis_is_accepted_and_raises_it(
    control: Control,
) -> None:
    """Redis lost the call that gave the session to its holder. The holder's save at the higher
    epoch is accepted and raises the epoch in Redis, so that the former holder does not get the
    session back.
    """
    former, *_ = hold(control, "sess_1", new=True)
    before = control.client.hgetall(keys.voice("sess_1"))
    held, *_ = hold(control, "sess_1", holder=OTHER_GATEWAY)
    control.client.hset(keys.voice("sess_1"), mapping={**cast("dict[bytes, bytes]", before)})
    assert save(control, "sess_1", held, {"state": b"x"}) == "restored"
    assert save(control, "sess_1", held, {"state": b"y"}) == "ok"
    assert (
        save(control, "sess_1", former, {"state": b"late"})
        == end(control, "sess_1", former)
        == "stale"
    )


def test_save_restores_a_lost_session_unless_it_has_ended(control: Control) -> None:
    epoch, *_ = hold(control, "sess_1", "/1", new=True)
    control.client.delete(keys.voice("sess_1"), keys.VOICES, keys.voices_of("/1"))
    assert save(control, "sess_1", epoch, {"state": b"x"}, owner="/1") == "restored"
    again, _, fields, _ = hold(control, "sess_1", "/1")
    assert pairs(fields)["state"] == b"x" and int(text(again)) > int(text(epoch))
    assert control.client.zcard(keys.VOICES) == control.client.zcard(keys.voices_of("/1")) == 1
    assert end(control, "sess_1", again) == "ok"
    assert save(control, "sess_1", again, {"state": b"late"}, owner="/1") == "stale"
    assert not control.client.exists(keys.voice("sess_1"))


API, SECRET, ANOTHER = "", "/1a2b", "/3c4d"
HOUR_US = 3_600_000_000


def open_session(
    control: Control, session: str, owner: str, *, holder: WorkerId = GATEWAY, bound: int = 1
) -> bool:
    return len(hold(control, session, owner, new=True, holder=holder, bound=bound)) > 1


def resume_session(control: Control, session: str, owner: str) -> bool:
    return len(hold(control, session, owner)) > 1


def sessions_of(control: Control, owner: str) -> set[str]:
    return {
        text(name)
        for name in cast("list[bytes]", control.client.zrange(keys.voices_of(owner), 0, -1))
    }


def test_session_is_unknown_to_every_owner_but_its_own(control: Control) -> None:
    assert open_session(control, "by-key", API) and open_session(control, "by-secret", SECRET)
    for session, owner in (("by-key", SECRET), ("by-secret", ANOTHER), ("by-secret", API)):
        assert hold(control, session, owner) == hold(control, "no-such", owner) == []
    assert resume_session(control, "by-key", API) and resume_session(control, "by-secret", SECRET)


def test_secret_sessions_are_bounded_over_all_gateways(control: Control) -> None:
    control.register(OTHER_GATEWAY, "")
    assert open_session(control, "a", SECRET)
    assert hold(control, "b", SECRET, new=True, holder=OTHER_GATEWAY) == [b"full"]
    assert not control.client.exists(keys.voice("b")), "a refused session leaves nothing"
    assert open_session(control, "c", ANOTHER) and all(
        open_session(control, f"key-{number}", API) for number in range(5)
    )
    assert open_session(control, "b", SECRET, bound=2) and hold(
        control, "d", SECRET, new=True, bound=2
    ) == [b"full"]


def test_secret_opens_another_session_once_its_session_has_ended(control: Control) -> None:
    held = hold(control, "a", SECRET, new=True)
    assert end(control, "a", held[0]) == "ok"
    assert open_session(control, "b", SECRET)
    assert end(control, "b") == "ok"
    assert open_session(control, "c", SECRET) and sessions_of(control, SECRET) == {"c"}


def test_resumed_session_is_not_counted_twice(control: Control) -> None:
    assert open_session(control, "a", SECRET, bound=2) and resume_session(control, "a", SECRET)
    assert open_session(control, "b", SECRET, bound=2) and not open_session(
        control, "c", SECRET, bound=2
    )


def test_longest_absent_session_is_replaced_first(control: Control) -> None:
    first, second = (hold(control, name, SECRET, new=True, bound=2) for name in ("a", "b"))
    assert (
        save(control, "a", first[0], {"away_us": b"20"})
        == save(control, "b", second[0], {"away_us": b"10"})
        == "ok"
    )
    replaced = hold(control, "c", SECRET, new=True, bound=2)
    assert replaced[3] == [b"b"] and sessions_of(control, SECRET) == {"a", "c"}
    assert save(control, "b", second[0], {}) == "stale", "the write notifies its gateway"
    assert not resume_session(control, "b", SECRET)
    assert resume_session(control, "a", SECRET)
    assert not open_session(control, "d", SECRET, bound=2), "a client that returned is not absent"


def test_session_of_a_dead_gateway_is_replaced(control: Control) -> None:
    control.register(OTHER_GATEWAY, "")
    assert open_session(control, "a", SECRET, holder=OTHER_GATEWAY) and not open_session(
        control, "b", SECRET
    )
    control.client.zadd(keys.WORKERS, {OTHER_GATEWAY: 1})
    assert not open_session(control, "b", SECRET), (
        "Redis's clock may have been set: the gateway is not fenced"
    )
    control.kill(OTHER_GATEWAY)
    assert open_session(control, "b", SECRET) and sessions_of(control, SECRET) == {"b"}


def test_unrenewed_session_is_not_counted(control: Control) -> None:
    """An unrenewed session is not counted: a session's record and its count expire together, even
    if its gateway is gone.
    """
    client: redis.Redis = control.client
    assert open_session(control, "a", SECRET)
    assert 0 < client.pttl(keys.voices_of(SECRET)) <= KEEP_MS
    client.zadd(keys.voices_of(SECRET), {"a": 1})
    assert open_session(control, "b", SECRET) and sessions_of(control, SECRET) == {"b"}


def test_expired_sessions_leave_the_list_without_being_read(control: Control) -> None:
    control.client.zadd(keys.VOICES, {"expired": 1})
    assert open_session(control, "a", API)
    assert control.client.zrange(keys.VOICES, 0, -1) == [b"a"]


def test_session_age_counts_from_its_beginning_on_the_clock_of_redis(control: Control) -> None:
    """A session's age counts from its beginning on Redis's clock. A queued session's age restarts
    when it is held again; a session with stored state keeps its start.
    """
    held = hold(control, "a", API, new=True)
    began_us = int(text(control.client.hget(keys.voice("a"), "started_us"))) - HOUR_US
    control.client.hset(keys.voice("a"), "started_us", str(began_us))
    assert int(text(hold(control, "a", API)[1])) < HOUR_US, "the session was only queued"
    control.client.hset(keys.voice("a"), mapping={"started_us": str(began_us), "state": b"x"})
    again = hold(control, "a", API)
    assert int(text(again[1])) >= HOUR_US and pairs(again[2])["state"] == b"x"
    assert int(text(again[0])) > int(text(held[0]))


def test_operator_end_is_shown_to_the_owner_alone(control: Control) -> None:
    assert open_session(control, "a", SECRET) and open_session(control, "b", API)
    assert end(control, "a") == end(control, "b") == "ok"
    ended = {name: text(control.client.get(keys.voice_ended(name))) for name in ("a", "b")}
    assert ended == {"a": f"1{SECRET}", "b": "1"}
