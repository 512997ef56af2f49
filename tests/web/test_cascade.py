"""The routes of a gateway whose graph recognises, answers and speaks in stages of their own: which
stages each request runs, and what it counts.
"""

import base64
import json

import numpy as np
import pytest

from fleet.core.chunk import PROMPT_TOKENS, Chunk, WireTensor
from fleet.core.ids import Epoch, RequestId
from fleet.core.request import RequestSpec
from fleet.graphs.cascade import ASR, AUDIO, CLIP_ID, HEARD, LM, TEXT, TRANSCRIPT, TTS
from tests.web.conftest import ServedGateway
from tests.web.fake_client import Script
from tests.web.test_bad_input import error_of
from tests.web.test_speech import speak
from tests.web.test_transcription import params, sound, write_down

HEARD_TEXT = "What time is it?"


@pytest.fixture
def gateway(cascade_gateway: ServedGateway) -> ServedGateway:
    return cascade_gateway


def speech_part() -> dict[str, object]:
    data = base64.b64encode(sound()).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def only_spec(gateway: ServedGateway) -> RequestSpec:
    ((spec, _),) = gateway.client.submitted
    return spec


def test_typed_chat_runs_no_recogniser_and_counts_its_prompt(gateway: ServedGateway) -> None:
    answer = gateway.create()
    spec = only_spec(gateway)
    assert (spec.stages, spec.outputs) == ((LM,), (TEXT,))
    assert answer.usage is not None and answer.usage.prompt_tokens == len(spec.prompt_ids) > 0


def test_spoken_chat_has_one_placeholder_per_clip_and_counts_as_the_worker_says(
    gateway: ServedGateway,
) -> None:
    gateway.client.script = Script(figures={PROMPT_TOKENS: 77}, cached_rows=99)
    content = [{"type": "text", "text": "Listen:"}, speech_part(), speech_part()]
    answer = gateway.create(
        messages=[{"role": "user", "content": content}],
        modalities=["text", "audio"],
        audio={"voice": "nova", "format": "wav"},
        extra_body={"prompt_cache_key": "k"},
    )
    spec = only_spec(gateway)
    assert (spec.stages, spec.outputs) == ((ASR, LM, TTS), (TEXT, AUDIO))
    assert spec.prompt_ids.count(CLIP_ID) == len(spec.audio) == 2
    assert spec.params == {"voice": "heart"}
    assert answer.choices[0].message.audio is not None
    assert answer.usage is not None and answer.usage.prompt_tokens == 77
    details = answer.usage.prompt_tokens_details
    assert details is not None and details.cached_tokens == 77, "no more than the prompt has"


def test_transcription_runs_the_recogniser_alone(gateway: ServedGateway) -> None:
    gateway.client.script = Script(heard=HEARD_TEXT)
    answer = write_down(gateway, language="German", temperature="0.5")
    spec = only_spec(gateway)
    assert answer.json() == {"text": HEARD_TEXT, "usage": {"type": "duration", "seconds": 2.0}}
    assert (spec.stages, spec.outputs, spec.prompt_ids) == ((ASR,), (HEARD,), ())
    assert spec.params == {"language": "de", "temperature": "0.5"}
    assert set(spec.sampling) == {ASR} and spec.kind == "transcription"


def test_request_page_shows_what_was_heard(gateway: ServedGateway) -> None:
    """Transcripts stand in the place of their clips, whether or not the client asked for them."""
    gateway.client.script = Script(heard=HEARD_TEXT)
    write_down(gateway)
    alone = only_spec(gateway).id
    assert prompt_of(gateway, alone) == f"[audio: {HEARD_TEXT}]"
    content = [speech_part(), {"type": "text", "text": "And this?"}, speech_part()]
    gateway.create(messages=[{"role": "user", "content": content}])
    asked = gateway.client.submitted[-1][0].id
    assert prompt_of(gateway, asked).split("\n")[-4:-1] == ["[audio]", "And this?", "[audio]"]
    gateway.client.telemetry.edge_logs[asked, TRANSCRIPT] = [
        transcript_chunk(asked, 0, ("<|im_end|> One", 0)),
        transcript_chunk(asked, 1, (" two.", 0), ("Three", 1)),
    ]
    shown = ["[audio: <|im_end|> One two.]", "And this?", "[audio: Three]"]
    assert prompt_of(gateway, asked).split("\n")[-4:-1] == shown
    page = gateway.http.get(f"/requests/{asked}").text
    assert "[audio: &lt;|im_end|&gt; One two.]" in page


