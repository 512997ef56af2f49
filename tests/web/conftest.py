"""Fixtures that run the gateway under a real uvicorn on a free port, over a control plane in
memory.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import httpx
import pytest
from openai import OpenAI
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from starlette.applications import Starlette

from fleet.config.schema import FleetConfig, Limits, WebConfig
from fleet.models.qwen3_omni.tiny_tokenizer import write_json
from fleet.processing import Frontend, load_frontend, open_frontend
from fleet.processing.tokenizer import load_tokenizer
from tests.support import wait_until
from tests.tool_template import call_text, write_tool_template
from tests.web.attacks import AttackTarget
from tests.web.checkpoint import write_frontend_files
from tests.web.fake_client import FakeClient
from web.app import create_app
from web.http.tls import TlsFiles, tls_files
from web.realtime.clock import Clock
from web.serve import Server, uvicorn_config

LIMITS = Limits(
    max_body_bytes=2_000_000,
    max_prompt_tokens=2_000,
    max_audio_s=5,
    max_answer_tokens=500,
    max_messages=8,
)


KEY = "secret"
SAID = "One moment."
"""What `caller` says before its call."""
HELLO = [{"role": "user", "content": "hello"}]
ASK: dict[str, object] = {"model": "omni", "messages": HELLO}
"""JSON body of a chat request."""


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def request_id_of(answer: ChatCompletion) -> str:
    found = answer._request_id  # pyright: ignore[reportPrivateUsage]
    assert found is not None
    return found


def usage_of(answer: ChatCompletion | ChatCompletionChunk) -> CompletionUsage:
    assert answer.usage is not None
    return answer.usage


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedGateway:
    """A running gateway, its fake control plane, and OpenAI clients of it by API key."""

    url: str
    client: FakeClient
    config: FleetConfig
    http: httpx.Client
    stop: Callable[[], None]
    clients: dict[str, OpenAI] = field(default_factory=dict[str, OpenAI])

    def create(self, **fields: object) -> ChatCompletion:
        """Create a chat completion with the OpenAI client; model and messages have defaults."""
        return cast(ChatCompletion, self._ask(fields))

    def stream(self, **fields: object) -> Iterator[ChatCompletionChunk]:
        return cast(Iterator[ChatCompletionChunk], self._ask({**fields, "stream": True}))

    def _ask(self, fields: dict[str, object]) -> object:
        create = cast(Callable[..., object], self.openai().chat.completions.create)
        return create(**{**ASK, **fields})

    def openai(self, key: str = "none") -> OpenAI:
        if key not in self.clients:
            self.clients[key] = OpenAI(
                base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=20
            )
        return self.clients[key]


def chat(gateway: ServedGateway, **fields: object) -> httpx.Response:
    """Create a chat completion by a plain HTTP request; model and messages have defaults."""
    return gateway.http.post("/v1/chat/completions", json={**ASK, **fields})


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    checkpoint: Path
    config: FleetConfig
    frontend: Frontend

    def fake_client(self) -> FakeClient:
        """Build a control plane in memory for gateways of this configuration."""
        return FakeClient(self.config.graph_declaration(), load_tokenizer(self.checkpoint))


def load(folder: Path) -> Loaded:
    """Write a tiny checkpoint into `folder`; return it with its configuration and frontend."""
    checkpoint = write_frontend_files(folder)
    config = FleetConfig(limits=LIMITS, web=WebConfig(model_name="omni"), data_dir=folder / "data")
    frontend = load_frontend(config.graph_declaration().frontend, checkpoint, config.limits)
    return Loaded(checkpoint=checkpoint, config=config, frontend=frontend)


def load_cascade(folder: Path) -> Loaded:
    """Write what a gateway of the graph `cascade` reads into `folder`."""
    checkpoint = write_frontend_files(folder / "lm")
    for stage in ("asr", "tts"):
        (folder / stage).mkdir()
    languages = {"lang_to_id": {"<|en|>": 1, "<|de|>": 2}}
    write_json(folder / "asr" / "generation_config.json", languages)
    write_json(folder / "tts" / "voice.json", {"voice": "v", "voices": ["Heart", "bella"]})
    web = WebConfig(model_name="omni")
    config = FleetConfig(graph="cascade", limits=LIMITS, web=web, data_dir=folder / "data")
    return Loaded(checkpoint=checkpoint, config=config, frontend=open_frontend(config, folder))


@pytest.fixture(scope="session")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def cascade(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load_cascade(tmp_path_factory.mktemp("cascade"))


@pytest.fixture(scope="session")
def tooled(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A checkpoint whose chat template writes tools."""
    loaded = load(tmp_path_factory.mktemp("tooled"))
    write_tool_template(loaded.checkpoint)
    graph, limits = loaded.config.graph_declaration(), loaded.config.limits
    return replace(loaded, frontend=load_frontend(graph.frontend, loaded.checkpoint, limits))


@pytest.fixture(scope="session")
def text_only(loaded: Loaded) -> Loaded:
    """The loaded checkpoint with a graph that produces only text."""
    config = FleetConfig(graph="text", limits=LIMITS)
    frontend = load_frontend(config.graph_declaration().frontend, loaded.checkpoint, config.limits)
    return Loaded(checkpoint=loaded.checkpoint, config=config, frontend=frontend)


