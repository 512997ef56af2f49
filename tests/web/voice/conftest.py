"""Fixtures: the Voice page in headless Chromium, with a fake server behind its WebSocket."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray
from playwright.sync_api import Page, expect
from starlette.applications import Starlette
from starlette.routing import Mount, WebSocketRoute

from tests.web.conftest import Loaded, bounded, serving_app
from tests.web.voice.browsers import Browsers, Visit, visiting
from tests.web.voice.fake_server import FakeVoiceServer
from web.app import create_app

LAN_NAME = "fleet.test"


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    url: str
    server: FakeVoiceServer


@contextmanager
def serve_fake_voice(loaded: Loaded) -> Iterator[Site]:
    """Serve the real pages over the fake voice server, also under a host name that is not
    loopback's.
    """
    server = FakeVoiceServer()
    config = bounded(loaded, allowed_hosts=(LAN_NAME,)).config
    inner = create_app(config, loaded.fake_client(), loaded.frontend, None)
    app = Starlette(routes=[WebSocketRoute("/console/ws", server.endpoint), Mount("/", inner)])
    app.state.closing = inner.state.closing
    app.state.detach_all = inner.state.detach_all
    app.state.calls_left = inner.state.calls_left
    app.state.close = inner.state.close
    with serving_app(app, config) as served:
        yield Site(url=served.url, server=server)


@pytest.fixture(scope="session")
def site(loaded: Loaded) -> Iterator[Site]:
    with serve_fake_voice(loaded) as site:
        yield site


@pytest.fixture
def server(site: Site) -> FakeVoiceServer:
    site.server.reset()
    return site.server


@pytest.fixture(scope="module")
def browsers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browsers]:
    with Browsers.started(tmp_path_factory.mktemp("audio")) as browsers:
        yield browsers


@pytest.fixture
def text_page(browsers: Browsers, site: Site, server: FakeVoiceServer) -> Iterator[Page]:
    """The open Voice page without a microphone."""
    with visiting(browsers.with_microphone("nothing", None), site.url) as page:
        expect(page.locator("#state")).to_have_text("Ready")
        yield page


@pytest.fixture(scope="module")
def module_page(browsers: Browsers, site: Site) -> Iterator[Page]:
    """A Voice page for tests that only call its modules."""
    with visiting(browsers.with_microphone("nothing", None), site.url) as page:
        yield page


@pytest.fixture
def visit_with_mic(browsers: Browsers, site: Site, server: FakeVoiceServer) -> Iterator[Visit]:
    """Function that opens the Voice page with a microphone that plays the given audio, from when
    the page opens the microphone.
    """
    with ExitStack() as stack:

        def visit(name: str, audio: NDArray[np.int16]) -> Page:
            context: AbstractContextManager[Page] = visiting(
                browsers.with_microphone(name, audio), site.url
            )
            return stack.enter_context(context)

        yield visit
