"""Draft-head training over the API and in the console: its state, versions promoted and returned
to, samples deleted.
"""

import pytest

from tests.web.conftest import ServedGateway
from tests.web.console.busy_gateway import training

FLEET = "/v1/fleet"


@pytest.fixture
def gateway(gateway: ServedGateway) -> ServedGateway:
    gateway.client.training.known, gateway.client.training.shown = training()
    return gateway


def test_state_has_the_trainer_captures_and_versions(gateway: ServedGateway) -> None:
    state = gateway.http.get(f"{FLEET}/training").json()
    assert (state["trainer"], state["shed"], state["version"]) == ("trainer@a:31:77aa01", 212, 2)
    assert state["figures"]["windows"] == 131 and [
        each["number"] for each in state["versions"]
    ] == [2, 1]


def test_version_is_promoted_and_returned_from(gateway: ServedGateway) -> None:
    assert gateway.http.post(f"{FLEET}/draft-versions/1/promote").json() == {
        "version": 1,
        "object": "fleet.draft_version",
    }
    assert gateway.http.post(f"{FLEET}/draft-versions/rollback").json()["version"] == 2


@pytest.mark.parametrize(
    ("number", "status"), [("9", 404), ("-1", 400), ("x", 400), ("1234567890", 400)]
)
def test_wrong_number_of_a_version_is_refused(
    gateway: ServedGateway, number: str, status: int
) -> None:
    answer = gateway.http.post(f"{FLEET}/draft-versions/{number}/promote")
    assert answer.status_code == status and answer.json()["error"]["param"] == "number"


def test_samples_are_forgotten_by_order(gateway: ServedGateway) -> None:
    before = gateway.client.training.num_purges
    assert gateway.http.post(f"{FLEET}/training/forget").status_code == 200
    assert gateway.client.training.num_purges == before + 1


def test_page_names_versions_and_workers(gateway: ServedGateway) -> None:
    page = gateway.http.get("/training").text
    assert (
        "weekly 2" in page
        and "Roll back to 1" in page
        and "trainer@a:31:77aa01" in page
        and "loss of the last 60 windows" in page
    )
