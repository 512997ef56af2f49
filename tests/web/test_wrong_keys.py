"""Back-off after wrong API keys, for each kind of access; the right key is always accepted."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator

import httpx
import pytest
from websockets.typing import Subprotocol

from tests.web.conftest import KEY, Loaded, ServedGateway, bearer, bounded, serving
from tests.web.realtime.refused_socket import refusal_of
from web.http.guard import CSRF_HEADER, KEY_SUBPROTOCOL_PREFIX
from web.http.protocol.abuse import MAX_TRACKED, OTHERS, PERIOD_S, TimedAbuseLog
from web.http.wrong_keys import FIRST_S, FORGIVEN_S, LONGEST_S, MAX_ADDRESSES, NUM_FREE, WrongKeys

MODELS = "/v1/models"


@pytest.fixture
def locked(
    serve_with: Callable[[str | None], ServedGateway], monkeypatch: pytest.MonkeyPatch
) -> ServedGateway:
    """A gateway whose first back-off outlasts a test on any machine."""
    monkeypatch.setattr("web.http.wrong_keys.FIRST_S", LONGEST_S)
    return serve_with(KEY)


def wrong_keys_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [record.getMessage() for record in caplog.records if record.name == "fleet.web"]
    return [line for line in messages if re.match(r"127\.0\.0\.1: (a )?wrong API key", line)]


def exhaust(gateway: ServedGateway) -> None:
    """Send wrong keys until the address is in a back-off."""
    for number in range(NUM_FREE):
        gateway.http.get(MODELS, headers=bearer(f"wrong-{number}"))


def test_wrong_keys_in_a_row_are_answered_429_and_logged_once(
    locked: ServedGateway, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        answers = [
            locked.http.get(MODELS, headers=bearer(f"wrong-{number}")) for number in range(300)
        ]
    assert Counter(answer.status_code for answer in answers) == {401: NUM_FREE, 429: 300 - NUM_FREE}
    assert [answer.status_code for answer in answers[:NUM_FREE]] == [401] * NUM_FREE
    assert 1 <= int(answers[-1].headers["retry-after"]) <= LONGEST_S
    assert answers[-1].json()["error"]["code"] == "too_many_wrong_keys"
    assert len(wrong_keys_lines(caplog)) == 1


def test_right_key_and_no_key_are_accepted_during_back_off(locked: ServedGateway) -> None:
    exhaust(locked)
    assert locked.http.get(MODELS, headers=bearer("wrong")).status_code == 429
    assert locked.http.get(MODELS, headers=bearer(KEY)).status_code == 200
    assert locked.http.get(MODELS).status_code == 401
    assert locked.http.get("/", headers={"accept": "text/html"}).status_code == 303
    assert locked.http.get("/health", headers=bearer("wrong")).status_code == 200
    assert httpx.post(f"{locked.url}/console/login", data={"key": KEY}).status_code == 303


def test_requests_without_a_key_are_never_counted(
    locked: ServedGateway, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2 * NUM_FREE):
            assert (
                locked.http.get(MODELS, headers={"cookie": "fleet_console=old"}).status_code == 401
            )
            assert locked.http.post("/console/login", data={}).status_code == 401
            assert (
                locked.http.post(
                    MODELS, headers={CSRF_HEADER: "x", "origin": "http://evil.example"}
                ).status_code
                == 403
            )
    assert not wrong_keys_lines(caplog)


def test_wrong_key_of_cross_site_page_counts(locked: ServedGateway) -> None:
    """A wrong key sent from a page of another site counts as an attempt; otherwise the two refusals
    would tell right keys from wrong ones without a back-off.
    """
    for _ in range(NUM_FREE):
        assert (
            locked.http.post(
                MODELS, headers={**bearer("wrong"), "origin": "http://evil.example"}
            ).status_code
            == 403
        )
    assert (
        locked.http.post(
            MODELS, headers={**bearer("wrong"), "origin": "http://evil.example"}
        ).status_code
        == 429
    )


def test_login_form_shows_back_off(locked: ServedGateway) -> None:
    statuses = [
        locked.http.post("/console/login", data={"key": f"wrong-{n}"}).status_code
        for n in range(NUM_FREE + 1)
    ]
    assert statuses == [401] * NUM_FREE + [429]
    page = locked.http.post("/console/login", data={"key": "wrong"})
    assert page.status_code == 429 and int(page.headers["retry-after"]) >= 1
    assert (
        "text/html" in page.headers["content-type"]
        and "too many wrong API keys" in page.text
        and 'name="key"' in page.text
    )


@pytest.mark.parametrize("way", ["bearer", "subprotocol", "secret", "secret of a session"])
async def test_websockets_back_off_for_each_way_of_sending_key(
    locked: ServedGateway, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    key = "ek_made-up" if "secret" in way else "wrong"
    path = "/v1/realtime?session=sess_any" if way == "secret of a session" else "/v1/realtime"
    offered = (
        [Subprotocol("realtime"), Subprotocol(f"{KEY_SUBPROTOCOL_PREFIX}{key}")]
        if way != "bearer"
        else None
    )
    headers = bearer(key) if way == "bearer" else {}
    with caplog.at_level(logging.WARNING):
        for _ in range(NUM_FREE):
            refusal = await refusal_of(
                locked, path, subprotocols=offered, additional_headers=headers
            )
            assert refusal.error["code"] == "invalid_api_key"
        for _ in range(3):
            refusal = await refusal_of(
                locked, path, subprotocols=offered, additional_headers=headers
            )
            assert refusal.error["code"] == "too_many_wrong_keys" and refusal.close_code == 3000
    refused = [
        record for record in caplog.records if "refused the WebSocket" in record.getMessage()
    ]
    assert len(refused) == 1, "the others are counted in one line a minute"
    assert len(wrong_keys_lines(caplog)) == 1


class Minutes:
    """A clock that the test advances, and that runs the calls scheduled on it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.due: list[tuple[float, Callable[[], None]]] = []

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        self.due.append((self.now_s + delay_s, call))

    def pass_by(self, seconds: float) -> None:
        self.now_s += seconds
        due = [call for at, call in self.due if at <= self.now_s]
        self.due = [(at, call) for at, call in self.due if at > self.now_s]
        for call in due:
            call()


