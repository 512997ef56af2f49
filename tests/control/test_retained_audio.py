"""Audio of ended requests is deleted after its retention time, and earlier if Redis's memory
becomes scarce.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import pytest
import redis

from fleet.conductor.driver import Driver
from fleet.config import load_config
from fleet.control import keys, scripts
from fleet.control.connect import connect
from fleet.control.redis_status import memory_of
from fleet.core.ids import RequestId, WorkerId
from fleet.core.request import RequestSpec
from tests.control_plane import GATEWAY, STAGE, TEXT, WORKER, Control
from tests.support import RedisProcess

SETTINGS = ("engine=fake", "device=cpu", "graph=text")


def speak(control: Control, request: str, *, blob: bytes | None = b"prompt") -> RequestId:
    """Submit a request whose edge is retained as audio, let its worker append a chunk, and abort
    the request.
    """
    spec = RequestSpec(id=RequestId(request), graph="text", prompt_ids=(1,), outputs=(TEXT,))
    call = scripts.submit(
        spec, blob, bound=999, stages=[STAGE], edges=[TEXT], gateway=GATEWAY, audio=[TEXT]
    )
    assert control.run(call) == "ok"
    control.client.xadd(keys.edge(spec.id, TEXT), {"h": b"sound"}, id="1-0")
    assert control.abort(spec.id) == "ok"
    return spec.id


def has_audio(control: Control, request: RequestId) -> bool:
    present = control.client.exists(keys.blob(request), keys.edge(request, TEXT))
    assert present in (0, 2)
    return bool(present)


def end_retention(control: Control, *requests: RequestId) -> None:
    for request in requests:
        control.client.zadd(keys.RETAINED_AUDIO, {f"{request}|{TEXT}": 1}, xx=True)


def test_audio_is_deleted_once_its_time_is_over_and_the_record_stays(control: Control) -> None:
    over, retained = speak(control, "speech-over"), speak(control, "speech-retained")
    end_retention(control, over)
    assert control.run(scripts.sweep(control.leader)) == "ok"
    assert (has_audio(control, over), has_audio(control, retained)) == (False, True)
    assert control.client.hget(keys.request(over), "state") == b"aborted"
    assert control.client.zrange(keys.RETAINED_AUDIO, 0, -1) == [f"{retained}|{TEXT}".encode()]


def test_oldest_audio_is_deleted_early_where_that_is_wanted(control: Control) -> None:
    first, second, third = (speak(control, f"speech-{number}") for number in range(1, 4))
    assert control.run(scripts.sweep(control.leader, 2)) == "ok"
    assert [has_audio(control, request) for request in (first, second, third)] == [
        False,
        False,
        True,
    ]


def test_many_are_deleted_in_slices(control: Control) -> None:
    requests = [speak(control, f"speech-{number}") for number in range(120)]
    end_retention(control, *requests)
    assert [control.run(scripts.sweep(control.leader)) for _ in range(3)] == ["more", "more", "ok"]
    assert not any(has_audio(control, request) for request in requests)


def test_request_without_audio_is_not_listed(control: Control) -> None:
    assert control.abort() == "ok"
    assert control.client.exists(keys.RETAINED_AUDIO) == 0


@pytest.fixture
def own_control(server: RedisProcess) -> Iterator[Control]:
    with connect(server.url) as client:
        control = Control(client, "")
        control.register(GATEWAY, "")
        control.register(WORKER)
        yield control


@contextmanager
def memory_used_to(client: redis.Redis, percent: int) -> Iterator[None]:
    used, _ = memory_of(cast("dict[str, int]", client.info("memory")))
    client.config_set("maxmemory", used * 100 // percent)
    yield
    client.config_set("maxmemory", 0)


@pytest.mark.parametrize(("percent", "swept"), [(70, False), (83, True)])
def test_conductor_deletes_retained_audio_before_new_requests_are_refused(
    own_control: Control, percent: int, swept: bool
) -> None:
    request = speak(own_control, "speech-1", blob=bytes(2**22))
    with memory_used_to(own_control.client, percent):
        Driver(load_config(None, SETTINGS), own_control.client, WorkerId("conductor@test")).turn()
    assert has_audio(own_control, request) is not swept


def test_conductor_deletes_audio_after_its_time(own_control: Control) -> None:
    request = speak(own_control, "speech-1")
    end_retention(own_control, request)
    Driver(load_config(None, SETTINGS), own_control.client, WorkerId("conductor@test")).turn()
    assert not has_audio(own_control, request)
