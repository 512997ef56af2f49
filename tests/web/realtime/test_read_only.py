"""A read-only gateway serves conversations and pages, but gives no access to other clients'
responses and voice sessions.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support import wait_until
from tests.web.conftest import ASK, Loaded, ServedGateway, bounded, serving
from tests.web.fake_client import Script
from tests.web.realtime.refused_socket import refusal_of
from tests.web.realtime.socket_client import opened


@pytest.fixture(scope="module")
def shared_gateway(loaded: Loaded) -> Iterator[ServedGateway]:
    with serving(bounded(loaded, read_only=True)) as gateway:
        yield gateway


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_read_only_gateway_refuses_to_resume_a_stream(gateway: ServedGateway, method: str) -> None:
    gateway.client.script = Script(gap_s=0.02)
    body = {**ASK, "stream": True}
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(gateway.http.post, "/v1/chat/completions", json=body)
        (request,) = wait_until(lambda: list(gateway.client.streams), "the answer to be under way")
        taken = gateway.http.request(method, f"/v1/fleet/requests/{request}/stream")
        whole = asked.result()
    if method == "GET":
        assert taken.status_code == 403 and taken.json()["error"]["code"] == "read_only"
        assert "web.read_only" in taken.json()["error"]["message"]
    assert taken.status_code in (403, 405) and whole.text.endswith("data: [DONE]\n\n")


async def test_read_only_gateway_shows_only_the_end_of_session_ids(gateway: ServedGateway) -> None:
    async with opened(gateway) as page:
        await page.ask("hello")
        response = (await page.done())["id"]
        (request,) = gateway.client.streams
        wait_until(
            lambda: gateway.client.voice.held[page.session].fields.get("view"),
            "the session to be listed",
        )
        shown = {
            path: gateway.http.get(path).text
            for path in (
                "/v1/fleet/sessions",
                "/sessions",
                "/v1/fleet/requests",
                f"/v1/fleet/requests/{request}",
                f"/requests/{request}",
                f"/v1/fleet/requests/{request}/trace",
                "/requests",
                "/now",
            )
        }
        assert not [path for path, text in shown.items() if page.session in text]
        (listed,) = gateway.http.get("/v1/fleet/sessions").json()["data"]
        assert (
            page.session.endswith(listed["id"].removeprefix("sess_..."))
            and listed["id"] in shown["/sessions"]
        )
        refusal = await refusal_of(gateway, f"/console/ws?session={listed['id']}")
        assert refusal.error["code"] == "not_found"
        await page.drop()
    async with opened(gateway, session=page.session, response=response, samples=0) as again:
        assert again.session == page.session
