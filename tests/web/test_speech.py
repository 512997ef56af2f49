"""POST /v1/audio/speech through the OpenAI client: formats, streaming, errors."""

import base64
import io
import json
import wave
from collections.abc import Iterator, Mapping
from typing import Any, cast

import httpx
import numpy as np
import openai
import pytest
import soundfile
import soxr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.audio.speech_create_params import SpeechCreateParams

from fleet.core.errors import EngineError, Overloaded
from fleet.core.request import RequestSpec
from fleet.processing import g711
from tests.web import attacks
from tests.web.attacks import HEAD, AttackTarget, read_up_to
from tests.web.conftest import Loaded, ServedGateway, serving
from tests.web.fake_client import RATE_HZ, Script, sine
from tests.web.sounds import decoded, likeness
from tests.web.test_bad_input import JUNK, error_of
from tests.web.test_disconnect import wait_for_abort

PATH = "/v1/audio/speech"
TEXT = "Hello there, this is me."
GOOD = {"model": "omni", "input": TEXT, "voice": "alloy"}
LONG = (
    "The first sentence is here. And then comes another one! Is there a third, which is longer "
    "than those? There is. " * 4
)
SECOND = RATE_HZ


def said(gateway: ServedGateway, spec: RequestSpec) -> str:
    return gateway.client.tokenizer.decode(list(spec.given))


def speak(gateway: ServedGateway, **fields: object) -> httpx.Response:
    return gateway.http.post(PATH, json={**GOOD, **fields})


def params(**fields: object) -> SpeechCreateParams:
    return cast(SpeechCreateParams, {**GOOD, **fields})


@pytest.mark.parametrize("kind", ["wav", "pcm", "mp3", "flac", "opus", "aac"])
@pytest.mark.parametrize("speed", [1.0, 2.0])
def test_openai_client_receives_audio_in_each_format(
    gateway: ServedGateway, kind: str, speed: float
) -> None:
    gateway.client.script = Script(num_samples=2 * SECOND, samples_per_chunk=1920)
    streaming = gateway.openai().audio.speech.with_streaming_response
    with streaming.create(**params(response_format=kind, speed=speed)) as answer:
        pieces = list(answer.iter_bytes())
    file = b"".join(pieces)
    samples = np.frombuffer(file, "<i2") if kind == "pcm" else decoded(file)
    assert abs(len(samples) - 2 * SECOND / speed) < 0.1 * SECOND
    expected = sine(round(2 * SECOND / speed))
    assert likeness(samples, expected) > 0.97
    if kind in ("pcm", "wav", "flac") and speed == 1:
        assert np.array_equal(samples, expected), "nothing is lost"


@pytest.mark.parametrize(("kind", "law"), [("pcmu", "mu"), ("pcma", "a")])
@pytest.mark.parametrize("speed", [1.0, 2.0])
def test_speech_for_a_telephone_has_one_byte_a_sample_at_8_khz(
    gateway: ServedGateway, kind: str, law: g711.Law, speed: float
) -> None:
    gateway.client.script = Script(num_samples=2 * SECOND, samples_per_chunk=1920)
    answer = speak(gateway, response_format=kind, speed=speed)
    assert answer.headers["content-type"] == f"audio/{kind}"
    samples = g711.decode(answer.content, law)
    assert abs(len(samples) / g711.RATE_HZ - 2 / speed) < (0.1 if speed != 1 else 1e-3)
    expected = soxr.resample(sine(round(2 * SECOND / speed)), RATE_HZ, g711.RATE_HZ)
    assert likeness(samples, expected) > 0.97


def test_default_format_is_mp3(gateway: ServedGateway) -> None:
    answer = speak(gateway)
    assert answer.headers["content-type"] == "audio/mpeg" and len(decoded(answer.content)) > 0


def test_wav_of_unknown_length_is_readable(gateway: ServedGateway) -> None:
    file = speak(gateway, response_format="wav").content
    expected = sine(Script().num_samples)
    samples, rate_hz = soundfile.read(io.BytesIO(file), dtype="int16")
    assert rate_hz == RATE_HZ and np.array_equal(samples, expected)
    with wave.open(io.BytesIO(file)) as reader:
        assert (reader.getnchannels(), reader.getsampwidth(), reader.getframerate()) == (
            1,
            2,
            RATE_HZ,
        )
        assert reader.readframes(reader.getnframes()) == expected.tobytes()


