"""The API page: Swagger UI renders every operation under the content security policy, and needs the
same key as the OpenAPI document.
"""

from collections.abc import Callable

import pytest
from playwright.sync_api import Browser, expect

from tests.web.conftest import ServedGateway
from tests.web.voice.browsers import visiting

pytestmark = pytest.mark.one_file_in(4, "pages in a browser")

VIOLATIONS = """
window.violations = [];
addEventListener("securitypolicyviolation", (event) =>
  violations.push(`${event.violatedDirective} ${event.blockedURI}`));
"""


def test_api_page_renders_every_operation_without_policy_violation(
    browser: Browser, gateway: ServedGateway
) -> None:
    described = gateway.http.get("/openapi.json").json()["paths"]
    with visiting(browser) as page:
        hosts: set[str] = set()
        page.add_init_script(VIOLATIONS)
        page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
        page.goto(f"{gateway.url}/docs")
        expect(page.locator(".opblock")).to_have_count(
            sum(len(methods) for methods in described.values())
        )
        page.locator("#operations-default-get_v1_models").click()
        page.get_by_role("button", name="Try it out").click()
        page.get_by_role("button", name="Execute").click()
        expect(page.locator(".live-responses-table tbody .response-col_status")).to_have_text("200")
        assert not page.evaluate("violations"), page.evaluate("violations")
        assert {host for host in hosts if host} == {gateway.url.removeprefix("http://")}


def test_api_page_needs_the_key_and_sends_changes_with_the_login(
    browser: Browser, serve_with: Callable[[str | None], ServedGateway]
) -> None:
    gateway = serve_with("a-key-of-this-gateway")
    assert (
        gateway.http.get("/docs").status_code
        == gateway.http.get("/openapi.json").status_code
        == 401
    )
    with visiting(browser, expected=("status of 401",)) as page:
        page.goto(f"{gateway.url}/docs")
        page.get_by_label("API key").fill("a-key-of-this-gateway")
        page.get_by_role("button", name="Open the console").click()
        page.locator("#operations-default-post_v1_chat_completions").click()
        page.get_by_role("button", name="Try it out").click()
        page.locator(".opblock textarea").fill(
            '{"model": "omni", "messages": [{"role": "user", "content": "hello"}]}'
        )
        page.get_by_role("button", name="Execute").click()
        expect(page.locator(".live-responses-table tbody .response-col_status")).to_have_text("200")
