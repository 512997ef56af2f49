"""POST /v1/audio/transcriptions through the OpenAI client, and invalid forms."""

import asyncio
import io
from collections.abc import Mapping
from typing import Any, cast

import httpx
import numpy as np
import pytest
import soundfile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.audio import Transcription, TranscriptionVerbose
from openai.types.audio.transcription_create_params import TranscriptionCreateParamsNonStreaming

from fleet.core.errors import BadInput, EngineError
from fleet.processing import Recording
from tests.support import await_until
from tests.web.conftest import LIMITS, Loaded, ServedGateway, serving
from tests.web.fake_client import RATE_HZ, FakeClient, Script
from tests.web.realtime.speech_samples import spoken
from tests.web.test_bad_input import error_of
from tests.web.test_disconnect import wait_for_abort
from web.gateway import gateway as web_gateway
from web.openai.recognition import transcribe

PATH = "/v1/audio/transcriptions"
QUICK = settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def sound(seconds: float = 2.0, kind: str = "WAV") -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, spoken(round(seconds * RATE_HZ)), RATE_HZ, format=kind)
    return buffer.getvalue()


def write_down(
    gateway: ServedGateway, file: bytes | None = None, **fields: object
) -> httpx.Response:
    data = {"model": "omni", **fields}
    return gateway.http.post(
        PATH, data=data, files={"file": ("a.wav", sound() if file is None else file)}
    )


def params(**fields: object) -> TranscriptionCreateParamsNonStreaming:
    return cast(
        TranscriptionCreateParamsNonStreaming,
        {"model": "omni", "file": ("a.wav", sound()), **fields},
    )


def test_openai_client_receives_text_and_usage(gateway: ServedGateway) -> None:
    answer = gateway.openai().audio.transcriptions.create(**params(language="en", temperature=0.5))
    assert isinstance(answer, Transcription) and answer.text == Script().text
    spec, blob = gateway.client.submitted[0]
    assert answer.usage is not None and answer.usage.type == "tokens"
    assert answer.usage.input_tokens == len(spec.prompt_ids) and answer.usage.output_tokens > 0
    assert (
        answer.usage.input_token_details is not None
        and answer.usage.input_token_details.audio_tokens == 26
    )
    assert spec.outputs == ("text",) and blob is not None and len(blob) == 4 * 32_000
    asked = gateway.client.tokenizer.decode(list(spec.prompt_ids))
    assert "Transcribe the English audio" in asked
    (main,) = spec.sampling.values()
    assert main.temperature == 0.5


def test_default_is_greedy_and_ignored_fields_are_reported(gateway: ServedGateway) -> None:
    answer = write_down(gateway, user="u")
    (main,) = gateway.client.submitted[0][0].sampling.values()
    assert main.temperature == 0 and answer.headers["x-fleet-ignored"] == "user"


def test_plain_text_response(gateway: ServedGateway) -> None:
    answer = gateway.openai().audio.transcriptions.create(**params(response_format="text"))
    assert cast(object, answer) == Script().text
    assert (
        write_down(gateway, response_format="text").headers["content-type"].startswith("text/plain")
    )


@pytest.mark.parametrize("language", ["de", None])
def test_verbose_json_is_one_segment_over_the_clip(
    gateway: ServedGateway, language: str | None
) -> None:
    given = {"language": language} if language is not None else {}
    fields = params(
        response_format="verbose_json",
        timestamp_granularities=["segment"],
        temperature=0.5,
        **given,
    )
    answer = cast(object, gateway.openai().audio.transcriptions.create(**fields))
    assert isinstance(answer, TranscriptionVerbose)
    TranscriptionVerbose.model_validate(answer.model_dump(), strict=True)
    assert (
        answer.text == Script().text
        and answer.duration == 2.0
        and answer.language == (language or "unknown")
    )
    assert answer.usage is not None and answer.usage.seconds == 2.0 and answer.words is None
    (segment,) = answer.segments or []
    assert (segment.start, segment.end, segment.text, segment.temperature) == (
        0,
        2.0,
        answer.text,
        0.5,
    )
    # readers discard a segment below -1, above 2.4 and above 0.6
    assert (
        segment.avg_logprob > -1
        and segment.compression_ratio < 2.4
        and segment.no_speech_prob < 0.6
    )


@pytest.mark.parametrize(
    ("kind", "granularities", "status"),
    [
        ("verbose_json", ["segment"], 200),
        ("verbose_json", ["segment", "word"], 400),
        ("verbose_json", ["word", "segment"], 400),
        ("json", ["segment", "word"], 200),
    ],
)
def test_word_timestamps_are_refused(
    gateway: ServedGateway, kind: str, granularities: list[str], status: int
) -> None:
    fields = {"model": "omni", "response_format": kind, "timestamp_granularities[]": granularities}
    answer = gateway.http.post(PATH, data=fields, files={"file": ("a.wav", sound())})
    assert answer.status_code == status
    assert ("use segment" in answer.text) is (status == 400)