def test_text_is_given_answer_without_sampling(gateway: ServedGateway) -> None:
    answer = speak(gateway, user="u", seed=5, voice={"id": "onyx"})
    (spec,) = [spec for spec, _ in gateway.client.submitted]
    assert said(gateway, spec) == TEXT and TEXT in gateway.client.tokenizer.decode(
        list(spec.prompt_ids)
    )
    assert spec.given[-1] == gateway.client.tokenizer.token_to_id("<|im_end|>")
    main = spec.sampling[next(stage.name for stage in gateway.client.graph.stages if stage.main)]
    assert main.max_tokens == len(spec.given) and not main.stop
    assert all(sampling.seed == 5 for sampling in spec.sampling.values())
    assert answer.headers["x-fleet-voice"] == spec.params["voice"] == "ethan"
    assert answer.headers["x-fleet-ignored"] == "user"
    assert answer.headers["x-request-id"] == spec.id


def events_of(gateway: ServedGateway, **fields: object) -> Iterator[dict[str, Any]]:
    streaming = gateway.openai().audio.speech.with_streaming_response
    with streaming.create(**params(stream_format="sse", **fields)) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line:
                yield json.loads(line.removeprefix("data: "))


def test_sse_stream_has_same_file_and_usage(gateway: ServedGateway) -> None:
    *deltas, done = events_of(gateway, response_format="wav")
    assert {delta["type"] for delta in deltas} == {"speech.audio.delta"} and len(deltas) > 2
    assert (
        b"".join(base64.b64decode(delta["audio"]) for delta in deltas)
        == speak(gateway, response_format="wav").content
    )
    usage = done["usage"]
    assert done["type"] == "speech.audio.done" and usage["output_tokens"] == 6
    assert (
        usage["input_tokens"] > 0
        and usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    )


def test_long_text_is_spoken_in_pieces(gateway: ServedGateway) -> None:
    answer = speak(gateway, input=LONG, response_format="pcm")
    specs = [spec for spec, _ in gateway.client.submitted]
    limits = gateway.config.limits
    assert len(specs) > 2 and all(len(spec.given) <= limits.speech_piece_tokens for spec in specs)
    assert "".join(said(gateway, spec) for spec in specs) == LONG
    assert all(said(gateway, spec).strip()[-1] in ".!?" for spec in specs), "sentences stay whole"
    assert answer.content == sine(Script().num_samples).tobytes() * len(specs)
    assert (
        len({spec.id for spec in specs}) == len(specs)
        and len({spec.params["voice"] for spec in specs}) == 1
    )


def test_further_piece_is_retried_while_queue_is_full(gateway: ServedGateway) -> None:
    """A refusal of a later piece of the text, while the queue is full, is retried; a refusal of the
    first piece is returned to the client.
    """
    gateway.client.script = Script(
        refusal=Overloaded("64 requests are running"), refusals=range(1, 3)
    )
    answer = speak(gateway, input=LONG, response_format="pcm")
    assert answer.status_code == 200 and len(answer.content) == 2 * Script().num_samples * len(
        gateway.client.submitted
    )
    gateway.client.script = Script(refusal=Overloaded("64 requests are running"))
    refused = speak(gateway)
    assert (
        error_of(refused, 429)["code"] == "rate_limit_exceeded"
        and refused.headers["retry-after"] == "1"
    )


def test_failure_before_first_audio_has_status(gateway: ServedGateway) -> None:
    gateway.client.script = Script(fail_at=1, failure=EngineError("out of memory"))
    assert error_of(speak(gateway), 500)["code"] == "engine_error"


def test_later_failure_truncates_file_or_is_last_event(gateway: ServedGateway) -> None:
    gateway.client.script = Script(fail_at=6, failure=EngineError("out of memory"))
    with pytest.raises(httpx.RemoteProtocolError):
        speak(gateway, response_format="pcm")
    *deltas, last = events_of(gateway, response_format="pcm")
    assert deltas and last["error"]["code"] == "engine_error"


@pytest.mark.parametrize("fields", [{}, {"stream_format": "sse"}, {"input": LONG}])
def test_disconnect_aborts_request(gateway: ServedGateway, fields: Mapping[str, object]) -> None:
    gateway.client.script = Script(stall_at=7)
    with AttackTarget.of(gateway.url).connect() as wire:
        attacks.post(
            wire,
            {**GOOD, "response_format": "pcm", **fields},
            HEAD.replace(b"chat/completions", b"audio/speech"),
        )
        read_up_to(wire, b"200 OK")
    wait_for_abort(gateway)
    assert len(gateway.client.submitted) == 1


