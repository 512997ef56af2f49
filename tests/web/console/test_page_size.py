"""Pages of a very large fleet have a bounded size, show that there is more, and link to it."""

from collections.abc import Iterator

import pytest

from tests.web.conftest import Loaded, ServedGateway, serving
from tests.web.console import html_audit
from tests.web.console.busy_gateway import LIVE_PAGES
from tests.web.console.oversized_fleet import NUM_WORKERS, fill_to_limits

MAX_BYTES = 500_000
"""Size limit of a page in bytes; the largest page shows two hundred roles."""
ROWS = {
    "requests": ("r-", 50),
    "workers": ("w-", 100),
    "jobs": ("j-", 100),
    "sessions": ("s-", 100),
    "logs": ("l-", 200),
}


@pytest.fixture(scope="module")
def large_gateway(loaded: Loaded) -> Iterator[ServedGateway]:
    with serving(loaded) as gateway:
        fill_to_limits(gateway)
        yield gateway


@pytest.mark.parametrize("name", LIVE_PAGES)
def test_page_size_is_bounded(large_gateway: ServedGateway, name: str) -> None:
    answer = large_gateway.http.get(f"/{name}")
    reader = html_audit.read(answer.text)
    assert answer.status_code == 200 and len(answer.content) < MAX_BYTES and not reader.faults
    if name in ROWS:
        prefix, limit = ROWS[name]
        assert sum(name.startswith(prefix) for name in reader.ids) == limit


def test_pages_show_the_number_of_omitted_rows(large_gateway: ServedGateway) -> None:
    assert "and 100 older jobs" in large_gateway.http.get("/jobs").text
    page = large_gateway.http.get("/queues").text
    assert "tasks with shorter waits" in page and "older such requests" in page
    assert "older live sessions" in large_gateway.http.get("/sessions").text


def test_worker_pages_list_each_worker_once(large_gateway: ServedGateway) -> None:
    seen: list[str] = []
    path = "/workers?role=talker"
    while path:
        page = large_gateway.http.get(path).text
        seen += [name for name in html_audit.read(page).ids if name.startswith("w-")]
        _, found, rest = page.partition('rel="next" href="')
        path = rest.partition('"')[0].replace("&amp;", "&") if found else ""
    talkers = [
        view
        for view in large_gateway.client.telemetry.worker_list
        if view.role == "talker" and not view.gone
    ]
    assert len(seen) == len(set(seen)) == len(talkers) > 100 and len(talkers) < NUM_WORKERS
