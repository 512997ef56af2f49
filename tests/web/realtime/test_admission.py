"""Admission of voice sessions when places are scarce: client secrets get a share of the places, and
do not delay clients with the API key.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from fleet.core.errors import Overloaded
from web.realtime.admission import Admission, QueuedClient

SECRET, KEY = True, False


@dataclass(slots=True)
class Line:
    """An admission queue that allows four sessions and four queued clients, of which three each may
    come from client secrets.
    """

    admission: Admission = field(default_factory=lambda: Admission(4, 4, 0.75))
    positions: dict[str, list[int]] = field(default_factory=dict[str, list[int]])

    def join(self, by_secret: bool, name: str = "") -> QueuedClient:
        return self.admission.join(
            by_secret=by_secret, on_position=self.positions.setdefault(name, []).append
        )

    def fill(self, by_secret: bool, number: int) -> None:
        for _ in range(number):
            assert self.join(by_secret).admitted.is_set()

    def leave(self, by_secret: bool) -> None:
        self.admission.release(by_secret=by_secret)


def test_secrets_are_limited_to_their_share_of_places_and_queue() -> None:
    line = Line()
    line.fill(SECRET, 3)
    assert not any(line.join(SECRET).admitted.is_set() for _ in range(3))
    with pytest.raises(
        Overloaded, match=r"6 voice sessions of client secrets .*voice\.secret_share"
    ):
        line.join(SECRET)
    assert line.join(KEY).admitted.is_set() and not line.join(KEY, "key").admitted.is_set()
    assert line.positions["key"] == [1], "secrets that may not enter are not before it"
    with pytest.raises(Overloaded, match="8 voice sessions are open or waiting"):
        line.join(KEY)


def test_api_key_client_passes_blocked_secrets() -> None:
    line = Line()
    line.fill(SECRET, 3)
    secrets = [line.join(SECRET, "secret"), line.join(SECRET)]
    line.fill(KEY, 1)
    key = line.join(KEY, "key")
    line.leave(KEY)
    assert key.admitted.is_set() and not any(waiter.admitted.is_set() for waiter in secrets)
    line.leave(SECRET)
    assert [waiter.admitted.is_set() for waiter in secrets] == [True, False] and line.positions[
        "secret"
    ] == [1]


def test_queue_is_in_order_of_arrival() -> None:
    line = Line()
    line.fill(KEY, 4)
    waiters = [line.join(by_secret, str(by_secret)) for by_secret in (SECRET, KEY, SECRET)]
    assert line.positions == {"": [], "True": [1, 3], "False": [2]}
    for number in range(3):
        line.leave(KEY)
        assert [waiter.admitted.is_set() for waiter in waiters] == [
            place <= number for place in range(3)
        ]
    assert line.positions["False"] == [2, 1]


def test_api_key_places_stay_reserved_from_adopted_sessions() -> None:
    """Sessions adopted from a dead gateway are never refused, even beyond the share of client
    secrets; the places reserved for the API key stay free.
    """
    line = Line()
    for _ in range(9):
        line.admission.add(by_secret=SECRET)
    assert (
        line.join(KEY).admitted.is_set()
        and not line.join(KEY).admitted.is_set()
        and not line.join(SECRET).admitted.is_set()
    )


@pytest.mark.parametrize(
    ("sessions", "share", "most"),
    [(1, 0.75, 1), (2, 0.75, 1), (10, 0.7, 7), (4, 0.1, 1), (5, 1.0, 5)],
)
def test_secret_share_is_rounded_down_to_at_least_one(
    sessions: int, share: float, most: int
) -> None:
    admission = Admission(sessions, 64, share)
    entered = [
        admission.join(by_secret=True, on_position=lambda _: None).admitted.is_set()
        for _ in range(sessions)
    ]
    assert sum(entered) == most


async def cancelled(line: Line, waiter: QueuedClient, before: Callable[[], None]) -> None:
    """Call `before`, then cancel the queued client."""
    waiting = asyncio.create_task(line.admission.wait(waiter))
    await asyncio.sleep(0)
    before()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_leaving_client_releases_its_place() -> None:
    line = Line()
    line.fill(KEY, 4)
    first, second, third = (
        line.join(by_secret, str(by_secret)) for by_secret in (KEY, KEY, SECRET)
    )
    await cancelled(line, first, lambda: None)
    assert line.positions["True"] == [3, 2]
    await cancelled(line, second, lambda: line.leave(KEY))
    assert third.admitted.is_set()