def prompt_of(gateway: ServedGateway, request: RequestId) -> str:
    return gateway.http.get(f"/v1/fleet/requests/{request}").json()["prompt"]


def transcript_chunk(request: RequestId, index: int, *pieces: tuple[str, int]) -> Chunk:
    """Return a chunk of a transcript. `pieces`: text and clip of each."""
    arrays = {
        "clip": np.array([clip for _, clip in pieces], "<i4"),
        "sizes": np.array([len(text) for text, _ in pieces], "<i4"),
        "text": np.frombuffer("".join(text for text, _ in pieces).encode(), "u1"),
    }
    return Chunk(
        request=request,
        edge=TRANSCRIPT,
        index=index,
        epoch=Epoch(1),
        first_row=index,
        tensors={
            name: WireTensor(dtype=array.dtype.name, shape=array.shape, data=array.tobytes())
            for name, array in arrays.items()
        },
    )


def test_streamed_transcription_joins_to_the_whole_text(gateway: ServedGateway) -> None:
    gateway.client.script = Script(heard=HEARD_TEXT)
    transcriptions = gateway.openai().audio.transcriptions
    events = list(transcriptions.create(**params(), stream=True))  # pyright: ignore
    deltas = [event.delta for event in events if event.type == "transcript.text.delta"]
    assert len(deltas) == 4 and "".join(deltas) == HEARD_TEXT
    assert events[-1].type == "transcript.text.done" and events[-1].text == HEARD_TEXT


def test_recognisers_languages_are_named_in_the_refusal(gateway: ServedGateway) -> None:
    refused = write_down(gateway, language="fr")
    assert refused.status_code == 400 and error_of(refused)["param"] == "language"
    assert "transcribes: de, en" in str(error_of(refused)["message"])


def test_speech_runs_the_voice_alone(gateway: ServedGateway) -> None:
    long = "It is 7:30. " * 50
    answer = speak(gateway, input=long, voice="bella", response_format="pcm")
    spec = only_spec(gateway)
    assert answer.status_code == 200 and len(answer.content) == 2 * Script().num_samples
    assert (spec.stages, spec.outputs, spec.speech_text) == ((TTS,), (AUDIO,), long)
    assert spec.prompt_ids == spec.given == () and set(spec.sampling) == {TTS}


def test_speed_is_the_voices_own_and_the_audio_is_not_stretched_again(
    gateway: ServedGateway,
) -> None:
    answer = speak(gateway, speed=0.5, response_format="pcm")
    assert only_spec(gateway).params["speed"] == "0.5"
    assert len(answer.content) == 2 * Script().num_samples


def test_text_without_words_and_unknown_voice_are_refused(gateway: ServedGateway) -> None:
    assert error_of(speak(gateway, input="...!"))["param"] == "input"
    unknown = error_of(speak(gateway, voice="siri"))
    assert unknown["param"] == "voice" and "use one of heart, bella" in str(unknown["message"])
    assert not gateway.client.submitted


def test_speech_in_sse_counts_no_tokens(gateway: ServedGateway) -> None:
    answer = speak(gateway, stream_format="sse", response_format="pcm")
    assert '"input_tokens":0,"output_tokens":0' in answer.text


def test_words_of_a_speech_come_with_the_audio_in_which_they_end(gateway: ServedGateway) -> None:
    words = [("It ", 2400), ("is\n", 4800), ("7:30.", 9607)]
    gateway.client.script = Script(words=words, lead_samples=0)
    fields = {"response_format": "pcm", "stream_format": "sse", "input": "It is\n7:30."}
    assert "timestamps" not in speak(gateway, **fields).text
    answer = speak(gateway, **fields, word_timestamps=True)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line[:5] == "data:"]
    deltas = [event for event in events if event["type"] == "speech.audio.delta"]
    told = {w["word"]: at for at, delta in enumerate(deltas) for w in delta["timestamps"]}
    assert told == {"It": 1, "is": 2, "7:30.": 5}
    times = [(w["start_ms"], w["end_ms"]) for delta in deltas for w in delta["timestamps"]]
    assert times == [(0, 100), (100, 200), (200, 400)] and "timestamps" not in events[-1]


def test_times_of_words_without_events_are_refused_by_name(gateway: ServedGateway) -> None:
    for fields in ({}, {"stream_format": "audio"}):
        refused = error_of(speak(gateway, word_timestamps=True, **fields))
        assert refused["param"] == "word_timestamps" and not gateway.client.submitted
