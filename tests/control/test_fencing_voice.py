"""A voice session has one holder at a time: a new holder ends the right of the former one."""

from typing import cast

import redis

from fleet.control import keys, scripts
from fleet.control.connect import pairs, run, text
from fleet.core.ids import WorkerId
from tests.control_plane import Control

OTHER = WorkerId("gateway@other:1:b")
FIRST = WorkerId("gateway@test:1:a")
KEEP_MS = 60_000


def hold(
    control: Control,
    session: str,
    owner: str = "",
    *,
    new: bool = False,
    holder: WorkerId = FIRST,
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
    next_epoch, _, fields, _ = hold(control, "sess_1", holder=OTHER)
    assert int(text(next_epoch)) > int(text(epoch))
    held = pairs(fields)
    assert held["state"] == b"c" and "clip:1" not in held and held["holder"] == OTHER.encode()
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
        control, "sess_1", holder=OTHER
    )
    assert end(control, "sess_1") == "stale"


def test_voice_session_expires(control: Control) -> None:
    assert hold(control, "sess_1", new=True)
    client: redis.Redis = control.client
    assert 0 < int(client.pttl(keys.voice("sess_1"))) <= KEEP_MS  # pyright: ignore[reportArgumentType]
    assert client.zcard(keys.VOICES) == 1


def test_save_at_a_higher_epoch_than_that_of_redis_is_accepted_and_raises_it(
    control: Control,
) -> None:
    """Redis lost the call that gave the session to its holder: the former holder must not get it
    back.
    """
    former, *_ = hold(control, "sess_1", new=True)
    before = control.client.hgetall(keys.voice("sess_1"))
    held, *_ = hold(control, "sess_1", holder=OTHER)
    control.client.hset(keys.voice("sess_1"), mapping={**cast("dict[bytes, bytes]", before)})
    assert save(control, "sess_1", held, {"state": b"x"}) == "restored"
    assert save(control, "sess_1", held, {"state": b"y"}) == "ok"
    assert (
        save(control, "sess_1", former, {"state": b"late"})
        == end(control, "sess_1", former)
        == "stale"
    )


def test_save_restores_a_lost_session_unless_it_has_ended(control: Control) -> None:
    epoch, *_ = hold(control, "sess_1", "secret:1", new=True)
    control.client.delete(keys.voice("sess_1"), keys.VOICES, keys.voices_of("secret:1"))
    assert save(control, "sess_1", epoch, {"state": b"x"}, owner="secret:1") == "restored"
    again, _, fields, _ = hold(control, "sess_1", "secret:1")
    assert pairs(fields)["state"] == b"x" and int(text(again)) > int(text(epoch))
    assert (
        control.client.zcard(keys.VOICES) == control.client.zcard(keys.voices_of("secret:1")) == 1
    )
    assert end(control, "sess_1", again) == "ok"
    assert save(control, "sess_1", again, {"state": b"late"}, owner="secret:1") == "stale"
    assert not control.client.exists(keys.voice("sess_1"))
