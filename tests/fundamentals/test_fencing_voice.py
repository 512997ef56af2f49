"""A voice session has one holder at a time: a new holder ends the right of the former one."""

from typing import cast

import redis

from fleet.control import keys, scripts
from fleet.control.connect import pairs, run, text
from fleet.core.ids import WorkerId
from tests.fundamentals.control_plane import Control

OTHER = WorkerId("gateway@other:1:b")
FIRST = WorkerId("gateway@test:1:a")
KEEP_MS = 60_000


def hold(control: Control, holder: WorkerId, *, new: bool = False) -> tuple[int, dict[str, bytes]] | None:
    answer = cast("list[object]", run(control.client, scripts.hold_voice("sess_1", holder, KEEP_MS, "", new=new, bound=1)))
    return (int(text(answer[0])), pairs(answer[2])) if answer else None


def save(control: Control, epoch: int, fields: dict[str, bytes], gone: tuple[str, ...] = ()) -> object:
    return control.run(scripts.save_voice("sess_1", epoch, KEEP_MS, fields, gone))


def test_voice_session_passes_to_its_next_holder_and_refuses_the_first(control: Control) -> None:
    assert hold(control, FIRST) is None, "the session does not exist yet"
    held = hold(control, FIRST, new=True)
    assert held is not None and hold(control, FIRST, new=True) is None, "a session id is opened once"
    assert save(control, held[0], {"state": b"a", "clip:1": b"b"}) == "ok"
    assert save(control, held[0], {"state": b"c"}, ("clip:1",)) == "ok"
    next_held = hold(control, OTHER)
    assert next_held is not None and next_held[0] > held[0]
    assert next_held[1]["state"] == b"c" and "clip:1" not in next_held[1] and next_held[1]["holder"] == OTHER.encode()
    assert save(control, held[0], {"state": b"late"}) == "stale"
    assert control.run(scripts.end_voice("sess_1", held[0])) == "stale"
    assert save(control, next_held[0], {"view": b"x"}) == "ok"
    assert hold(control, FIRST) is not None


def test_ended_voice_session_is_unknown_to_all_gateways(control: Control) -> None:
    held = hold(control, FIRST, new=True)
    assert held is not None
    assert control.run(scripts.end_voice("sess_1", None)) == "ok", "the API needs no epoch"
    assert save(control, held[0], {"state": b"late"}) == "stale" and hold(control, OTHER) is None
    assert control.run(scripts.end_voice("sess_1", None)) == "stale"


def test_voice_session_expires(control: Control) -> None:
    held = hold(control, FIRST, new=True)
    assert held is not None
    client: redis.Redis = control.client
    assert 0 < int(client.pttl(keys.voice("sess_1"))) <= KEEP_MS  # pyright: ignore[reportArgumentType]
    assert client.zcard(keys.VOICES) == 1
