"""No input stalls the event loop: other answers continue while a body, a file or an event is
parsed.
"""

import base64
import json
import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from websockets.sync.client import connect

from tests.noises import noise, wav
from tests.support import REPO
from tests.web.bombs import (
    APPEND,
    BODIES,
    CHAT,
    EVENTS,
    FORM,
    JSON,
    SPEECH,
    TRANSCRIPTIONS,
    Bomb,
    audio_chat,
    field,
    filled,
    wav_base64,
)
from tests.web.gateway_target import GatewayTarget, gateway_target, new_address

pytestmark = pytest.mark.one_file_in(3, "gateways under load")

MAX_STALL_S = 0.05
MAX_TRIES = 12
"""Number of measurements per input: a stall that the input causes appears in each, a random stall
does not.
"""
POCKET = REPO / "fleet/checkpoints/pocket"
NUM_CHARS = 262_000
"""Number of characters just below the limit above which a text is refused before it is encoded."""

TEXTS = {
    "one word": "ab" * 30_000,
    "one long word": "x" * NUM_CHARS,
    "apostrophes in a word": "a" + "'" * 60_000 + "b",
    "emoji": "\N{GRINNING FACE}" * NUM_CHARS,
    "spaces": " " * NUM_CHARS,
    "line feeds": "\n" * NUM_CHARS,
    "digits": "1" * NUM_CHARS,
    "digits and signs": "1 -" * 60_000,
    "zeros": "0" * NUM_CHARS,
    "joiners": "\N{ZERO WIDTH JOINER}" * NUM_CHARS,
    "ligatures of eighteen letters": "\N{ARABIC LIGATURE SALLALLAHOU ALAYHE WASALLAM}" * NUM_CHARS,
    "combining accents": "a" + "\N{COMBINING ACUTE ACCENT}" * NUM_CHARS,
    "beginnings of control tokens": "<|im_" * 50_000,
    "ordinary words": "hello world " * 21_000,
}
SPEECHES = {
    "spaces": " " * 4_096,
    "one word": "a" * 4_096,
    "emoji": "\N{GRINNING FACE}" * 4_096,
    "short sentences": "A. " * 1_365,
    "words far apart": ("a" + " " * 200) * 20,
}


def chat(text: str) -> bytes:
    return json.dumps({"model": "omni", "messages": [{"role": "user", "content": text}]}).encode()


def speech(text: str) -> bytes:
    return json.dumps({"model": "omni", "input": text, "response_format": "pcm"}).encode()


def upload(content: bytes) -> bytes:
    file = field(b"file") + b'; filename="a.wav"'
    return b"--bomb\r\n%b\r\n\r\nomni\r\n--bomb\r\n%b\r\n\r\n%b\r\n--bomb--\r\n" % (
        field(b"model"),
        file,
        content,
    )


def two_minutes_of_noise() -> bytes:
    """Return the recording in which the search for speech takes longest."""
    return wav(noise(np.random.default_rng(0), 16_000, 119, -30), 16_000)


def body(name: str, path: str, make: Callable[[], bytes], media_type: str = JSON) -> Bomb:
    return Bomb(name=name, make=make, status=0, message="", path=path, media_type=media_type)


PART = b'{"type":"text","text":"hello "}'
COSTLY = [
    *BODIES,
    *(
        body(f"{name} to speak", SPEECH, lambda text=text: speech(text))
        for name, text in SPEECHES.items()
    ),
    body("long recording", CHAT, lambda: audio_chat(11_000_000)),
    body("too long recording", CHAT, lambda: audio_chat(23_000_000)),
    body(
        "thousands of parts",
        CHAT,
        lambda: filled(
            b'{"model":"omni","messages":[{"role":"user","content":[',
            PART + b",",
            PART + b"]}]}",
            500_000,
        ),
    ),
    body("text of megabytes", CHAT, lambda: chat("x" * 20_000_000)),
    body(
        "metadata of megabytes",
        CHAT,
        lambda: filled(
            b'{"model":"omni","messages":[{"role":"user","content":"hi"}],"metadata":{"note":"',
            b"x",
            b'"}}',
        ),
    ),
    body("file", TRANSCRIPTIONS, lambda: upload(base64.b64decode(wav_base64(11_000_000))), FORM),
    body(
        "too long file",
        TRANSCRIPTIONS,
        lambda: upload(base64.b64decode(wav_base64(30_000_000))),
        FORM,
    ),
    body("file of noise", TRANSCRIPTIONS, lambda: upload(os.urandom(30_000_000)), FORM),
    body("two minutes of noise", TRANSCRIPTIONS, lambda: upload(two_minutes_of_noise()), FORM),
    body(
        "file of beginnings of boundaries",
        TRANSCRIPTIONS,
        lambda: upload(b"\r\n--bom" * 4_000_000),
        FORM,
    ),
]

EVENTS_IN_USE = {
    "ten seconds of audio": APPEND + base64.b64encode(bytes(480_000)) + b'"}',
    "most audio of an event": APPEND + base64.b64encode(bytes(10_000_000)) + b'"}',
    "text of an item": json.dumps(
        {
            "type": "conversation.item.create",
            "item": {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "hello " * 40_000}],
            },
        }
    ).encode(),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayTarget]:
    with gateway_target(tmp_path_factory.mktemp("tiny")) as target:
        yield target


@pytest.fixture(scope="module")
def pocket() -> Iterator[GatewayTarget]:
    with gateway_target(POCKET) as target:
        yield target


def assert_no_stall(target: GatewayTarget, send: Callable[[], object]) -> None:
    stalls: list[float] = []
    target.longest_stall_s()
    for _ in range(MAX_TRIES):
        send()
        stalls.append(target.longest_stall_s())
        if stalls[-1] <= MAX_STALL_S:
            return
    raise AssertionError(
        f"the event loop stalls for {', '.join(f'{1000 * stall:.0f}' for stall in stalls)} ms"
    )


@pytest.mark.parametrize("costly", COSTLY, ids=str)
def test_body_does_not_stall_the_event_loop(tiny: GatewayTarget, costly: Bomb) -> None:
    content = costly.make()

    def send() -> None:
        assert tiny.post(costly.path, content, costly.media_type).status_code != 429

    assert_no_stall(tiny, send)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("checkpoint", ["tiny", "pocket"])
def test_prompt_does_not_stall_the_event_loop(
    request: pytest.FixtureRequest, checkpoint: str, text: str
) -> None:
    target: GatewayTarget = request.getfixturevalue(checkpoint)
    content = chat(text)
    assert_no_stall(target, lambda: target.post(CHAT, content, JSON))


@pytest.mark.parametrize("content", EVENTS_IN_USE.values(), ids=EVENTS_IN_USE)
def test_event_does_not_stall_the_event_loop(tiny: GatewayTarget, content: bytes) -> None:
    assert_no_stall(tiny, lambda: send_event(tiny, content))


@pytest.mark.parametrize("bomb", EVENTS, ids=str)
def test_costly_event_does_not_stall_the_event_loop(tiny: GatewayTarget, bomb: Bomb) -> None:
    content = bomb.make()
    assert_no_stall(tiny, lambda: send_event(tiny, content))


def send_event(target: GatewayTarget, content: bytes) -> None:
    """Send an event with `content` and then a second event; return once the gateway has handled
    both.
    """
    with connect(
        target.url.replace("http", "ws") + "/v1/realtime", source_address=(new_address(), 0)
    ) as socket:
        socket.send(content, text=True)
        socket.send('{"type": "input_audio_buffer.clear"}')
        while json.loads(socket.recv())["type"] != "input_audio_buffer.cleared":
            pass