@pytest.fixture
def time() -> Minutes:
    return Minutes()


@pytest.fixture
def wrong_keys(time: Minutes) -> Iterator[WrongKeys]:
    yield WrongKeys(TimedAbuseLog(lambda: time.now_s, time.later), lambda: time.now_s)


def test_back_off_doubles_up_to_maximum_and_is_forgotten(
    wrong_keys: WrongKeys, time: Minutes
) -> None:
    assert [wrong_keys.count("a") for _ in range(NUM_FREE)] == [None] * NUM_FREE
    assert wrong_keys.count("b") is None, "another address"
    waits: list[float] = []
    for _ in range(10):
        wait_s = wrong_keys.count("a")
        assert wait_s is not None and wrong_keys.count("a") == wait_s, (
            "a wrong key during a back-off does not prolong it"
        )
        waits.append(wait_s)
        time.pass_by(wait_s)
        assert wrong_keys.count("a") is None
    assert waits == [min(FIRST_S * 2**number, LONGEST_S) for number in range(10)]
    time.pass_by(LONGEST_S + FORGIVEN_S + 1)
    assert [wrong_keys.count("a") for _ in range(NUM_FREE)] == [None] * NUM_FREE


def test_log_has_one_line_per_address_and_minute(
    wrong_keys: WrongKeys, time: Minutes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "fleet.web"):
        for _ in range(300):
            wrong_keys.count("10.0.0.1")
        wrong_keys.count("10.0.0.2")
        time.pass_by(PERIOD_S)
        wrong_keys.count("10.0.0.1")
        for _ in range(3):
            time.pass_by(PERIOD_S)
        assert not time.due, "a quiet address needs no timer"
        wrong_keys.count("10.0.0.1")
    first = "a wrong API key; further"
    expected = [
        "1: " + first,
        "2: " + first,
        "1: wrong API keys, 299 times",
        "1: wrong API keys, once",
    ]
    expected.append("1: " + first)
    for message, beginning in zip(caplog.messages, expected, strict=True):
        assert message.startswith(f"10.0.0.{beginning}"), caplog.messages


def test_lines_about_any_number_of_addresses_are_bounded(
    wrong_keys: WrongKeys, time: Minutes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "fleet.web"):
        for number in range(24_000):
            wrong_keys.count(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}")
        assert len(caplog.messages) == MAX_TRACKED + 1
        time.pass_by(PERIOD_S)
    counted = (
        f"{OTHERS}: wrong API keys, {24_000 - MAX_TRACKED - 1} times in 60 s; the last: "
        "10.0.93.191:"
    )
    assert caplog.messages[-1].startswith(counted), caplog.messages[-1]


def forwarded_for(number: int, key: str = "wrong") -> dict[str, str]:
    return {**bearer(key), "x-forwarded-for": f"10.0.0.{number}"}


def test_address_that_a_client_claims_does_not_evade_the_back_off(locked: ServedGateway) -> None:
    answers = [
        locked.http.get(MODELS, headers=forwarded_for(number)) for number in range(NUM_FREE + 5)
    ]
    assert [answer.status_code for answer in answers] == [401] * NUM_FREE + [429] * 5


def test_address_that_a_trusted_proxy_forwards_counts(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("web.http.wrong_keys.FIRST_S", LONGEST_S)
    with serving(bounded(loaded, trusted_proxies=("127.0.0.0/8",)), KEY) as gateway:
        for _ in range(NUM_FREE):
            assert gateway.http.get(MODELS, headers=forwarded_for(1)).status_code == 401
        for number, status in ((1, 429), (2, 401)):
            assert gateway.http.get(MODELS, headers=forwarded_for(number)).status_code == status


def test_address_table_is_bounded(wrong_keys: WrongKeys) -> None:
    for address in ("old", "seen"):
        for _ in range(NUM_FREE):
            wrong_keys.count(address)
    for number in range(MAX_ADDRESSES - 1):
        wrong_keys.count(str(number))
        assert wrong_keys.count("seen") is not None
    assert wrong_keys.count("old") is None
