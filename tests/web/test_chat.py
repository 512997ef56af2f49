"""Chat completions through the OpenAI client: streamed or not, text and speech."""

import base64
import io
import json
import re
import warnings

import httpx
import numpy as np
import openai
import pytest
import soundfile
from openai.types.chat import ChatCompletionMessageParam
from openai.types.chat.chat_completion_chunk import Choice

from fleet.core.errors import EngineError, FleetError, NoWorker, Overloaded, RedisUnreachable
from fleet.core.ids import StageName
from fleet.core.request import Sampling
from tests.web.conftest import ASK, HELLO, ServedGateway, request_id_of, usage_of
from tests.web.fake_client import RATE_HZ, Script, sine
from tests.web.sounds import decoded
from web.gateway.stored_body import stored_body
from web.http import sse
from web.schema.chat import ChatBody

CHAT = "/v1/chat/completions"


def test_text_answer_has_openai_shape(gateway: ServedGateway) -> None:
    answer = gateway.create()
    choice = answer.choices[0]
    assert choice.message.content == Script().text and choice.message.role == "assistant"
    assert (
        choice.finish_reason == "stop"
        and choice.message.audio is None
        and choice.message.refusal is None
    )
    assert (
        answer.id.startswith("chatcmpl-")
        and answer.object == "chat.completion"
        and answer.model == "omni"
    )
    spec, blob = gateway.client.submitted[0]
    assert usage_of(answer).prompt_tokens == len(spec.prompt_ids) and blob is None
    assert (
        usage_of(answer).total_tokens
        == usage_of(answer).prompt_tokens + usage_of(answer).completion_tokens
    )
    assert (
        spec.outputs == ("text",)
        and set(spec.sampling) == {"thinker"}
        and spec.graph == "qwen3_omni"
    )
    assert request_id_of(answer) == spec.id


