"""The benchmark of a spoken assistant without a fleet: word errors, the simulated sound card, and
one turn with a scripted answer.
"""

import json
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import soundfile
from websockets.sync.server import ServerConnection

from fleet.lab.client.audio import PCM_RATE_HZ
from fleet.lab.measure.assistant import MEASUREMENT as ASSISTANT
from fleet.lab.measure.assistant import (
    QUESTIONS,
    SENTENCES,
    AssistantResult,
    is_right,
    speak_all,
)
from fleet.lab.measure.assistant_turn import AssistantTurn, TurnFiles, ask_assistant
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.main import run
from fleet.lab.measure.options import parse
from fleet.lab.measure.sound_card import BLOCK_LEN, SoundCard, read_latency_s
from fleet.lab.measure.speakers import (
    BenchSpeaker,
    Samples,
    SpokenPrompt,
    open_speaker,
    read_corpus,
    write_wav,
)
from fleet.lab.measure.word_errors import word_errors, words_of
from tests.unit.test_bench_voice import serving

BLOCKS_PER_S = PCM_RATE_HZ // BLOCK_LEN


def tone(seconds: float) -> Samples:
    return (np.sin(np.arange(int(seconds * PCM_RATE_HZ)) * 0.1) * 9000).astype("<i2")


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        ("The meeting is at seven thirty.", "the meeting is at 7.30"),
        ("It leaves by 7:05 p.m.", "It leaves by seven oh five PM."),
        ("It costs $12.50", "it costs twelve dollars and fifty cents"),
        ("Mr. Dashwood isn't ill-disposed", "mister dashwood is not ill disposed"),
        ("240%", "Two hundred and forty percent!"),
        ("May 5th, 1945", "May fifth, nineteen forty-five"),
        ("in 2024 and 2005", "in twenty twenty-four and two thousand five"),
        ("**Paris** is 3.14 km away", "Paris is three point one four kilometers away."),
        ("1,024 people, 21st; it's 100", "one thousand twenty four people twenty first it is 100"),
        ("the 12th, 20th and 33rd", "The twelfth, twentieth and thirty-third."),
        ("“It’s OK,” he can't say", '"It is okay", he cannot say'),
        ("The grey colour", "the gray color"),
    ],
)
def test_texts_that_sound_the_same_have_no_word_error(said: str, heard: str) -> None:
    assert words_of(said) == words_of(heard)
    assert word_errors([(said, heard)]).errors == 0


@pytest.mark.parametrize(
    ("said", "heard", "errors"),
    [
        ("seven thirty", "seven thirteen", 1),
        ("the opposite of hot", "the opposite of heart", 1),
        ("a b c", "", 3),
        ("", "thank you", 2),
        ("rock and roll", "rock roll", 1),
        ("turn off the lights", "turn off the lights turn off the lights", 4),
        ("it is 7.5", "it is 7.6", 1),
    ],
)
def test_wrong_missing_and_added_words_are_errors(said: str, heard: str, errors: int) -> None:
    assert word_errors([(said, heard)]).errors == errors


def play(card: SoundCard, blocks: int) -> None:
    for _ in range(blocks):
        card.tick()