@pytest.mark.parametrize(
    "name", ["timestamp_granularities", "timestamp_granularities[]", "timestamp_granularities[1]"]
)
@pytest.mark.parametrize(
    "given", ["word,segment", "segment, word", '["word"]', "['segment', 'word']", "Word"]
)
def test_word_timestamps_in_one_field_are_refused(
    gateway: ServedGateway, name: str, given: str
) -> None:
    answer = write_down(gateway, None, response_format="verbose_json", **{name: given})
    assert error_of(answer)["param"] == "timestamp_granularities"
    served = write_down(gateway, None, response_format="verbose_json", **{name: '["segment"]'})
    assert served.status_code == 200 and "x-fleet-ignored" not in served.headers


@pytest.mark.parametrize("name", ["reference_audio", "audio_url", "images", "messages"])
def test_unknown_content_field_of_form_is_refused_with_advice(
    gateway: ServedGateway, name: str
) -> None:
    error = error_of(write_down(gateway, None, **{name: "data:audio/wav;base64,UklGRg=="}))
    assert error["param"] == name and str(error["message"]).endswith("; send it as the field file")
    assert "voice" not in str(error["message"]) and "chat" not in str(error["message"])


def test_streamed_transcription_has_deltas(gateway: ServedGateway) -> None:
    stream = gateway.openai().audio.transcriptions.create(
        model="omni", file=("a.wav", sound()), stream=True
    )
    *deltas, done = list(stream)
    texts = [delta.delta for delta in deltas if delta.type == "transcript.text.delta"]
    assert len(texts) == len(deltas) > 2 and "".join(texts) == Script().text
    assert done.type == "transcript.text.done" and done.text == Script().text
    assert (
        done.usage is not None
        and done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens
    )


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
def test_file_format_is_detected_by_content(gateway: ServedGateway, kind: str) -> None:
    assert write_down(gateway, sound(kind=kind)).json()["text"] == Script().text


def test_failure_is_reported_before_and_within_stream(gateway: ServedGateway) -> None:
    gateway.client.script = Script(fail_at=2, failure=EngineError("out of memory"))
    assert error_of(write_down(gateway), 500)["code"] == "engine_error"
    lines = [line for line in write_down(gateway, stream="true").text.splitlines() if line]
    assert "engine_error" in lines[-1] and "transcript.text.done" not in lines[-1]


@pytest.mark.parametrize("stream", ["true", "false"])
def test_disconnect_aborts_request(gateway: ServedGateway, stream: str) -> None:
    gateway.client.script = Script(stall_at=3)
    with (
        httpx.Client(base_url=gateway.url, timeout=0.5) as leaving,
        pytest.raises(httpx.ReadTimeout),
    ):
        leaving.post(
            PATH, data={"model": "omni", "stream": stream}, files={"file": ("a.wav", sound())}
        )
    wait_for_abort(gateway)


@pytest.mark.parametrize(
    ("fields", "param", "status"),
    [
        ({"response_format": "srt"}, "response_format", 400),
        ({"response_format": "vtt"}, "response_format", 400),
        ({"response_format": "diarized_json"}, "response_format", 400),
        (
            {"response_format": "verbose_json", "timestamp_granularities": "word"},
            "timestamp_granularities",
            400,
        ),
        ({"response_format": "xml"}, "response_format", 400),
        ({"temperature": "warm"}, "temperature", 400),
        ({"temperature": "nan"}, "temperature", 400),
        ({"temperature": "3"}, "temperature", 400),
        ({"stream": "perhaps"}, "stream", 400),
        ({"model": "other"}, "model", 404),
    ],
)
def test_invalid_field_is_refused_by_name(
    gateway: ServedGateway, fields: Mapping[str, str], param: str, status: int
) -> None:
    error = error_of(write_down(gateway, None, **fields), status)
    assert (
        error["param"] == param and param in str(error["message"]) and not gateway.client.submitted
    )


@pytest.mark.parametrize(
    "file",
    [b"", b"MZ not sound" * 50, sound()[:60], sound(0.01)],
    ids=["none", "other", "cut", "short"],
)
def test_undecodable_audio_is_refused_by_field(gateway: ServedGateway, file: bytes) -> None:
    error = error_of(write_down(gateway, file))
    assert error["param"] == "file" and str(error["message"]).startswith("file: ")


def test_too_short_or_long_audio_is_refused(gateway: ServedGateway) -> None:
    error = error_of(write_down(gateway, sound(LIMITS.max_audio_s + 0.5)), 413)
    assert error["param"] == "file" and f"{LIMITS.max_audio_s:g} s" in str(error["message"])
    assert (
        error_of(write_down(gateway, bytes(LIMITS.max_body_bytes)), 413)["code"]
        == "input_too_large"
    )


def test_incomplete_form_is_refused(gateway: ServedGateway) -> None:
    files = {"file": ("a.wav", sound())}
    assert error_of(gateway.http.post(PATH, files=files))["param"] == "model"
    assert (
        error_of(
            gateway.http.post(PATH, data={"model": "omni"}, files={"other": ("a.wav", sound())})
        )["param"]
        == "file"
    )
    text = gateway.http.post(PATH, files={"file": (None, "text"), "model": (None, "omni")})
    assert error_of(text)["param"] == "file"
    assert "multipart" in str(error_of(gateway.http.post(PATH, json={"model": "omni"}))["message"])
    assert "multipart" in str(error_of(gateway.http.post(PATH))["message"])
    for kind in ("multipart/form-data", "multipart/form-data; boundary=x"):
        assert "form" in str(
            error_of(
                gateway.http.post(PATH, content=b"--y\r\n\r\n", headers={"content-type": kind})
            )["message"]
        )


