"""Accessibility and layout of the console's pages: names of controls, contrast as rendered, widths,
keyboard focus, reduced motion.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, cast

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.web.conftest import Loaded, ServedGateway, serving
from tests.web.console.busy_gateway import fill, paths
from tests.web.console.watched_page import OpenPage
from tests.web.voice.browsers import visiting

pytestmark = pytest.mark.one_file_in(4, "pages in a browser")

CONTROLS = (
    "button",
    "link",
    "textbox",
    "searchbox",
    "combobox",
    "checkbox",
    "radio",
    "slider",
    "spinbutton",
)
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
CONTRAST = """() => {
  const channels = (colour) => {
    const pixel = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
    const canvas = window.probe ??= pixel.getContext("2d", { willReadFrequently: true });
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = ([r, g, b, a], below) =>
    [...[r, g, b].map((c, n) => c * a + below[n] * (1 - a)), 1];
  const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) =>
    0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const ground = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement)
      layers.push(channels(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((under, layer) => over(layer, under), [255, 255, 255, 1]);
  };
  const poor = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, element = node.parentElement;
    const seen = { opacityProperty: true, visibilityProperty: true };
    if (!node.data.trim() || !element.checkVisibility(seen)) continue;
    const style = getComputedStyle(element), under = ground(element);
    const inked = channels(element instanceof SVGElement ? style.fill : style.color);
    let faded = 1;
    for (let at = element; at; at = at.parentElement) faded *= Number(getComputedStyle(at).opacity);
    inked[3] *= faded;
    const [a, b] = [light(over(inked, under)), light(under)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const px = parseFloat(style.fontSize);
    const large = px >= 24 || (px >= 18.66 && Number(style.fontWeight) >= 700);
    if (ratio < (large ? 3 : 4.5)) poor.push([ratio.toFixed(2), element.tagName,
      element.getAttribute("class"), node.data.trim().slice(0, 40)].join(" "));
  }
  return poor;
}"""
# an audio player has focus stops of its own, which the browser draws and does not report
CALLS = """
['post', 'put', 'patch', 'delete', 'get'].flatMap((way) =>
  [...document.querySelectorAll(`[hx-${way}]`)].map((one) => [way, one.getAttribute(`hx-${way}`)]))
"""
FOCUSED = """() => {
  const here = document.activeElement;
  if (!here || here === document.body) return null;
  window.trail = window.trail ?? [];
  const before = window.trail.at(-1);
  window.trail.push(here);
  const style = getComputedStyle(here);
  return {
    what: [here.tagName, here.id,
      here.getAttribute("aria-label") ?? here.textContent.trim().slice(0, 30)].join(" "),
    ring: here instanceof HTMLAudioElement
      || style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2,
    onwards: !before || before === here
      || Boolean(before.compareDocumentPosition(here) & Node.DOCUMENT_POSITION_FOLLOWING),
    seen: here.checkVisibility() && here.getBoundingClientRect().width > 0,
  };
}"""


FITS = """async (width) => {
  // A chart takes the new width in one of the next frames.
  for (let frame = 0; frame < 60; frame++) {
    if (document.documentElement.scrollWidth <= width) return true;
    await new Promise(requestAnimationFrame);
  }
  return false;
}"""
"""Returns whether the page fits a width, at the latest after a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageReport:
    """Accessibility faults of one page. `faults`: unnamed controls and poor contrast, by colour
    scheme. `too_wide`: window widths that the page exceeds.
    """

    faults: dict[str, list[str]]
    too_wide: list[int]
    num_headings: int
    num_current: int
    levels: list[int]
    calls: list[tuple[str, str]]
    num_forms: int


@pytest.fixture(scope="module")
def reports(browser: Browser, loaded: Loaded) -> Iterator[dict[str, PageReport]]:
    """Reports of every page, and of a running request's page, over a busy fleet."""
    with serving(loaded) as gateway, visiting(browser) as page:
        fill(gateway)
        running = next(
            trace for trace in gateway.client.telemetry.traces.values() if trace.state == "running"
        )
        found: dict[str, PageReport] = {}
        for name, path in {**paths(gateway), "running request": f"/requests/{running.id}"}.items():
            page.goto(gateway.url + path)
            expect(page.locator("#link")).to_have_text("live")
            found[name] = report(page)
    yield found


