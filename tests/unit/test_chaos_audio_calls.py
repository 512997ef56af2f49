"""Speech and transcription calls of `fleet chaos`, and its spoken questions, at fake gateways."""

import io
import threading
import wave
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import msgspec
import pytest

from fleet.config import load_config
from fleet.graphs import GRAPHS
from fleet.lab.faults import audio_calls
from fleet.lab.faults.audio_calls import (
    SPEECH,
    TRANSCRIPTION,
    AudioCall,
    AudioLoad,
    AudioOutcome,
    has_audio_calls,
    make_calls,
)
from fleet.lab.faults.requests import is_sampled, make_bodies
from tests.support import HttpHandler, serve_http
from tests.unit.test_chaos import OPTIONS

CASCADE = load_config(None, ("graph=cascade",))
ANSWERS = {"/v1/audio/speech": b"\x01\x00" * 8, "/v1/audio/transcriptions": b'{"text":"hello"}'}


def wav() -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as opened:
        opened.setparams((1, 2, 24_000, 0, "NONE", ""))
        opened.writeframes(b"\x02\x00" * 240)
    return file.getvalue()


@dataclass(slots=True)
class AudioGateway:
    """Fake gateway of the two routes. `statuses`: of its next answers; "cut": the connection breaks
    in the middle of the answer. Afterwards it answers every call.
    """

    statuses: list[str] = field(default_factory=list[str])
    is_wrong: bool = False
    url: str = ""
    paths: list[str] = field(default_factory=list[str])
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, handler: HttpHandler) -> None:
        handler.read_body()
        with self.lock:
            self.paths.append(handler.path)
            status = self.statuses.pop(0) if self.statuses else "200"
        body = ANSWERS[handler.path]
        if self.is_wrong:
            body = body.replace(b"\x01", b"\x03", 1)
        handler.send_response(200 if status == "cut" else int(status))
        handler.send_header("transfer-encoding", "chunked")
        handler.end_headers()
        sent = body[: len(body) // 2] if status == "cut" else body
        handler.wfile.write(b"%x\r\n%b\r\n" % (len(sent), sent))
        if status != "cut":
            handler.wfile.write(b"0\r\n\r\n")


@contextmanager
def serving(*gateways: AudioGateway) -> Iterator[list[str]]:
    with ExitStack() as stack:
        for gateway in gateways:
            gateway.url = stack.enter_context(serve_http(gateway.answer))
        yield [gateway.url for gateway in gateways]


def send_all(*gateways: AudioGateway, faults: list[str]) -> tuple[AudioOutcome, ...]:
    """Send a speech and a transcription call, undisturbed and then with `faults` at the last
    gateway, until both are answered; return the outcomes.
    """
    calls = [AudioCall(text="Hi.", seed=3), AudioCall(clip=wav())]
    with serving(*gateways) as urls:
        load = AudioLoad(urls, None, "m", calls)
        load.record_reference(lambda: None)
        gateways[-1].statuses = faults
        with load.running(lambda: None):
            pass
        return load.finish()


@pytest.mark.parametrize("fault", ["cut", "503", "429"])
def test_call_is_sent_again_until_it_is_answered(fault: str) -> None:
    outcomes = send_all(AudioGateway(), AudioGateway(), faults=[fault] * 2)
    assert {each.kind for each in outcomes} == {SPEECH, TRANSCRIPTION}
    assert sum(each.tries for each in outcomes) > len(outcomes)
    assert not any(each.lost or each.different for each in outcomes)


def test_call_that_fails_for_good_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = send_all(AudioGateway(), faults=["400", "500"] * 50)
    assert all("refused with status" in each.lost and each.tries == 1 for each in outcomes)
    monkeypatch.setattr(audio_calls, "GIVE_UP_S", 0.0)
    outcomes = send_all(AudioGateway(), faults=["503"] * 50)
    assert all("status 503" in each.lost for each in outcomes)


def test_answer_with_another_byte_is_different() -> None:
    gateway = AudioGateway()
    with serving(gateway) as urls:
        load = AudioLoad(urls, None, "m", [AudioCall(text="Hi.")])
        load.record_reference(lambda: None)
        gateway.is_wrong = True
        with load.running(lambda: None):
            pass
        assert {(each.different, each.lost) for each in load.finish()} == {(True, "")}


def test_graphs_that_hear_and_speak_in_stages_of_their_own_have_audio_calls() -> None:
    assert [name for name, graph in GRAPHS.items() if has_audio_calls(graph)] == ["cascade"]
    assert AudioLoad([], None, "m", make_calls([])).finish() == ()


def test_half_of_the_requests_ask_aloud_where_there_are_clips() -> None:
    bodies = [
        msgspec.json.decode(body)
        for body in make_bodies("m", CASCADE, replace(OPTIONS, requests=8), [wav()])
    ]
    assert all(body["modalities"] == ["text", "audio"] for body in bodies), "no transcript"
    spoken = [isinstance(body["messages"][0]["content"], list) for body in bodies]
    assert spoken == [False, False, True, True] * 2
    assert {is_sampled(number) for number in range(8) if spoken[number]} == {False, True}
    assert bodies[2]["messages"][0]["content"][0]["input_audio"]["format"] == "wav"
