"""The page of third-party clients agrees with the pins and the scripts, and, in the thorough run,
with what the clients do.
"""

from pathlib import Path

import pytest

from tests.clients.__main__ import run
from tests.clients.environments import CLIENTS
from tests.clients.page import features_of, rows_of, rows_shown


def test_page_has_a_row_for_each_feature_of_each_pinned_client() -> None:
    wanted = [row[:3] for client in CLIENTS for row in rows_of(client, [])]
    assert [row[:3] for row in rows_shown()] == wanted
    assert all(features_of(client) for client in CLIENTS)
    assert all(row[3].startswith(("passes", "fails: ")) for row in rows_shown())


@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_clients_do_what_the_page_says(tmp_path: Path) -> None:
    results = run(CLIENTS, tmp_path)
    rows = [row for client in CLIENTS for row in rows_of(client, results[client.name])]
    assert rows == rows_shown()
