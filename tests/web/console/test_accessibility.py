"""Every page is free of findings of axe-core, at desk and phone width, in both themes; except for
`/docs`, which is Swagger UI as it is released.

axe-core 4.14.1 is vendored in `axe/` with its licences: npm's `axe-core`, integrity
sha512-FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ==.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.web.conftest import KEY, Loaded, ServedGateway, serving
from tests.web.console.busy_gateway import fill, paths
from tests.web.plausible_answers import add_answers

pytestmark = pytest.mark.one_file_in(4, "pages in a browser")

SCRIPT = Path(__file__).parent / "axe" / "axe.min.js"
SHA512 = (
    "e63e659f9806d7ae5bd40899043b0871a5062c5442b01b3f1a3edf5eaf50bf5c"
    "3a7104a72463293b4ad1b77c661a0d4e40e850dec89de9d6ece70a8c13a9af17"
)
SIZES = {"desk": (1440, 900), "phone": (390, 844)}
RULES = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice")
"""Rules that are checked; `wcag22aa` has the size of targets, 24 px."""
RUN = """async (tags) => {
  const { violations } = await axe.run(document, { runOnly: tags });
  const told = ({ html, failureSummary }) => `${html.slice(0, 160)} ${failureSummary}`;
  return violations.flatMap(({ id, nodes }) => nodes.map((node) => `${id}: ${told(node)}`));
}"""
SMALL = """() => [...document.querySelectorAll("button, select, input, summary, nav a, a.button")]
  .map((element) => [element, element.closest("label") ?? element])
  .filter(([element]) => element.checkVisibility({ visibilityProperty: true }))
  .map(([element, target]) => [element, target.getBoundingClientRect()])
  .filter(([, { width, height }]) => Math.min(width, height) < 24)
  .map(([element, { width, height }]) => `${element.outerHTML.slice(0, 120)} ${width}x${height}`)"""
"""Visible controls, or labels that activate them, of less than 24 px."""


@pytest.fixture(scope="module")
def gateway_with_answers(loaded: Loaded) -> Iterator[tuple[ServedGateway, dict[str, str]]]:
    with serving(loaded) as gateway, serving(loaded, KEY) as locked:
        fill(gateway)
        answers = add_answers(gateway.client.telemetry, [1, 2, 3])
        pair = f"/requests/{answers['slow'].id}/compare?with={answers['fine'].id}"
        shown = {
            **paths(gateway),
            "talk": "/",
            "compare": pair,
            "unknown": "/nothing",
            **{f"answer {name}": f"/requests/{one.id}" for name, one in answers.items()},
        }
        addresses = {name: gateway.url + path for name, path in shown.items()}
        yield gateway, {**addresses, "login": f"{locked.url}/console/login"}


def test_vendored_script_is_the_released_one() -> None:
    assert hashlib.sha512(SCRIPT.read_bytes()).hexdigest() == SHA512


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_no_page_has_a_finding(
    browser: Browser,
    gateway_with_answers: tuple[ServedGateway, dict[str, str]],
    size: str,
    scheme: Literal["light", "dark"],
) -> None:
    width, height = SIZES[size]
    found: dict[str, list[str]] = {}
    with browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, has_touch=size == "phone"
    ) as context:
        page = context.new_page()
        for name, address in gateway_with_answers[1].items():
            found[name] = findings(page, address)
    assert not any(found.values()), "\n".join(
        f"{name}: {one}" for name, each in found.items() for one in each
    )


def test_controls_of_every_page_are_large_enough_for_a_finger(
    browser: Browser, gateway_with_answers: tuple[ServedGateway, dict[str, str]]
) -> None:
    width, height = SIZES["phone"]
    with browser.new_context(viewport={"width": width, "height": height}) as context:
        page = context.new_page()
        small: dict[str, list[str]] = {}
        for name, address in gateway_with_answers[1].items():
            page.goto(address)
            small[name] = page.evaluate(SMALL)
    assert not any(small.values()), small


def findings(page: Page, address: str) -> list[str]:
    page.goto(address)
    if page.locator("#live").count():
        expect(page.locator("#link")).to_have_text("live")
    page.evaluate(SCRIPT.read_text())
    result: Any = page.evaluate(RUN, list(RULES))
    return result
