"""Audio files crafted to be expensive are refused, and delay no other request."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from fleet.core.errors import FleetError, NoWorker, Overloaded
from tests.support import wait_until
from tests.web import attacks
from tests.web.attacks import AttackTarget
from tests.web.conftest import Loaded, ServedGateway, serving
from tests.web.fake_client import RATE_HZ, Script
from tests.web.sound_bombs import big_pictures, codebooks, many_channels, silence, wav
from tests.web.stuck_decoder import StuckDecoders, stuck_decoders
from tests.web.test_bad_input import error_of
from tests.web.test_disconnect import in_flight
from tests.web.test_recordings import ask, audio_len_s, input_audio
from web.http.errors import status_of

NUM_BOMBS = 12
FIELD = "messages[0].content[0].input_audio.data"


@contextmanager
def stuck_gateway(
    loaded: Loaded, script: Script | None = None
) -> Iterator[tuple[ServedGateway, StuckDecoders]]:
    """Run a gateway whose audio decoders never reply; yield the gateway and the stuck decoders."""
    with stuck_decoders() as stuck, serving(loaded) as gateway:
        gateway.client.script = script or Script()
        yield gateway, stuck


def send(gateway: ServedGateway, file: bytes) -> socket.socket:
    """Send an audio file over a plain socket; return the socket, which the caller closes."""
    messages = [{"role": "user", "content": [input_audio(file, None)]}]
    wire = AttackTarget.of(gateway.url).connect()
    attacks.post(wire, {"model": "omni", "messages": messages})
    return wire


@pytest.mark.parametrize(
    "file", [many_channels(seconds=0.1), codebooks()], ids=["channels", "codebooks"]
)
def test_audio_bomb_is_refused_by_chat_and_transcription(
    gateway: ServedGateway, file: bytes
) -> None:
    error = error_of(ask(gateway, input_audio(file, "ogg")))
    assert error["param"] == FIELD and str(error["message"]).startswith(f"{FIELD}: ")
    answer = gateway.http.post(
        "/v1/audio/transcriptions", data={"model": "omni"}, files={"file": ("bomb.ogg", file)}
    )
    assert error_of(answer)["param"] == "file"
    assert not gateway.client.submitted


def test_recording_with_large_pictures_is_accepted(gateway: ServedGateway) -> None:
    assert ask(gateway, input_audio(big_pictures(num_frames=1), "webm")).status_code == 200
    assert abs(audio_len_s(gateway) - 1) < 0.1


def test_other_requests_are_answered_while_bombs_are_decoded(loaded: Loaded) -> None:
    """Other requests are answered while audio bombs are decoded. The decoders never reply, so a
    request that waited for one would never end.
    """
    with stuck_gateway(loaded) as (gateway, stuck), ExitStack() as bombs:
        for _ in range(NUM_BOMBS):
            bombs.enter_context(send(gateway, codebooks()))
        wait_until(
            lambda: gateway.client.num_checked == NUM_BOMBS and len(stuck.pids()) == 2,
            "all of them to be decoded",
        )
        assert "".join(
            chunk.choices[0].delta.content or "" for chunk in gateway.stream() if chunk.choices
        )
        assert gateway.create().choices[0].message.content
        plain = wav(RATE_HZ, 1, 16, bytes(2 * RATE_HZ))
        assert (
            ask(gateway, input_audio(plain, "wav")).status_code == 200
            and gateway.http.get("/health").status_code == 200
        )
        assert len(gateway.client.submitted) == 3
        bombs.close()
        wait_until(
            lambda: not stuck.pids() and in_flight(gateway) == 0,
            "the decoding to end with its clients",
        )


def test_number_of_requests_in_preparation_is_bounded(loaded: Loaded) -> None:
    file = silence("FLAC", "PCM_16", RATE_HZ, 1, 1)
    with stuck_gateway(loaded, Script(places=2)) as (gateway, stuck):
        with send(gateway, file), send(gateway, file):
            wait_until(lambda: len(stuck.pids()) == 2, "both to be decoded")
            answer = ask(gateway, input_audio(file, "flac"))
            assert answer.status_code == 429 and answer.headers["retry-after"]
            assert "2 requests with audio are being prepared" in answer.json()["error"]["message"]
            assert gateway.create().choices[0].message.content

        def is_decoded() -> bool:
            with send(gateway, file) as wire:
                wire.settimeout(0.2)
                try:
                    assert b" 429 " in wire.recv(65_536)
                except TimeoutError:  # no answer
                    return bool(stuck.pids())
                return False

        wait_until(is_decoded, "the places of both, which ended with their clients")


@pytest.mark.parametrize(
    "refusal", [Overloaded("full"), NoWorker("no worker serves the role talker", retry_after_s=7)]
)
def test_refused_request_is_not_decoded(loaded: Loaded, refusal: FleetError) -> None:
    with stuck_gateway(loaded, Script(admission=refusal)) as (gateway, stuck):
        answer = ask(gateway, input_audio(silence("FLAC", "PCM_16", RATE_HZ, 1, 1), "flac"))
        assert answer.status_code == status_of(refusal) and answer.headers["retry-after"] == str(
            refusal.retry_after_s
        )
        assert not stuck.pids() and not gateway.client.submitted


def test_unknown_voice_is_refused_before_decoding(loaded: Loaded) -> None:
    with stuck_gateway(loaded) as (gateway, stuck):
        content = [input_audio(codebooks(), "ogg")]
        body = {
            "model": "omni",
            "messages": [{"role": "user", "content": content}],
            "audio": {"voice": "nobody"},
        }
        assert (
            error_of(gateway.http.post("/v1/chat/completions", json=body))["param"] == "audio.voice"
        )
        assert not stuck.pids()