def test_latency_is_read_from_the_recording(tmp_path: Path) -> None:
    """The question ends after 1 s, and the answer arrives 0.5 s later, with 0.2 s of silence before
    its voice.
    """
    card = SoundCard()
    card.speak(np.concatenate([np.zeros(PCM_RATE_HZ // 2, np.int16), tone(0.5)]))
    play(card, BLOCKS_PER_S)
    assert not card.is_speaking
    play(card, BLOCKS_PER_S // 2)
    card.receive(np.concatenate([np.zeros(4800, np.int16), tone(1.0)]).astype("<i2").tobytes())
    play(card, 50)
    card.end_answer()
    play(card, 100)
    assert card.is_quiet and card.underruns == 0
    card.write(tmp_path / "a.wav")
    ended_s, voiced_s = read_latency_s(tmp_path / "a.wav")
    assert ended_s == pytest.approx(1.0, abs=0.011) and voiced_s == pytest.approx(1.7, abs=0.011)


def test_empty_buffer_before_the_end_of_the_answer_is_an_underrun() -> None:
    card = SoundCard()
    card.receive(tone(0.05).tobytes())
    play(card, 10)
    assert card.underruns == 0, "playback has not begun: the buffer has less than 100 ms"
    card.receive(tone(0.15).tobytes())
    play(card, 20)
    assert card.underruns == 0, "all that has arrived is played"
    play(card, 30)
    assert card.underruns == 1, "one gap is one underrun, however long"
    card.receive(tone(0.2).tobytes())
    play(card, 10)
    card.end_answer()
    play(card, 30)
    assert card.underruns == 1 and card.is_quiet


def test_silent_and_overlapping_recordings_are_refused(tmp_path: Path) -> None:
    silence = np.zeros(PCM_RATE_HZ, np.int16)
    for name, mic, played, message in (
        ("a", silence, tone(1.0), "the microphone is silent"),
        ("b", tone(1.0), silence, "the loudspeaker is silent"),
        ("c", tone(1.0), tone(1.0), "begins 1.00 s too early"),
    ):
        path = tmp_path / f"{name}.wav"
        soundfile.write(path, np.stack([mic, played], axis=1), PCM_RATE_HZ)
        with pytest.raises(BenchError, match=message):
            read_latency_s(path)


HEARD_LATER_BYTES = 9600


class ScriptedAssistant:
    """A fake voice session, which answers speech after 100 ms of silence, and 200 ms later cancels
    that answer for another one. The transcript comes 200 ms of silence after the second answer.
    """

    def __init__(self) -> None:
        self.session: dict[str, Any] = {}
        self.api = None
        self.quiet_bytes = 0
        self.has_spoken = False

    def take(self, socket: ServerConnection) -> None:
        def send(kind: str, **fields: object) -> None:
            socket.send(json.dumps({"type": kind, **fields}))

        def audio(samples: Samples, text: str) -> None:
            send("response.output_audio.delta", delta=b64encode(samples.tobytes()).decode())
            send("response.output_audio_transcript.delta", delta=text)

        num_answers = 0
        for raw in socket:
            event = json.loads(raw)
            if event["type"] == "session.update":
                self.session = event["session"]
                send("session.updated")
                continue
            pcm = np.frombuffer(b64decode(event["audio"]), "<i2")
            is_loud = np.abs(pcm).max() > 1000
            self.has_spoken |= bool(is_loud)
            self.quiet_bytes = 0 if is_loud else self.quiet_bytes + 2 * len(pcm)
            if not self.has_spoken:
                continue
            if num_answers == 0 and self.quiet_bytes >= 4800:
                num_answers = 1
                send("input_audio_buffer.speech_stopped")
                audio(tone(2.0), "Never played to its end.")
            elif num_answers == 1 and self.quiet_bytes >= 14_400:
                num_answers = 2
                send("response.done", response={"status": "cancelled"})
                send("input_audio_buffer.speech_stopped")
                send("response.output_audio_transcript.delta", delta="It is ")
                audio(tone(0.8), "cold.")
                send("response.done", response={"status": "completed"})
            elif num_answers == 2 and self.quiet_bytes >= 14_400 + HEARD_LATER_BYTES:
                num_answers = 3
                send(
                    "conversation.item.input_audio_transcription.completed",
                    transcript="What is the opposite of hot?",
                )


def test_turn_is_heard_answered_and_recorded(tmp_path: Path) -> None:
    fake = ScriptedAssistant()
    files = TurnFiles(answer=tmp_path / "answer.wav", recording=tmp_path / "recording.wav")
    question = SpokenPrompt(
        text="What is the opposite of hot?", samples=tone(0.3), path=tmp_path / "q.wav"
    )
    with serving(fake) as api:  # pyright: ignore[reportArgumentType]
        turn = ask_assistant(api, "m", question, files)
    assert (turn.heard, turn.answer, turn.answer_s) == (question.text, "It is cold.", 0.8)
    assert turn.underruns == 0 and is_right(turn)
    assert 280 <= turn.voice_to_voice_ms < 30_000, "to the answer that was not cancelled"
    assert 0 <= turn.after_decision_ms <= turn.voice_to_voice_ms - 270
    assert turn.transcript_ms is not None
    assert 0 <= turn.transcript_ms < 30_000, "from the end of the turn that was not cancelled"
    assert fake.session["max_output_tokens"] and fake.session["instructions"]
    assert fake.session["audio"]["input"]["transcription"] == {"model": "m"}
    kept, rate_hz = soundfile.read(files.answer, dtype="int16")
    assert rate_hz == PCM_RATE_HZ and np.array_equal(kept, tone(0.8))
    mic, played = soundfile.read(files.recording, dtype="int16")[0].T
    (begin,) = np.flatnonzero(
        [np.array_equal(played[at : at + len(kept)], kept) for at in range(0, len(played), 240)]
    )
    assert begin, "the whole answer was played, without a gap"
    assert np.abs(mic).max() > 8000


def turn_of(question: str, answer: str, ms: float) -> AssistantTurn:
    return AssistantTurn(
        question=question,
        heard=question,
        answer=answer,
        voice_to_voice_ms=ms,
        after_decision_ms=ms - 500,
        underruns=0,
        answer_s=1.0,
        parts=(),
        transcript_ms=100.0,
    )


RIGHT = tuple(turn_of(question, words[0], 800.0) for question, words in QUESTIONS)


SAME = tuple((text, text.lower()) for text in SENTENCES[:5])
MET = AssistantResult(
    model="m",
    speaker="s",
    turns=RIGHT,
    pairs=RIGHT[:2],
    sentences=SAME,
    clips=(),
    answers=SAME,
    spoken=SAME,
)


def test_targets_of_an_assistant_are_met_and_missed() -> None:
    changed = msgspec.structs.replace
    assert all(ratio.met for ratio in MET.targets())
    wrong = tuple(changed(turn, answer="I don't know.") for turn in RIGHT[:3])
    late = tuple(changed(turn, transcript_ms=151.0) for turn in RIGHT)
    slow = tuple(changed(turn, voice_to_voice_ms=1600.0) for turn in RIGHT)
    half = tuple((text, " ".join(text.split()[:-1])) for text, _ in SAME)
    for result, name in (
        (changed(MET, turns=(*wrong, *RIGHT[3:])), "right answers"),
        (changed(MET, turns=slow), "voice to voice, p50"),
        (changed(MET, turns=late), "final transcript, p50"),
        (changed(MET, pairs=slow), "voice to voice, two speakers, p50"),
        (changed(MET, sentences=half), "word errors in"),
        (changed(MET, clips=half), "word errors, people"),
        (changed(MET, spoken=half), "word errors out"),
    ):
        assert [ratio.name for ratio in result.targets() if not ratio.met] == [name]
        assert list(result.tables())


def test_folder_of_recordings_measures_an_assistant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parse(["--voice", "--wav", str(tmp_path)]).chosen == (ASSISTANT,)
    assert parse(["--voice", "--wav", "new-folder"]).chosen == (ASSISTANT,)
    for arguments, message in (
        (["--wav", str(tmp_path), "--sessions", "2"], "give it alone"),
        (["--wav", str(tmp_path), "--wav", "a.wav"], "give it alone"),
        (["--voice", "--corpus", str(tmp_path)], "--corpus is for --voice --wav FOLDER"),
    ):
        assert run(arguments) == 2 and message in capsys.readouterr().err


def test_speech_is_kept_and_speaks_again(tmp_path: Path) -> None:
    speaker = BenchSpeaker(name="a person", speak=lambda text, _name: tone(len(text) / 100))
    questions, sentences = speak_all(speaker, tmp_path / "first", lambda: None)
    assert (len(questions), len(sentences)) == (len(QUESTIONS), len(SENTENCES))
    again = open_speaker(str(tmp_path / "first"))
    assert again.name == "a person"
    repeated, _ = speak_all(again, tmp_path / "second", lambda: None)
    for first, second in zip(questions, repeated, strict=True):
        assert first.path.name == second.path.name
        assert np.abs(first.samples.astype(int) - second.samples).max() <= 1


def test_unusable_speakers_and_corpora_are_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"--speaker .*neither voice\.json"):
        open_speaker(str(tmp_path))
    with pytest.raises(BenchError, match=r"--corpus .*name a folder of WAV files"):
        read_corpus(tmp_path)
    (tmp_path / "transcription").write_text("<s> a young man </s> (one)\n")
    with pytest.raises(BenchError, match=r"names one\.wav, which is missing"):
        read_corpus(tmp_path)
    write_wav(tmp_path / "one.wav", tone(0.1))
    (clip,) = read_corpus(tmp_path)
    assert (clip.text, clip.path) == ("a young man", tmp_path / "one.wav")
    (tmp_path / "transcription").write_text("no file\n")
    with pytest.raises(BenchError, match="a line is `text"):
        read_corpus(tmp_path)
