"""What open pages of the console cost a browser: `python -m tests.web.page_tasks URL` opens each in
Chromium at a fleet that is busy meanwhile, and prints its longest task and its number of nodes.
"""

import argparse
from typing import cast

from playwright.sync_api import Page, sync_playwright
from rich.console import Console

from fleet.lab.report.tables import table_of
from tests.web.chromium import chromium_path
from tests.web.voice.browsers import ARGS

ROOMS = ("", "now", "requests", "fleet", "workers", "incidents", "sessions", "queues", "logs")
NOTE_TASKS = """
window.longTasks = [];
new PerformanceObserver((list) => {
  window.longTasks.push(...list.getEntries().map((entry) => [entry.startTime, entry.duration]));
}).observe({ type: "longtask", buffered: true });
"""
"""Script for a page: note tasks over 50 ms, each with its begin and length in ms."""
NUM_NODES = "document.getElementsByTagName('*').length"
OPENING_S = 5.0


def watch(page: Page, seconds: float) -> tuple[list[float], int, int]:
    """Return the lengths in ms of the tasks over 50 ms of a page that has been open for
    `OPENING_S`, and its numbers of nodes before and after `seconds`.
    """
    page.wait_for_timeout(1e3 * OPENING_S)
    before = cast("int", page.evaluate(NUM_NODES))
    begin_ms = cast("float", page.evaluate("performance.now()"))
    page.wait_for_timeout(1e3 * seconds)
    tasks = cast("list[list[float]]", page.evaluate("window.longTasks"))
    after = cast("int", page.evaluate(NUM_NODES))
    return [length for at, length in tasks if at >= begin_ms], before, after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="address of a gateway")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each page (10)")
    parser.add_argument("--rooms", nargs="+", default=ROOMS, help="paths of pages")
    given = parser.parse_args()
    table = table_of("page", "tasks over 50 ms", "longest, ms", "nodes before", "after")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium_path(), headless=True, args=ARGS
        )
        for room in given.rooms:
            page = browser.new_page()
            page.add_init_script(NOTE_TASKS)
            page.goto(f"{given.url}/{room}")
            tasks, before, after = watch(page, given.seconds)
            longest = f"{max(tasks):.0f}" if tasks else "-"
            table.add_row(f"/{room}", str(len(tasks)), longest, str(before), str(after))
            page.close()
        browser.close()
    Console().print(table)


if __name__ == "__main__":
    main()
