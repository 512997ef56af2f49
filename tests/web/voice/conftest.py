"""The Voice page in headless Chromium, before a double of its socket."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray
from playwright.sync_api import Page, expect
from starlette.applications import Starlette
from starlette.routing import Mount, WebSocketRoute
from tokenizers import Tokenizer

from tests.support import wait_until
from tests.web.conftest import Loaded
from tests.web.fake_client import FakeClient
from tests.web.voice.browsers import Browsers, visiting
from tests.web.voice.fake_server import Double
from web.app import create_app
from web.serve import Server, uvicorn_config

LAN_NAME = "fleet.test"


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    url: str
    double: Double


@contextmanager
def serve_double(loaded: Loaded) -> Iterator[Site]:
    """The real pages, also under a name that is no loopback's; the voice socket is the double's."""
    double = Double()
    web = loaded.config.web.model_copy(update={"allowed_hosts": (LAN_NAME,)})
    config = loaded.config.model_copy(update={"web": web})
    tokenizer = Tokenizer.from_file(str(loaded.checkpoint / "tokenizer.json"))
    inner = create_app(config, FakeClient(loaded.config.graph_declaration(), tokenizer), loaded.frontend, None)
    app = Starlette(routes=[WebSocketRoute("/console/ws", double.endpoint), Mount("/", inner)])
    app.state.closing, app.state.detach_all, app.state.close = inner.state.closing, inner.state.detach_all, inner.state.close
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = Server(uvicorn_config(app, loaded.config), app)
        thread = threading.Thread(target=lambda: server.run([listener]), daemon=True)
        thread.start()
        wait_until(lambda: server.started, "uvicorn to start")
        yield Site(url=f"http://127.0.0.1:{listener.getsockname()[1]}", double=double)
        server.should_exit = True
        thread.join(timeout=15)


@pytest.fixture(scope="session")
def site(loaded: Loaded) -> Iterator[Site]:
    with serve_double(loaded) as site:
        yield site


@pytest.fixture
def double(site: Site) -> Double:
    site.double.reset()
    return site.double


@pytest.fixture(scope="module")
def browsers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browsers]:
    with Browsers.started(tmp_path_factory.mktemp("sounds")) as browsers:
        yield browsers


@pytest.fixture
def typist(browsers: Browsers, site: Site, double: Double) -> Iterator[Page]:
    """A visitor without a microphone."""
    with visiting(browsers.hearing("nothing", None), site.url) as page:
        expect(page.locator("#state")).to_have_text("Ready")
        yield page


@pytest.fixture
def speaker(browsers: Browsers, site: Site, double: Double) -> Iterator[Callable[[str, NDArray[np.int16]], Page]]:
    """A visitor whose microphone hears a sound, from when the page opens it."""
    contexts: list[AbstractContextManager[Page]] = []

    def visit(name: str, sound: NDArray[np.int16]) -> Page:
        context = visiting(browsers.hearing(name, sound), site.url)
        contexts.append(context)
        return context.__enter__()

    yield visit
    for context in contexts:
        context.__exit__(None, None, None)
