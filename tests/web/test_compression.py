"""Compression of pages, JSON and live pages' streams, and of nothing else."""

import http.client
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest

from tests.web.conftest import ASK, KEY, ServedGateway
from tests.web.console.busy_gateway import fill
from tests.web.console.watched_page import publish_event
from web.http.csrf_mask import mask, unmask

GZIP = {"accept-encoding": "gzip"}
NUM_CHANGES = 6


@pytest.mark.parametrize("path", ["/now", "/openapi.json", "/v1/fleet/requests", "/static/now.js"])
def test_page_and_json_are_compressed_for_clients_that_ask(
    gateway: ServedGateway, path: str
) -> None:
    fill(gateway)
    plain = gateway.http.get(path, headers={"accept-encoding": "identity"})
    refused = gateway.http.get(path, headers={"accept-encoding": "gzip;q=0, br"})
    with gateway.http.stream("GET", path, headers=GZIP) as packed:
        raw = b"".join(packed.iter_raw())
    assert packed.headers["content-encoding"] == "gzip"
    assert "accept-encoding" in packed.headers["vary"].lower()
    assert len(raw) < len(plain.content) / 2
    for answer in (plain, refused):
        assert "content-encoding" not in answer.headers
    if path.startswith("/static"):
        assert zlib.decompress(raw, 31) == plain.content


def test_answers_streams_of_the_api_and_audio_are_sent_as_they_are(gateway: ServedGateway) -> None:
    streamed = {**ASK, "stream": True, "n": 1}
    spoken = {"model": "omni", "input": "Hello there.", "voice": "alloy"}
    for path, body in (
        ("/v1/chat/completions", ASK),
        ("/v1/chat/completions", streamed),
        ("/v1/audio/speech", spoken),
    ):
        answer = gateway.http.post(path, json=body, headers=GZIP).raise_for_status()
        assert "content-encoding" not in answer.headers, path
    request = gateway.client.submitted[-1][0].id
    stream = gateway.http.get(f"/v1/fleet/requests/{request}/stream", headers=GZIP)
    audio = gateway.http.get(f"/v1/fleet/requests/{request}/audio", headers=GZIP)
    for answer in (stream, audio):
        assert answer.status_code == 200 and "content-encoding" not in answer.headers


@contextmanager
def live(gateway: ServedGateway, **headers: str) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(urlsplit(gateway.url).netloc, timeout=20)
    try:
        connection.request("GET", "/console/live/workers", headers=headers)
        yield connection.getresponse()
    finally:
        connection.close()


def messages(response: http.client.HTTPResponse) -> Iterator[tuple[str, int]]:
    """Yield each message of a stream as soon as it is whole, with its bytes on the wire."""
    packed = response.headers["content-encoding"] == "gzip"
    unpack = zlib.decompressobj(31) if packed else None
    text, size = b"", 0
    while part := response.read1(65536):
        size += len(part)
        text += unpack.decompress(part) if unpack is not None else part
        while b"\n\n" in text:
            message, _, text = text.partition(b"\n\n")
            yield message.decode(), size
            size = 0


def change(gateway: ServedGateway, number: int) -> None:
    """Change the load of a worker, and tell the open pages."""
    workers = gateway.client.telemetry.worker_list
    workers[0] = msgspec.structs.replace(workers[0], running=number)
    publish_event(gateway.client.telemetry)


def test_live_page_is_compressed_and_each_message_is_sent_at_once(gateway: ServedGateway) -> None:
    fill(gateway)
    sizes: dict[str, int] = {}
    for name, headers in (("plain", {}), ("gzip", {"accept-encoding": "gzip"})):
        with live(gateway, **headers) as response:
            found = messages(response)
            first, sizes[f"{name}, whole page"] = next(found)
            assert first.startswith("id: ") and "hx-partial" in first
            changes = 0
            for number in range(NUM_CHANGES):
                change(gateway, 700 + number)
                message, size = next(found)
                while str(700 + number) not in message:
                    message, more = next(found)
                    size += more
                changes += size
            sizes[f"{name}, {NUM_CHANGES} changes"] = changes
    print(json.dumps(sizes))
    for part in ("whole page", f"{NUM_CHANGES} changes"):
        assert sizes[f"gzip, {part}"] * 4 < sizes[f"plain, {part}"]


def test_csrf_token_has_another_form_in_each_page(locked: ServedGateway) -> None:
    with httpx.Client(base_url=locked.url, headers={"origin": locked.url}) as browser:
        assert browser.post("/console/login", data={"key": KEY}).status_code == 303
        pages = [browser.get("/now").text for _ in range(2)]
    found = [re.search(r'data-csrf="([0-9a-f]+)"', page) for page in pages]
    first, second = (one.group(1) for one in found if one is not None)
    assert first != second and unmask(first) == unmask(second) and KEY not in pages[0]
    assert unmask(first) not in pages[0]


def test_mask_of_a_token_is_undone_and_other_texts_are_no_mask() -> None:
    assert unmask(mask("00ff" * 16)) == "00ff" * 16
    for text in ("", "nonsense", "abc", "ab", "00ff00"):
        assert unmask(text) == ""
