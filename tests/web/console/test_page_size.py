"""However large the fleet, a page shows so much of it and no more, says that there is more, and leads to it."""

from collections.abc import Iterator

import pytest

from tests.web.conftest import Gateway, Loaded, serving
from tests.web.console import html_audit
from tests.web.console.busy_gateway import LIVE_PAGES
from tests.web.console.oversized_fleet import NUM_WORKERS, crowd

MAX_BYTES = 500_000
"""Two hundred roles with all their numbers are the most."""
ROWS = {"requests": ("r-", 50), "workers": ("w-", 100), "jobs": ("j-", 100), "sessions": ("s-", 100), "logs": ("l-", 200)}


@pytest.fixture(scope="module")
def crowded(loaded: Loaded) -> Iterator[Gateway]:
    with serving(loaded) as gateway:
        crowd(gateway)
        yield gateway


@pytest.mark.parametrize("name", LIVE_PAGES)
def test_a_page_is_bounded(crowded: Gateway, name: str) -> None:
    answer = crowded.http.get(f"/{name}")
    reader = html_audit.read(answer.text)
    assert answer.status_code == 200 and len(answer.content) < MAX_BYTES and not reader.faults
    if name in ROWS:
        prefix, most = ROWS[name]
        assert sum(one.startswith(prefix) for one in reader.ids) == most


def test_what_is_left_out_is_told(crowded: Gateway) -> None:
    assert "and 100 jobs, older than these" in crowded.http.get("/jobs").text
    page = crowded.http.get("/queues").text
    assert "tasks that wait less long" in page and "dead letters, older than these" in page
    assert "sessions, begun before these" in crowded.http.get("/sessions").text


def test_every_worker_is_on_one_page(crowded: Gateway) -> None:
    seen: list[str] = []
    path = "/workers?role=talker"
    while path:
        page = crowded.http.get(path).text
        seen += [one for one in html_audit.read(page).ids if one.startswith("w-")]
        _, found, rest = page.partition('rel="next" href="')
        path = rest.partition('"')[0].replace("&amp;", "&") if found else ""
    talkers = [view for view in crowded.client.telemetry.worker_list if view.role == "talker" and not view.gone]
    assert len(seen) == len(set(seen)) == len(talkers) > 100 and len(talkers) < NUM_WORKERS