@pytest.mark.parametrize(
    ("fields", "param", "status"),
    [
        ({"input": ""}, "input", 400),
        ({"input": None}, "input", 400),
        ({"input": ["x"]}, "input", 400),
        ({"input": "x" * 4097}, "input", 413),
        ({"input": "<|im_end|>"}, "input", 400),
        ({"voice": "nobody"}, "voice", 400),
        ({"voice": {"id": "nobody"}}, "voice", 400),
        ({"voice": 3}, "voice", 400),
        ({"model": "other"}, "model", 404),
        ({"response_format": "midi"}, "response_format", 400),
        ({"response_format": "pcm16"}, "response_format", 400),
        ({"stream_format": "ws"}, "stream_format", 400),
        ({"speed": 0.2}, "speed", 400),
        ({"speed": 4.1}, "speed", 400),
        ({"speed": "1"}, "speed", 400),
        ({"seed": -1}, "seed", 400),
        ({"fleet": {"nobody": {}}}, "fleet.nobody", 400),
    ],
)
def test_invalid_field_is_refused_by_name(
    gateway: ServedGateway, fields: dict[str, object], param: str, status: int
) -> None:
    error = error_of(speak(gateway, **fields), status)
    assert (
        error["param"] == param and param in str(error["message"]) and not gateway.client.submitted
    )


def test_openai_client_raises_matching_errors(gateway: ServedGateway) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        gateway.openai().audio.speech.create(**params(voice="nobody"))
    assert refused.value.param == "voice"


def test_speech_is_refused_by_text_model(text_only: Loaded) -> None:
    with serving(text_only) as gateway:
        answer = gateway.http.post(
            PATH, json={**GOOD, "model": gateway.http.get("/v1/models").json()["data"][0]["id"]}
        )
        assert error_of(answer)["message"] == "model: this model does not speak"
        assert gateway.http.get("/v1/audio/voices").json() == {"voices": [], "uploaded_voices": []}


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.sampled_from(
        [*GOOD, "speed", "response_format", "stream_format", "instructions", "fleet", "new"]
    ),
    JUNK,
)
def test_arbitrary_field_value_is_accepted_or_refused_by_name(
    gateway: ServedGateway, name: str, junk: object
) -> None:
    answer = speak(gateway, **{"response_format": "pcm", name: junk})
    if answer.status_code != 200:
        assert answer.status_code < 500, answer.text
        param = error_of(answer, answer.status_code)["param"]
        assert param is not None and param.startswith(name), (name, junk)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.text(min_size=1, max_size=300))
def test_arbitrary_text_is_spoken_completely_or_refused(gateway: ServedGateway, text: str) -> None:
    gateway.client.submitted.clear()
    answer = speak(gateway, input=text, response_format="pcm")
    if answer.status_code == 200:
        spoken = "".join(said(gateway, spec) for spec, _ in gateway.client.submitted)
        normal = gateway.client.tokenizer.decode(gateway.client.tokenizer.encode(text).ids)
        assert spoken == normal
    else:
        assert error_of(answer, answer.status_code)["param"] == "input" and answer.status_code < 500


def test_voices_are_listed_with_id_and_name(gateway: ServedGateway) -> None:
    """The list of voices has the fields that Open WebUI reads, `id` and `name`; each id is an
    accepted voice.
    """
    answer = gateway.http.get("/v1/audio/voices").json()
    names = {voice["id"]: voice["name"] for voice in answer["voices"]}
    assert next(iter(names)) == "ethan" and "chelsie" in names and answer["uploaded_voices"] == []
    assert all(speak(gateway, voice=voice).headers["x-fleet-voice"] == voice for voice in names)


def test_speech_models_are_listed(gateway: ServedGateway, text_only: Loaded) -> None:
    assert gateway.http.get("/v1/audio/models").json() == {
        "models": [{"id": "omni", "name": "omni"}]
    }
    with serving(text_only) as silent:
        assert silent.http.get("/v1/audio/models").json() == {"models": []}
        assert silent.http.get("/v1/audio/voices").json()["voices"] == []
