"""Pocket through the API of `fleet up` without a configured checkpoint: spoken questions, speech,
transcription, and the demo.

`fleet pocket eval` measures whether answers are correct.
"""

import base64
import io
from collections.abc import Generator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import jiwer
import msgspec
import numpy as np
import pytest
import soundfile
import soxr
from numpy.typing import NDArray
from openai import AsyncOpenAI, OpenAI

from fleet.lab.pocket.corpus import spoken
from fleet.lab.pocket.hearing.voices import known_voice
from fleet.lab.pocket.judge.demo import PICTURE, SCENES
from fleet.lab.pocket.judge.questions import distinct, speak_all
from fleet.lab.pocket.judge.recognise import Recogniser
from fleet.lab.pocket.shape import VOICES
from fleet.lab.pocket.teacher import SAMPLE_RATE_HZ, SynthesizedSpeech, Voice
from tests.support import run_cli, start_cli
from web.realtime.audio.formats import AudioFormat, PcmaFormat, PcmFormat, PcmuFormat

pytestmark = pytest.mark.one_file_in(5, "answers of processes")

OPTIONS = ("--set", "web.port=0")
QUESTIONS = (
    "what day comes after monday",
    "what is your name",
    "what is the opposite of hot",
    "what is the capital of france",
)
UNDERSTOOD = 0.5
"""Required share of recognised words; the teacher model's speech has about 0.85, speech played
backwards almost none.
"""

Samples = NDArray[np.float32]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    with start_cli("up", *OPTIONS, cwd=tmp_path_factory.mktemp("fleet")) as running:
        yield running.wait_for(r"fleet: ready at (http://\S+)\n", timeout_s=110)[1]


def ask_spoken(url: str, question: SynthesizedSpeech, voice: str) -> tuple[str, Samples]:
    """Ask a spoken question; return the answer's transcript and audio."""
    file = io.BytesIO()
    soundfile.write(file, question.samples, SAMPLE_RATE_HZ, format="WAV")
    audio = {"data": base64.b64encode(file.getvalue()).decode(), "format": "wav"}
    content = [{"type": "input_audio", "input_audio": audio}]
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        answer = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": content}],  # pyright: ignore[reportArgumentType]
            modalities=["text", "audio"],
            audio={"voice": voice, "format": "wav"},
            seed=1,
        )
    message = answer.choices[0].message
    assert message.audio is not None and message.audio.transcript
    samples, rate_hz = soundfile.read(
        io.BytesIO(base64.b64decode(message.audio.data)), dtype="float32"
    )
    assert rate_hz == SAMPLE_RATE_HZ
    return spoken(message.audio.transcript), np.asarray(samples, np.float32)


def understood(texts: Sequence[str], recognised: Sequence[str]) -> float:
    """Return the share of the words in `texts` that were recognised at their place."""
    aligned = jiwer.process_words(list(texts), list(recognised))
    return aligned.hits / (aligned.hits + aligned.substitutions + aligned.deletions)


def test_spoken_question_is_answered_in_intelligible_speech(url: str) -> None:
    """A spoken question is answered in intelligible speech. The recogniser has a language model,
    but does not know the texts; played backwards, the speech is not recognised.
    """
    voices = [sorted(VOICES)[index % len(VOICES)] for index in range(len(QUESTIONS))]
    questions = speak_all([(text, Voice()) for text in QUESTIONS])
    answers = [
        ask_spoken(url, question, voice) for question, voice in zip(questions, voices, strict=True)
    ]
    texts = [text for text, _ in answers]
    recogniser = Recogniser("bigram")
    recognised = [
        recogniser.words(samples, SAMPLE_RATE_HZ, voice)
        for (_, samples), voice in zip(answers, voices, strict=True)
    ]
    assert understood(texts, recognised) > UNDERSTOOD, list(zip(texts, recognised, strict=True))
    backwards = [
        recogniser.words(samples[::-1], SAMPLE_RATE_HZ, voice)
        for (_, samples), voice in zip(answers, voices, strict=True)
    ]
    assert understood(texts, backwards) < UNDERSTOOD, list(zip(texts, backwards, strict=True))