def report(page: Page) -> PageReport:
    too_wide: list[int] = []
    for width in (360, 390, 768, 1440):
        page.set_viewport_size({"width": width, "height": 800})
        if not page.evaluate(FITS, width):
            too_wide.append(width)
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true })")
    faults: dict[str, list[str]] = {}
    for scheme in SCHEMES:
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        faults[scheme] = [
            *find_unnamed(page),
            *dict.fromkeys(cast("list[str]", page.evaluate(CONTRAST))),
        ]
    tags = cast(
        "list[str]",
        page.evaluate("[...document.querySelectorAll('h1,h2,h3')].map((h) => h.tagName)"),
    )
    return PageReport(
        faults=faults,
        too_wide=too_wide,
        num_headings=page.locator("h1").count(),
        num_current=page.locator("nav [aria-current=page]").count(),
        levels=[int(tag[1]) for tag in tags],
        calls=cast("list[tuple[str, str]]", page.evaluate(CALLS)),
        num_forms=page.locator("form[method=post i]").count(),
    )


def find_unnamed(page: Page) -> list[str]:
    """Return the page's controls that have no name in the browser's accessibility tree."""
    session = page.context.new_cdp_session(page)
    tree = session.send("Accessibility.getFullAXTree")
    session.detach()
    found: list[str] = []
    for node in cast("list[dict[str, dict[str, object]]]", tree["nodes"]):
        role = str(node.get("role", {}).get("value", ""))
        if (
            not node.get("ignored")
            and role in CONTROLS
            and not str(node.get("name", {}).get("value", "")).strip()
        ):
            found.append(f"{role} {node.get('nodeId')}")
    return found


def test_controls_have_names_and_text_has_contrast(reports: dict[str, PageReport]) -> None:
    wrong = {name: page.faults for name, page in reports.items() if any(page.faults.values())}
    assert not wrong, wrong


def test_pages_fit_the_window_width(reports: dict[str, PageReport]) -> None:
    assert not {name: page.too_wide for name, page in reports.items() if page.too_wide}


def test_pages_mark_their_navigation_item_and_have_one_heading(
    reports: dict[str, PageReport],
) -> None:
    for name, page in reports.items():
        assert page.num_headings == page.num_current == 1, name
        assert all(deeper - level <= 1 for level, deeper in pairwise(page.levels)), (
            name,
            page.levels,
        )


def test_buttons_call_only_the_public_api(
    reports: dict[str, PageReport], gateway: ServedGateway
) -> None:
    """Buttons and forms call only routes of the OpenAPI document."""
    described = cast(
        "dict[str, dict[str, object]]", gateway.http.get("/openapi.json").json()["paths"]
    )
    shapes = [
        (method, re.compile(re.sub(r"\{\w+\}", "[^/]+", path) + r"(\?.*)?"))
        for path, methods in described.items()
        for method in methods
    ]
    commands: set[str] = set()
    for name, page in reports.items():
        assert page.num_forms == 0, f"{name}: only the login uses a form of the browser"
        for method, address in page.calls:
            assert any(way == method and shape.fullmatch(address) for way, shape in shapes), (
                name,
                method,
                address,
            )
            commands.add(f"{method} {address.partition('?')[0].rpartition('/')[2]}")
    assert {"post drain", "post dump", "post redeliver", "post stop", "post retry"} <= commands, (
        commands
    )


@pytest.mark.parametrize("name", ["now", "requests", "request", "workers", "jobs"])
def test_tab_key_visits_controls_in_order(
    open_page: OpenPage, gateway: ServedGateway, name: str
) -> None:
    page = open_page(paths(gateway)[name])
    page.locator("#main").evaluate(
        "main => main.before(Object.assign(document.createElement('i'), { id: 'mark' }))"
    )
    stops: list[dict[str, object]] = []
    for _ in range(60):
        page.keyboard.press("Tab")
        stop = cast("dict[str, object] | None", page.evaluate(FOCUSED))
        if stop is None:
            break
        stops.append(stop)
    assert len(stops) > 12, stops
    assert not [stop for stop in stops if not (stop["ring"] and stop["onwards"] and stop["seen"])]


def test_animations_stop_under_reduced_motion(open_page: OpenPage) -> None:
    page = open_page("/now")
    page.emulate_media(reduced_motion="reduce")
    assert page.evaluate("document.getAnimations().length") == 0
    rules = (
        "[...document.styleSheets].flatMap((sheet) => [...sheet.cssRules]).map((rule) => "
        "rule.cssText)"
    )
    css = "\n".join(cast("list[str]", page.evaluate(rules)))
    outside = re.sub(
        r"@media \(prefers-reduced-motion: no-preference\) \{.*?\n\}", "", css, flags=re.DOTALL
    )
    assert not re.findall(r"^\s*(?:animation|transition)\b", outside, flags=re.MULTILINE)
