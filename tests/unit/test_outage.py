"""Log lines about a Redis outage: none for a short outage; one at the beginning and one at the end
of a longer one.
"""

import logging

import pytest
from redis.exceptions import BusyLoadingError, OutOfMemoryError
from redis.exceptions import ConnectionError as RedisConnectionError

from fleet.control.outage import QUIET_S, Outage


class SetClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records]


def test_outage_shorter_than_the_quiet_time_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    clock = SetClock()
    outage = Outage("the conductor", clock=clock)
    outage.add(RedisConnectionError("refused"))
    assert "Redis does not answer" in outage.cause, "it is known before it is logged"
    clock.now_s += QUIET_S / 2
    outage.add(RedisConnectionError("refused"))
    outage.end()
    assert not lines_of(caplog) and not outage.cause


def test_lasting_outage_is_logged_once_with_its_length(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    clock = SetClock()
    outage = Outage("the conductor", clock=clock)
    for _ in range(4):
        outage.add(RedisConnectionError("refused"))
        clock.now_s += QUIET_S
    outage.end()
    outage.end()
    assert [line.partition(",")[0].partition(" (")[0] for line in lines_of(caplog)] == [
        "Redis does not answer",
        "Redis serves the conductor again",
    ]
    assert lines_of(caplog)[1].endswith(f"after {4 * QUIET_S:.1f} s")


def test_lasting_outage_with_another_cause_is_logged_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = SetClock()
    outage = Outage("the conductor", clock=clock)
    for error in (
        RedisConnectionError("refused"),
        RedisConnectionError("refused"),
        BusyLoadingError("LOADING the dataset"),
    ):
        outage.add(error)
        clock.now_s += QUIET_S
    assert ["does not answer" in line for line in lines_of(caplog)] == [True, False]


def test_refusal_of_writes_is_logged_immediately(caplog: pytest.LogCaptureFixture) -> None:
    Outage("the conductor").add(OutOfMemoryError("OOM no memory"))
    assert [line.partition(" (")[0] for line in lines_of(caplog)] == ["Redis refuses writes"]
