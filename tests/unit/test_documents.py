"""README and reference pages agree with the code: links, routes, metrics, configuration keys,
paths.
"""

import re
from pathlib import Path
from typing import cast

import pytest
import yaml

from tests.support import REPO
from web.console.shell import ROOMS
from web.gateway.fleet_port import FleetPort
from web.gateway.metrics import Metrics
from web.openapi.operations import OPERATIONS

README, HISTORY, MAP, DOCS = (
    REPO / "README.md",
    REPO / "fleet/HISTORY.md",
    REPO / "fleet/README.md",
    REPO / "fleet" / "docs",
)
PAGES = (
    README,
    HISTORY,
    MAP,
    *sorted((REPO / "fleet").glob("*/README.md")),
    REPO / "fleet/SECURITY.md",
    REPO / "fleet/spans/README.md",
    REPO / "fleet/drafts/README.md",
    REPO / "deploy/README.md",
    *sorted(DOCS.rglob("*.md")),
    REPO / "tests" / "split_behaviours.md",
    REPO / "tests" / "clients" / "README.md",
)
FIELDS = DOCS / "fields.md"
"""Documentation page of the request fields, some of which look like configuration keys: `voice.id`.
"""
MAX_README_LINES, MAX_IMAGE_BYTES = 150, 200_000
MAX_DESIGN_PAGES, MAX_DESIGN_LINES, MAX_GLOSSARY_ROWS = 10, 150, 35
LINK = re.compile(r"\]\(([^)#]*)(?:#([\w-]+))?\)")
SPAN = re.compile(r"`([^`\n]+)`")
ROUTE = re.compile(r"(GET|POST|PUT|DELETE) (/[\w/{}.-]+)")
KEY = re.compile(r"`(limits|web|voice|batches|redis|lease|transfer|security)\.([a-z_]+)")
WITHOUT_OPERATION = {"GET /v1/fleet/requests/{x-request-id}/stream"}
"""Documented routes with a value in place of a parameter's name."""


def ids(path: Path) -> str:
    return path.relative_to(REPO).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_of_a_page_lead_to_files_and_headings(page: Path) -> None:
    for target, heading in LINK.findall(page.read_text()):
        if "//" in target:
            continue
        file = page.parent / target if target else page
        assert file.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            assert heading in {
                re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for text in headings
            }


def test_every_reference_page_is_linked_from_readme_and_index() -> None:
    names = {page.name for page in DOCS.glob("*.md")} - {"README.md"}
    for index in (README, DOCS / "README.md"):
        assert names <= {Path(target).name for target, _ in LINK.findall(index.read_text())}


def test_readme_is_short_and_its_images_small() -> None:
    assert len(README.read_text().splitlines()) <= MAX_README_LINES
    assert all(image.stat().st_size <= MAX_IMAGE_BYTES for image in (DOCS / "images").iterdir())


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_routes_of_a_page_exist(page: Path) -> None:
    served = {
        f"{operation.method} {operation.path}" for operation in OPERATIONS
    } | WITHOUT_OPERATION
    shown = {
        f"{method} {path}"
        for span in SPAN.findall(page.read_text())
        for method, path in ROUTE.findall(span)
    }
    assert sorted(route for route in shown - served if "..." not in route) == []


def test_every_route_has_a_row() -> None:
    text = (DOCS / "api.md").read_text() + (DOCS / "fleet-api.md").read_text()
    shown = {
        f"{method} {path}" for span in SPAN.findall(text) for method, path in ROUTE.findall(span)
    }
    assert (
        sorted({f"{operation.method} {operation.path}" for operation in OPERATIONS} - shown) == []
    )


def test_metrics_page_has_every_family_and_no_other() -> None:
    catalogue = Metrics(cast(FleetPort, None), "model").registry.collect()
    served = {family.name + ("_total" if family.type == "counter" else "") for family in catalogue}
    shown = set(re.findall(r"`(fleet_\w+)`", (DOCS / "metrics.md").read_text()))
    assert shown == served


@pytest.mark.parametrize("page", [page for page in PAGES if page != FIELDS], ids=ids)
def test_configuration_keys_of_a_page_exist(page: Path) -> None:
    sections = cast(
        "dict[str, dict[str, object]]",
        yaml.safe_load((REPO / "configs" / "qwen3_omni.yaml").read_text()),
    )
    shown = KEY.findall(page.read_text())
    assert [f"{section}.{key}" for section, key in shown if key not in sections[section]] == []


def test_console_page_lists_every_page_of_the_navigation() -> None:
    pages = re.findall(r"^\| `(/\w*)`", (DOCS / "console.md").read_text(), re.MULTILINE)
    in_rooms = [path for room in ROOMS for _, path, _ in room.pages]
    assert sorted(pages) == sorted([*in_rooms, "/docs"])


def test_paths_of_the_map_exist() -> None:
    spans = [
        span
        for span in SPAN.findall(MAP.read_text())
        if re.fullmatch(r"[\w./-]+\.(py|lua|md|yaml)", span)
    ]
    places = (REPO / "fleet", REPO, REPO / "fleet" / "control" / "lua")
    assert [span for span in spans if not any((place / span).exists() for place in places)] == []


def test_behaviours_of_split_stages_name_tests_that_exist() -> None:
    rows = [
        line.strip("|").split("|")
        for line in (REPO / "tests" / "split_behaviours.md").read_text().splitlines()
        if line.startswith("| ")
    ]
    shown = [
        re.findall(r"`([\w/]+\.py)::(test_\w+)`", cells[-1])
        for cells in rows
        if cells[0].strip() != "behaviour"
    ]
    assert shown and all(len(cells) == 3 for cells in rows) and all(shown), (
        "each behaviour has a test"
    )
    for file, name in {one for tests in shown for one in tests}:
        assert re.search(
            rf"^(?:async )?def {name}\(", (REPO / "tests" / file).read_text(), re.MULTILINE
        ), f"{file}::{name}"


def test_design_pages_are_short() -> None:
    pages = sorted((DOCS / "design").glob("*.md"))
    assert len(pages) - 1 <= MAX_DESIGN_PAGES
    lengths = {page.name: len(page.read_text().splitlines()) for page in pages}
    assert {name: length for name, length in lengths.items() if length >= MAX_DESIGN_LINES} == {}


def test_glossary_is_short() -> None:
    rows = MAP.read_text().partition("| term | meaning |")[2].splitlines()
    assert len([row for row in rows if row.startswith("| ")]) <= MAX_GLOSSARY_ROWS
