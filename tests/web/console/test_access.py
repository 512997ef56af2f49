"""Who cannot use a mouse, or see well, can use every page: names, contrast as drawn, the way of the Tab key, what is focused."""

import re
from collections.abc import Callable
from typing import Literal, cast

import pytest
from playwright.sync_api import Page

from tests.web.conftest import Gateway
from tests.web.console.busy_gateway import paths

CONTROLS = ("button", "link", "textbox", "searchbox", "combobox", "checkbox", "radio", "slider", "spinbutton")
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
CONTRAST = """() => {
  const channels = (colour) => {
    const canvas = window.probe ??= Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = ([r, g, b, a], [R, G, B]) => [r * a + R * (1 - a), g * a + G * (1 - a), b * a + B * (1 - a), 1];
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)).reduce((sum, c, n) => sum + c * [0.2126, 0.7152, 0.0722][n], 0);
  const ground = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) layers.push(channels(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((under, layer) => over(layer, under), [255, 255, 255, 1]);
  };
  const poor = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, element = node.parentElement;
    if (!node.data.trim() || !element.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    const style = getComputedStyle(element), under = ground(element);
    const inked = channels(element instanceof SVGElement ? style.fill : style.color);
    let faded = 1;
    for (let at = element; at; at = at.parentElement) faded *= Number(getComputedStyle(at).opacity);
    inked[3] *= faded;
    const [a, b] = [light(over(inked, under)), light(under)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const px = parseFloat(style.fontSize), large = px >= 24 || (px >= 18.66 && Number(style.fontWeight) >= 700);
    if (ratio < (large ? 3 : 4.5)) poor.push(`${ratio.toFixed(2)}: ${element.tagName}.${element.getAttribute("class")} ${node.data.trim().slice(0, 40)}`);
  }
  return poor;
}"""  # noqa: E501
# a player has stops of its own, which the browser draws and does not tell
FOCUSED = """() => {
  const here = document.activeElement;
  if (!here || here === document.body) return null;
  window.trail = window.trail ?? [];
  const before = window.trail.at(-1);
  window.trail.push(here);
  const style = getComputedStyle(here);
  return {
    what: `${here.tagName} ${here.id} ${here.getAttribute("aria-label") ?? here.textContent.trim().slice(0, 30)}`,
    ring: here instanceof HTMLAudioElement || style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2,
    onwards: !before || before === here || Boolean(before.compareDocumentPosition(here) & Node.DOCUMENT_POSITION_FOLLOWING),
    seen: here.checkVisibility() && here.getBoundingClientRect().width > 0,
  };
}"""


def unnamed(page: Page) -> list[str]:
    """Controls to which the browser itself gives assistive technology no name."""
    session = page.context.new_cdp_session(page)
    tree = session.send("Accessibility.getFullAXTree")
    session.detach()
    found: list[str] = []
    for node in cast("list[dict[str, dict[str, object]]]", tree["nodes"]):
        role = str(node.get("role", {}).get("value", ""))
        if not node.get("ignored") and role in CONTROLS and not str(node.get("name", {}).get("value", "")).strip():
            found.append(f"{role} {node.get('nodeId')}")
    return found


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_control_has_a_name_and_every_word_can_be_read(
    open_page: Callable[[str], Page], gateway: Gateway, scheme: Literal["light", "dark"]
) -> None:
    wrong: dict[str, list[str]] = {}
    for name, path in paths(gateway).items():
        page = open_page(path)
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true })")
        if found := [*unnamed(page), *dict.fromkeys(cast("list[str]", page.evaluate(CONTRAST)))]:
            wrong[name] = found
    assert not wrong, wrong


@pytest.mark.parametrize("name", ["overview", "requests", "request", "workers", "jobs"])
def test_the_tab_key_leads_through_the_page_in_order(open_page: Callable[[str], Page], gateway: Gateway, name: str) -> None:
    page = open_page(paths(gateway)[name])
    page.locator("#main").evaluate("main => main.before(Object.assign(document.createElement('i'), { id: 'mark' }))")
    stops: list[dict[str, object]] = []
    for _ in range(60):
        page.keyboard.press("Tab")
        stop = cast("dict[str, object] | None", page.evaluate(FOCUSED))
        if stop is None:
            break
        stops.append(stop)
    assert len(stops) > 12, stops
    assert not [stop for stop in stops if not (stop["ring"] and stop["onwards"] and stop["seen"])]


def test_what_moves_stands_still_for_who_asks_for_it(open_page: Callable[[str], Page]) -> None:
    page = open_page("/overview")
    page.emulate_media(reduced_motion="reduce")
    assert page.evaluate("document.getAnimations().length") == 0
    rules = "[...document.styleSheets].flatMap((sheet) => [...sheet.cssRules]).map((rule) => rule.cssText)"
    css = "\n".join(cast("list[str]", page.evaluate(rules)))
    outside = re.sub(r"@media \(prefers-reduced-motion: no-preference\) \{.*?\n\}", "", css, flags=re.DOTALL)
    assert not re.findall(r"^\s*(?:animation|transition)\b", outside, flags=re.MULTILINE)


def test_every_page_says_where_it_is_and_has_one_heading(open_page: Callable[[str], Page], gateway: Gateway) -> None:
    for path in paths(gateway).values():
        page = open_page(path)
        assert page.locator("h1").count() == 1 and page.locator("main").count() == 1, path
        assert page.locator("nav [aria-current=page]").count() == 1, path
        levels = [int(str(tag)[1]) for tag in page.evaluate("[...document.querySelectorAll('h1,h2,h3')].map((h) => h.tagName)")]
        assert all(deeper - level <= 1 for level, deeper in zip(levels, levels[1:], strict=False)), (path, levels)


def test_every_button_calls_the_public_api(open_page: Callable[[str], Page], gateway: Gateway) -> None:
    """Buttons and forms that change the fleet go to routes that the OpenAPI document lists, and to nothing else."""
    described = cast("dict[str, dict[str, object]]", gateway.http.get("/openapi.json").json()["paths"])
    shapes = [
        (method, re.compile(re.sub(r"\{\w+\}", "[^/]+", path) + r"(\?.*)?"))
        for path, methods in described.items()
        for method in methods
    ]
    orders: set[str] = set()
    running = next(story for story in gateway.client.telemetry.traces.values() if story.state == "running")
    for path in (*paths(gateway).values(), f"/requests/{running.id}"):
        page = open_page(path)
        found = page.evaluate(
            "['post', 'put', 'patch', 'delete', 'get'].flatMap((way) => [...document.querySelectorAll(`[hx-${way}]`)]"
            ".map((one) => [way, one.getAttribute(`hx-${way}`)]))"
        )
        for method, address in cast("list[tuple[str, str]]", found):
            assert any(way == method and shape.fullmatch(address) for way, shape in shapes), (path, method, address)
            orders.add(f"{method} {address.partition('?')[0].rpartition('/')[2]}")
        assert page.locator("form[method=post i]").count() == 0, "forms by the browser itself are for the key only"
    assert {"post drain", "post dump", "post redeliver", "post stop", "post retry"} <= orders, orders