def test_streamed_text_answer_has_openai_shape(gateway: ServedGateway) -> None:
    body = {
        "model": "omni",
        "messages": HELLO,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with gateway.http.stream("POST", CHAT, json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert events[0]["choices"] == [
        {
            "index": 0,
            "delta": {"role": "assistant", "content": "", "refusal": None},
            "logprobs": None,
            "finish_reason": None,
        }
    ]
    assert (
        "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1])
        == Script().text
    )
    assert events[-2]["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] > 0
    assert all(event["usage"] is None for event in events[:-1])
    assert {event["object"] for event in events} == {"chat.completion.chunk"} and len(
        {e["id"] for e in events}
    ) == 1


def test_stream_without_include_usage_has_no_usage(gateway: ServedGateway) -> None:
    chunks = list(gateway.stream())
    assert all("usage" not in chunk.model_fields_set for chunk in chunks)


def audio_of(choice: Choice) -> dict[str, object]:
    """Return the audio of a chat delta, which older clients leave as a dictionary."""
    audio = getattr(choice.delta, "audio", None)
    if audio is None:
        return {}
    return dict(audio) if isinstance(audio, dict) else audio.model_dump(exclude_unset=True)


def test_streamed_speech_is_sample_exact(gateway: ServedGateway) -> None:
    chunks = list(
        gateway.stream(
            modalities=["text", "audio"],
            audio={"voice": "chelsie", "format": "pcm16"},
            stream_options={"include_usage": True},
        )
    )
    choices = [choice for chunk in chunks for choice in chunk.choices]
    finish = [choice.finish_reason for choice in choices]
    audio = [audio_of(choice) for choice in choices]
    data = [str(delta["data"]) for delta in audio if "data" in delta]
    assert "".join(choice.delta.content or "" for choice in choices) == Script().text
    assert "".join(str(delta.get("transcript", "")) for delta in audio) == Script().text
    pieces = [base64.b64decode(piece) for piece in data]
    assert all(len(piece) % 6 == 0 for piece in pieces[:-1])
    # clients that join the base64 first hear the same
    assert (
        base64.b64decode("".join(data)) == b"".join(pieces) == sine(Script().num_samples).tobytes()
    )
    assert (
        sum("id" in delta for delta in audio) == 1
        and sum("expires_at" in delta for delta in audio) == 1
    )
    assert finish[-1] == "stop" and finish[:-1] == [None] * (len(finish) - 1)
    details = usage_of(chunks[-1]).completion_tokens_details
    assert details is not None and details.audio_tokens == 6
    spec, _ = gateway.client.submitted[0]
    assert spec.params == {"voice": "chelsie"} and set(spec.outputs) == {"text", "audio"}
    assert set(spec.sampling) == {"thinker", "talker", "code2wav"}


def test_accumulated_speech_is_sample_exact_and_referable_by_id(gateway: ServedGateway) -> None:
    client = gateway.openai()
    turns: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]
    for _ in range(2):
        with client.chat.completions.stream(
            model="omni",
            messages=turns,
            modalities=["text", "audio"],
            audio={"voice": "ethan", "format": "pcm16"},
        ) as stream:
            answer = stream.get_final_completion()
        audio = answer.choices[0].message.audio
        assert (
            audio is not None
            and audio.transcript == answer.choices[0].message.content == Script().text
        )
        assert base64.b64decode(audio.data) == sine(Script().num_samples).tobytes()
        assert answer.created < audio.expires_at <= answer.created + gateway.config.retention_s + 60
        turns.append({"role": "assistant", "audio": {"id": audio.id}})
        turns.append({"role": "user", "content": "and then?"})
    prompt = gateway.client.tokenizer.decode(gateway.client.submitted[1][0].prompt_ids)
    assert Script().text in prompt


def test_ping_does_not_end_event(gateway: ServedGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "PING_S", 0.002)
    gateway.client.script = Script(gap_s=0.02)
    body = {**ASK, "stream": True}
    assert gateway.http.post("/v1/chat/completions", json=body).text.count(sse.PING.decode()) > 3
    choices = [choice for chunk in gateway.stream() for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == Script().text


def test_large_chunk_is_sent_in_bounded_pieces(gateway: ServedGateway) -> None:
    gateway.client.script = Script(num_samples=100_001, samples_per_chunk=100_001)
    chunks = gateway.stream(modalities=["text", "audio"], audio={"voice": "ethan", "format": "wav"})
    audio = [audio_of(choice) for chunk in chunks for choice in chunk.choices]
    pieces = [base64.b64decode(str(delta["data"])) for delta in audio if "data" in delta]
    assert max(map(len, pieces)) <= 48_000 and b"".join(pieces) == sine(100_001).tobytes()


@pytest.mark.parametrize("kind", ["wav", "pcm16", "flac", "mp3", "opus", "aac"])
def test_unstreamed_speech_has_requested_format(gateway: ServedGateway, kind: str) -> None:
    answer = gateway.create(modalities=["audio"], audio={"voice": "alloy", "format": kind})
    message = answer.choices[0].message
    assert (
        message.audio is not None
        and message.content is None
        and message.audio.transcript == Script().text
    )
    assert message.audio.expires_at > answer.created
    raw = base64.b64decode(message.audio.data)
    expected = sine(Script().num_samples)
    if kind == "pcm16":
        assert raw == expected.tobytes()
        return
    if kind == "aac":
        assert abs(len(decoded(raw)) - len(expected)) < 3_000
        return
    samples, rate_hz = soundfile.read(io.BytesIO(raw), dtype="int16")
    assert rate_hz == RATE_HZ and abs(len(samples) - len(expected)) < 3_000
    if kind in ("wav", "flac"):
        assert np.array_equal(samples, expected)


def test_earlier_spoken_answer_is_referable_by_id(gateway: ServedGateway) -> None:
    spoken = gateway.create(modalities=["text", "audio"]).choices[0].message
    assert spoken.audio is not None
    gateway.create(
        messages=[*HELLO, {"role": "assistant", "audio": {"id": spoken.audio.id}}, *HELLO]
    )
    by_id = gateway.client.submitted[1][0].prompt_ids
    gateway.create(messages=[*HELLO, {"role": "assistant", "content": spoken.content}, *HELLO])
    assert by_id == gateway.client.submitted[2][0].prompt_ids
    with pytest.raises(openai.BadRequestError) as refused:
        gateway.create(messages=[{"role": "assistant", "audio": {"id": "audio_no"}}])
    assert refused.value.param == "messages[0].audio.id"


def test_audio_prompt_is_part_of_request(gateway: ServedGateway) -> None:
    buffer = io.BytesIO()
    soundfile.write(buffer, sine(48_000), RATE_HZ, format="WAV")
    data = base64.b64encode(buffer.getvalue()).decode()
    parts = [
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "text", "text": "what is it?"},
    ]
    answer = gateway.create(messages=[{"role": "user", "content": parts}])
    spec, blob = gateway.client.submitted[0]
    assert blob is not None and len(blob) == 4 * 32_000 and spec.audio[0].num_samples == 32_000
    details = usage_of(answer).prompt_tokens_details
    assert details is not None and details.audio_tokens == 26


def test_answer_ends_at_stop_string(gateway: ServedGateway) -> None:
    answer = gateway.create(stop=[", this", "zzz"])
    assert (
        answer.choices[0].message.content == "Hello there"
        and answer.choices[0].finish_reason == "stop"
    )
    assert gateway.client.submitted[0][0].sampling[StageName("thinker")].stop == (", this", "zzz")


def test_stop_string_before_min_tokens_is_ignored(gateway: ServedGateway) -> None:
    answer = gateway.create(stop=["Hello", "this"], extra_body={"min_tokens": 3})
    assert answer.choices[0].message.content == "Hello there, "


def test_answer_at_max_tokens_has_finish_reason_length(gateway: ServedGateway) -> None:
    gateway.client.script = Script(end_token=False)
    answer = gateway.create(max_completion_tokens=3)
    assert answer.choices[0].finish_reason == "length" and usage_of(answer).completion_tokens == 3


def sampling_of(
    gateway: ServedGateway, **fields: object
) -> tuple[dict[str, Sampling], httpx.Headers]:
    body = {**ASK, "modalities": ["text", "audio"], **fields}
    answer = gateway.http.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    spec, _ = gateway.client.submitted[-1]
    return {str(stage): sampling for stage, sampling in spec.sampling.items()}, answer.headers


def test_stage_sampling_has_defaults(gateway: ServedGateway) -> None:
    sampling, headers = sampling_of(gateway)
    seed = int(headers["x-fleet-seed"])
    # The fields that the checkpoint's generation_config.json gives win over the declaration's.
    assert sampling["thinker"] == Sampling(
        temperature=0.7, top_k=20, top_p=0.8, max_tokens=500, seed=seed
    )
    assert sampling["talker"] == Sampling(
        temperature=0.9, top_k=50, repetition_penalty=1.05, max_tokens=300, seed=seed
    )
    again, headers = sampling_of(gateway)
    assert int(headers["x-fleet-seed"]) != seed and again["thinker"].seed != seed


def test_request_sets_main_stage_sampling_and_common_temperature_and_seed(
    gateway: ServedGateway,
) -> None:
    sampling, headers = sampling_of(
        gateway, temperature=0, seed=7, top_p=0.5, max_tokens=9, presence_penalty=1
    )
    assert headers["x-fleet-seed"] == "7"
    assert sampling["thinker"] == Sampling(
        top_k=20, top_p=0.5, max_tokens=9, presence_penalty=1.0, seed=7
    )
    assert (
        sampling["talker"].temperature == 0
        and sampling["talker"].seed == 7
        and sampling["talker"].top_p == 1
    )
    assert sampling["code2wav"].seed == 7


def test_fleet_section_overrides_sampling_of_stage(gateway: ServedGateway) -> None:
    fleet = {"talker": {"temperature": 0.3, "max_tokens": 60, "seed": 1}, "thinker": {"stop": "x"}}
    sampling, _ = sampling_of(gateway, temperature=1.5, seed=7, fleet=fleet)
    assert sampling["talker"] == Sampling(
        temperature=0.3, top_k=50, repetition_penalty=1.05, max_tokens=60, seed=1
    )
    assert sampling["thinker"].temperature == 1.5 and sampling["thinker"].stop == ("x",)


def test_min_tokens_and_ignore_eos_apply_to_main_or_named_stage(gateway: ServedGateway) -> None:
    sampling, headers = sampling_of(gateway, top_k=-1, min_tokens=9, ignore_eos=True, max_tokens=9)
    thinker = sampling["thinker"]
    assert (thinker.top_k, thinker.min_tokens, thinker.ignore_eos, thinker.max_tokens) == (
        0,
        9,
        True,
        9,
    )
    assert (
        sampling["talker"].min_tokens == 0
        and not sampling["talker"].ignore_eos
        and "x-fleet-ignored" not in headers
    )
    sampling, _ = sampling_of(
        gateway, fleet={"talker": {"top_k": -1, "min_tokens": 5, "ignore_eos": True}}
    )
    assert (
        sampling["talker"].top_k,
        sampling["talker"].min_tokens,
        sampling["talker"].ignore_eos,
    ) == (0, 5, True)
    assert sampling["thinker"].min_tokens == 0 and not sampling["thinker"].ignore_eos


def test_prompt_cache_key_sets_session_and_usage_has_cached_tokens(gateway: ServedGateway) -> None:
    gateway.client.script = Script(cached_rows=3)
    counted = "fleet_cached_prompt_tokens_total "
    before = float(
        next(line for line in metrics(gateway) if line.startswith(counted)).removeprefix(counted)
    )
    answers = [gateway.create(prompt_cache_key=key) for key in ("talk", "talk", "x" * 64)] + [
        gateway.create()
    ]
    sessions = [spec.session for spec, _ in gateway.client.submitted]
    assert sessions[0] == sessions[1] != sessions[2] and sessions[3] == ""
    assert all(re.fullmatch("[0-9a-f]{32}", session) for session in sessions[:3])
    details = [usage_of(answer).prompt_tokens_details for answer in answers]
    assert [detail.cached_tokens if detail else None for detail in details] == [3, 3, 3, 0]
    assert f"{counted}{before + 9}" in metrics(gateway)
    spoken = {
        "modalities": ["text", "audio"],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body = {**ASK, "prompt_cache_key": "talk", **spoken}
    with gateway.http.stream("POST", CHAT, json=body) as sent:
        assert "x-fleet-ignored" not in sent.headers
        last = [line for line in sent.iter_lines() if '"usage":{' in line][-1]
    assert (
        json.loads(last.removeprefix("data: "))["usage"]["prompt_tokens_details"]["cached_tokens"]
        == 3
    )


def metrics(gateway: ServedGateway) -> list[str]:
    return gateway.http.get("/metrics").text.splitlines()


@pytest.mark.parametrize(
    ("key", "why"), [("", "at least 1 character"), ("x" * 65, "at most 64 characters")]
)
def test_too_long_prompt_cache_key_is_refused(gateway: ServedGateway, key: str, why: str) -> None:
    with pytest.raises(openai.BadRequestError, match=why) as caught:
        gateway.create(prompt_cache_key=key)
    assert caught.value.param == "prompt_cache_key"


def test_answer_is_complete_if_cached_tokens_cannot_be_read(gateway: ServedGateway) -> None:
    gateway.client.unreachable = RedisUnreachable("Redis does not answer")
    answer = gateway.create(prompt_cache_key="talk")
    assert answer.choices[0].message.content == Script().text


def test_response_headers_name_ignored_fields_and_voice(gateway: ServedGateway) -> None:
    fields = {"user": "u", "metadata": {"a": "b"}, "nothing": None}
    _, headers = sampling_of(gateway, **fields, audio={"voice": {"id": "onyx"}})
    assert headers["x-fleet-ignored"] == "metadata, user" and headers["x-fleet-voice"] == "ethan"
    spec, _ = gateway.client.submitted[0]
    assert json.loads(spec.body)["audio"] == {"voice": {"id": "onyx"}}


def test_voice_given_by_id_is_accepted() -> None:
    body = ChatBody.model_validate({**ASK, "audio": {"voice": {"id": "onyx"}}})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert json.loads(stored_body(body))["audio"] == {"voice": {"id": "onyx"}}


@pytest.mark.parametrize(
    ("failure", "kind", "code", "retry_after"),
    [
        (Overloaded("64 requests are running"), openai.RateLimitError, "rate_limit_exceeded", "1"),
        (
            NoWorker("no worker serves the role x", retry_after_s=13),
            openai.InternalServerError,
            "overloaded",
            "13",
        ),
        (
            RedisUnreachable("no Redis answers"),
            openai.InternalServerError,
            "redis_unreachable",
            "1",
        ),
    ],
)
def test_refusal_has_code_and_retry_after(
    gateway: ServedGateway,
    failure: FleetError,
    kind: type[openai.APIStatusError],
    code: str,
    retry_after: str,
) -> None:
    gateway.client.script = Script(refusal=failure)
    with pytest.raises(kind) as refused:
        gateway.create()
    assert (
        refused.value.code == code and refused.value.response.headers["retry-after"] == retry_after
    )
    assert str(refused.value.request_id).startswith("req-")


def test_failure_before_answer_is_error_response(gateway: ServedGateway) -> None:
    gateway.client.script = Script(fail_at=2, failure=EngineError("out of memory"))
    with pytest.raises(openai.InternalServerError) as failed:
        gateway.create()
    assert failed.value.code == "engine_error"


def test_failure_within_stream_is_last_event(gateway: ServedGateway) -> None:
    gateway.client.script = Script(fail_at=2, failure=EngineError("out of memory"))
    stream = gateway.stream()
    with pytest.raises(openai.APIError, match="out of memory") as failed:
        list(stream)
    assert failed.value.code == "engine_error"
    with gateway.http.stream("POST", CHAT, json={**ASK, "stream": True}) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["type"] == "server_error"
    assert "data: [DONE]" not in lines