REFERENCE = ("reference_audio", ("r.wav", b"RIFF"))


@pytest.mark.parametrize(
    ("uploads", "param"),
    [
        ([REFERENCE], "reference_audio"),
        ([REFERENCE] * 5, "reference_audio"),
        ([("file", ("b.wav", b"RIFF"))], "file"),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_further_upload_of_a_transcription_is_refused_by_name(
    gateway: ServedGateway, uploads: list[tuple[str, tuple[str, bytes]]], param: str, is_first: bool
) -> None:
    file = [("file", ("a.wav", sound()))]
    answer = gateway.http.post(
        PATH, data={"model": "omni"}, files=file + uploads if is_first else uploads + file
    )
    error = error_of(answer)
    assert (
        error["param"] == param
        and error["code"] == "unsupported_value"
        and not gateway.client.submitted
    )
    assert (
        error["message"]
        == f"{param}: one file is transcribed per request; send it as the field file"
    )


def test_text_beside_a_file_of_the_same_name_is_refused(gateway: ServedGateway) -> None:
    data = {"model": "omni", "file": "data:audio/wav;base64,AAAA"}
    answer = gateway.http.post(PATH, data=data, files={"file": ("a.wav", sound())})
    assert "one file" in str(error_of(answer)["message"])


def test_empty_upload_beside_file_is_ignored(gateway: ServedGateway) -> None:
    """An empty upload beside the file is ignored, since browsers send one for an unused file
    chooser.
    """
    files = [("file", ("a.wav", sound())), ("reference_audio", ("", b""))]
    assert gateway.http.post(PATH, data={"model": "omni"}, files=files).status_code == 200


def test_empty_model_selects_served_one(gateway: ServedGateway) -> None:
    """An empty model name selects the served model, since Open WebUI sends one if none is
    chosen.
    """
    answer = gateway.http.post(PATH, data={"model": ""}, files={"file": ("a.wav", sound())})
    assert answer.status_code == 200, answer.text


def test_transcription_is_refused_by_text_model(text_only: Loaded) -> None:
    with serving(text_only) as gateway:
        answer = write_down(gateway, model=gateway.http.get("/v1/models").json()["data"][0]["id"])
        assert error_of(answer)["param"] == "file"


def test_translations_are_not_served(gateway: ServedGateway) -> None:
    answer = gateway.http.post(
        "/v1/audio/translations", data={"model": "omni"}, files={"file": ("a.wav", sound())}
    )
    assert "translations are not served" in str(error_of(answer, 400)["message"])


@QUICK
@given(st.binary(max_size=400), st.binary(max_size=20))
def test_arbitrary_bytes_in_form_are_refused(
    gateway: ServedGateway, raw: bytes, boundary: bytes
) -> None:
    error_of(write_down(gateway, raw))
    kind = b"multipart/form-data; boundary=" + boundary.hex().encode()
    content = b"--" + boundary.hex().encode() + b"\r\n" + raw
    answer = gateway.http.post(PATH, content=content, headers={b"content-type": kind})
    assert error_of(answer, answer.status_code) and answer.status_code < 500


@QUICK
@given(st.integers(0, 2000), st.integers(0, 255), st.sampled_from(["WAV", "FLAC", "OGG", "MP3"]))
def test_damaged_file_is_accepted_or_refused(
    gateway: ServedGateway, at: int, byte: int, kind: str
) -> None:
    file = bytearray(sound(0.2, kind))
    file[at % len(file)] = byte
    answer = write_down(gateway, bytes(file))
    if answer.status_code != 200:
        assert error_of(answer, answer.status_code)["param"] == "file" and answer.status_code < 500


def inner(loaded: Loaded) -> tuple[web_gateway.Gateway, FakeClient]:
    client = loaded.fake_client()
    return web_gateway.Gateway(loaded.config, client, loaded.frontend), client


async def test_internal_transcription_is_cancellable(loaded: Loaded) -> None:
    gateway, client = inner(loaded)
    recording = Recording(spoken(2 * RATE_HZ), RATE_HZ)
    assert await transcribe(gateway, recording) == Script().text
    heard = np.frombuffer(client.submitted[0][1] or b"", "<f4")
    assert len(heard) == 32_000 and abs(float(np.abs(heard).max()) - 20_000 / 32768) < 0.01
    with pytest.raises(BadInput, match="shorter"):
        await transcribe(gateway, Recording(recording.samples[:100], RATE_HZ))
    client.script = Script(stall_at=2)
    asking: asyncio.Task[Any] = asyncio.create_task(transcribe(gateway, recording))

    async def is_asked() -> bool:
        return len(client.submitted) == 2

    await await_until(is_asked, "the request to be submitted")
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert client.streams[client.submitted[1][0].id].aborted == "the client left"