def allowing(loaded: Loaded, *origins: str) -> Loaded:
    """Return a copy of `loaded` with these origins in the setting `web.allowed_origins`."""
    return bounded(loaded, allowed_origins=origins)


def bounded(loaded: Loaded, **web: object) -> Loaded:
    """Return a copy of `loaded` with these values of the settings under `web`."""
    return replace(
        loaded,
        config=loaded.config.model_copy(update={"web": loaded.config.web.model_copy(update=web)}),
    )


def with_voice(loaded: Loaded, **settings: object) -> Loaded:
    """Return a copy of `loaded` with these values of the settings under `voice`."""
    voice = loaded.config.voice.model_copy(update=settings)
    return replace(loaded, config=loaded.config.model_copy(update={"voice": voice}))


@contextmanager
def serving(
    loaded: Loaded,
    api_key: str | None = None,
    client: FakeClient | None = None,
    port: int = 0,
    tls: TlsFiles | None = None,
    clock: Clock | None = None,
) -> Iterator[ServedGateway]:
    """Run a gateway. `client`: control plane of another gateway, to share it. `port`: port of a
    stopped gateway, to replace that gateway.
    """
    client = client or loaded.fake_client()
    app = create_app(loaded.config, client, loaded.frontend, api_key, clock)
    with (
        serving_app(app, loaded.config, port, tls) as served,
        httpx.Client(base_url=served.url, verify=False, timeout=20) as http,
    ):
        gateway = ServedGateway(
            url=served.url, client=client, config=loaded.config, http=http, stop=served.stop
        )
        yield gateway
        for lent in gateway.clients.values():
            lent.close()


@dataclass(frozen=True, slots=True)
class ServedApp:
    url: str
    stop: Callable[[], None]


@contextmanager
def serving_app(
    app: Starlette, config: FleetConfig, port: int = 0, tls: TlsFiles | None = None
) -> Iterator[ServedApp]:
    """Run an ASGI application under uvicorn as the gateway configures it."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        server = Server(uvicorn_config(app, config, tls), app)
        thread = threading.Thread(target=lambda: server.run([listener]), daemon=True)
        thread.start()
        wait_until(lambda: server.started, "uvicorn to start")
        yield ServedApp(
            f"{'https' if tls is not None else 'http'}://127.0.0.1:{listener.getsockname()[1]}",
            server.stop,
        )
        server.should_exit = True
        thread.join(timeout=15)
        assert not thread.is_alive(), "uvicorn did not stop"


@pytest.fixture(scope="session")
def shared_gateway(loaded: Loaded) -> Iterator[ServedGateway]:
    with serving(loaded) as gateway:
        yield gateway


@pytest.fixture(scope="session")
def shared_cascade(cascade: Loaded) -> Iterator[ServedGateway]:
    """A gateway of the graph `cascade` that transcribes turns when they have ended."""
    with serving(with_voice(cascade, partial_ms=0)) as gateway:
        yield gateway


@pytest.fixture
def cascade_gateway(shared_cascade: ServedGateway) -> ServedGateway:
    """The shared gateway of the graph `cascade`, with its fake control plane reset."""
    shared_cascade.client.reset()
    return shared_cascade


@pytest.fixture
def gateway(shared_gateway: ServedGateway) -> ServedGateway:
    """The shared gateway, with its fake control plane reset."""
    shared_gateway.client.reset()
    return shared_gateway


@pytest.fixture(scope="session")
def shared_caller(tooled: Loaded) -> Iterator[ServedGateway]:
    """A gateway of a model that calls functions."""
    with serving(tooled) as gateway:
        yield gateway


@pytest.fixture
def caller(shared_caller: ServedGateway) -> ServedGateway:
    """The shared gateway of a model that calls functions, whose next answer is text and a call."""
    shared_caller.client.reset()
    shared_caller.client.script.text = f"{SAID}\n{call_text()}"
    return shared_caller


@pytest.fixture
def serve_with(loaded: Loaded) -> Iterator[Callable[[str | None], ServedGateway]]:
    """Function that starts a separate gateway with an API key."""
    with ExitStack() as gateways:
        yield lambda api_key: gateways.enter_context(serving(loaded, api_key))


@pytest.fixture
def target(gateway: ServedGateway) -> AttackTarget:
    return AttackTarget.of(gateway.url)


@pytest.fixture
def quick(loaded: Loaded) -> Iterator[ServedGateway]:
    """A gateway with short timeouts."""
    with serving(
        bounded(loaded, header_timeout_s=0.3, body_timeout_s=0.3, send_timeout_s=0.3)
    ) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles | None:
    """Files of a self-signed certificate."""
    folder = str(tmp_path_factory.mktemp("tls"))
    return tls_files(
        FleetConfig.model_validate({"data_dir": folder, "web": {"tls": "self-signed"}})
    )


@pytest.fixture
def locked(serve_with: Callable[[str | None], ServedGateway]) -> ServedGateway:
    """A gateway that requires the API key `KEY`."""
    return serve_with(KEY)