def test_text_is_spoken_and_transcribed_again(url: str) -> None:
    """Text is spoken and transcribed again. The texts share no words with Pocket's own answers."""
    texts = (
        "We go to the garden with Peter.",
        "The blue brush is under the house.",
        "Anna sees the horse today!",
    )
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        model = client.models.list().data[0].id
        speech = [
            client.audio.speech.create(
                model=model, voice="nova", input=text, response_format="mp3", extra_body={"seed": 1}
            )
            for text in texts
        ]
        recognised = [
            client.audio.transcriptions.create(model=model, file=("a.mp3", sound.read())).text
            for sound in speech
        ]
    assert understood([spoken(text) for text in texts], recognised) > UNDERSTOOD, recognised


def test_pocket_demo_writes_audio_files_and_a_picture(url: str, tmp_path: Path) -> None:
    done = run_cli("pocket", "demo", "sounds", "--url", url, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(SCENES) + 1
    for scene in SCENES:
        samples, rate_hz = soundfile.read(tmp_path / "sounds" / f"{scene.name}.wav")
        assert rate_hz == SAMPLE_RATE_HZ and scene.question in done.stdout
        assert float(np.sqrt(np.mean(samples**2))) > 0.01, f"{scene.name} is silent"
    assert (tmp_path / "sounds" / PICTURE).read_bytes().startswith(b"\x89PNG")


def test_pocket_demo_without_a_fleet_is_one_line(tmp_path: Path) -> None:
    done = run_cli("pocket", "demo", "sounds", "--url", "http://127.0.0.1:9", cwd=tmp_path)
    assert done.returncode == 1
    assert "nothing answers at http://127.0.0.1:9" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "sounds").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("form", [PcmuFormat(), PcmaFormat()])
async def test_words_over_a_telephone_are_heard_almost_as_well(
    url: str, form: PcmuFormat | PcmaFormat
) -> None:
    """The word error rate of questions in G.711 is within 10 points of that at 24 kHz."""
    rng = Random(7)
    texts = sorted({dialogue.turns[-2].text for dialogue in distinct(60, 7)})
    questions = speak_all([(text, known_voice(rng)) for text in texts])
    rates = [
        jiwer.wer(texts, [spoken(text) for text in await transcribed(url, questions, each)])
        for each in (PcmFormat(), form)
    ]
    print(f"word error rate at 24 kHz {rates[0]:.3f}, in {form} {rates[1]:.3f}")
    assert len(texts) > 40 and rates[1] < rates[0] + 0.1


async def transcribed(
    url: str, questions: Sequence[SynthesizedSpeech], form: AudioFormat
) -> list[str]:
    """Return what a Realtime transcription session hears in a format."""
    async with (
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        client.realtime.connect(extra_query={"intent": "transcription"}) as connection,
    ):
        heard_in = {"format": msgspec.to_builtins(form), "turn_detection": None}
        session: Any = {"type": "transcription", "audio": {"input": heard_in}}
        await connection.session.update(session=session)
        heard: list[str] = []
        for question in questions:
            wave = np.clip(question.samples, -1, 1) * 32_767
            samples = soxr.resample(wave, SAMPLE_RATE_HZ, form.rate).astype(np.int16)
            audio = base64.b64encode(form.of_pcm(samples)).decode()
            await connection.input_audio_buffer.append(audio=audio)
            await connection.input_audio_buffer.commit()
            heard.append(await next_transcript(connection))
        return heard


async def next_transcript(connection: Any) -> str:
    while True:
        event = await connection.recv()
        assert event.type != "error", event
        if event.type == "conversation.item.input_audio_transcription.completed":
            return event.transcript
