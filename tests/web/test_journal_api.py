"""The journal over the fleet API."""

import pytest

from fleet.telemetry.journal import JournalEntry
from tests.web.conftest import ServedGateway
from tests.web.fake_telemetry import FakeTelemetry
from tests.web.plausible_requests import worker_id


@pytest.fixture
def journal(gateway: ServedGateway) -> FakeTelemetry:
    """Telemetry of the gateway, with a journal of ten entries."""
    reported, worker = FakeTelemetry(), worker_id("thinker")
    reported.entries = [
        JournalEntry(id=f"{n}-0", at_us=n * 1000, what="died" if n % 2 else "joined", worker=worker)
        for n in range(1, 11)
    ]
    gateway.client.show(reported)
    return reported


@pytest.mark.usefixtures("journal")
def test_journal_is_filtered_by_time_and_kind(gateway: ServedGateway) -> None:
    def listed(**params: str | int) -> tuple[list[str], bool]:
        page = gateway.http.get("/v1/fleet/journal", params=params).json()
        return [entry["id"] for entry in page["data"]], page["more"]

    assert listed() == ([f"{n}-0" for n in range(10, 0, -1)], False)
    assert listed(limit=3) == (["10-0", "9-0", "8-0"], True)
    assert listed(since=3000, until=5000) == (["5-0", "4-0", "3-0"], False)
    assert listed(what="died", until=6000) == (["5-0", "3-0", "1-0"], False)
    assert listed(what="refused") == ([], False)


@pytest.mark.usefixtures("journal")
@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("what=exploded", "what"),
        ("since=yesterday", "since"),
        ("until=-1", "until"),
        ("since=5000&until=4000", "until"),
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("before=1-0", "before"),
    ],
)
def test_journal_refuses_an_unusable_parameter_by_name(
    gateway: ServedGateway, query: str, param: str
) -> None:
    answer = gateway.http.get(f"/v1/fleet/journal?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
