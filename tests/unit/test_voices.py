"""Voices: hibari itself, and Kokoro's code on a tiny model of the same inputs and output."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from fleet.core.errors import BadInput, ConfigError
from fleet.models.voices.base import VoiceModel
from fleet.models.voices.load import load_voice
from tests.support import REPO, cli_env
from tests.unit.tiny_kokoro import write_tiny_kokoro

TEXT = "The quick brown fox, as usual, jumps over the lazy dog."


def folder_of(path: Path, **described: object) -> Path:
    path.mkdir(exist_ok=True)
    (path / "voice.json").write_text(json.dumps(described))
    return path


@pytest.fixture(scope="module")
def hibari(tmp_path_factory: pytest.TempPathFactory) -> VoiceModel:
    folder = tmp_path_factory.mktemp("voice")
    return load_voice(folder_of(folder, voice="hibari", voices=["heart"]))


def digest(samples: NDArray[np.float32]) -> str:
    return hashlib.sha256(samples.tobytes()).hexdigest()


SPEAK = f"""
import hashlib, sys
from pathlib import Path
from fleet.models.voices.load import load_voice
voice = load_voice(Path(sys.argv[1]))
voice.synthesize("Something else, said before.", "heart", speed=2, seed=5)
for speed in (1, 1.5):
    samples = voice.synthesize({TEXT!r}, "heart", speed=speed, seed=7).samples
    print(hashlib.sha256(samples.tobytes()).hexdigest())
"""


@pytest.mark.one_in(2, "voices")
def test_same_arguments_give_the_same_bytes_in_another_process(
    hibari: VoiceModel, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "other", voice="hibari", voices=["heart"])
    here = [digest(hibari.synthesize(TEXT, "", speed=s, seed=7).samples) for s in (1, 1.5)]
    done = subprocess.run(
        [sys.executable, "-c", SPEAK, str(folder)],
        env=cli_env(),
        cwd=REPO,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == here
    assert digest(hibari.synthesize(TEXT, "", speed=1, seed=8).samples) not in here


def test_speed_divides_the_duration_and_keeps_the_pitch(hibari: VoiceModel) -> None:
    plain = hibari.synthesize(TEXT, "heart", speed=1, seed=0)
    for speed in (0.25, 0.5, 0.8, 1.25, 2, 4):
        other = hibari.synthesize(TEXT, "heart", speed=speed, seed=0)
        assert len(other.samples) == pytest.approx(len(plain.samples) / speed, rel=0.03)
        assert other.word_ends == pytest.approx(plain.word_ends / speed, abs=3000 / speed)
        assert pitch_hz(other.samples) == pytest.approx(pitch_hz(plain.samples), rel=0.15)


def pitch_hz(samples: NDArray[np.float32]) -> float:
    """Return the median pitch of the voiced frames, by autocorrelation, at 24 kHz."""
    found: list[float] = []
    for start in range(0, len(samples) - 1200, 600):
        frame = samples[start : start + 1200]
        if np.sqrt(np.mean(frame**2)) < 0.03:
            continue
        likeness = np.correlate(frame, frame, "full")[1199:]
        lag = 60 + int(likeness[60:300].argmax())
        if likeness[lag] > 0.5 * likeness[0]:
            found.append(24_000 / lag)
    return float(np.median(found))


def test_word_ends_where_its_sound_ends(hibari: VoiceModel) -> None:
    spoken = hibari.synthesize("Incomprehensibilities, no.", "heart", speed=1, seed=0)
    frames = spoken.samples[: len(spoken.samples) // 240 * 240].reshape(-1, 240)
    loud = np.sqrt(np.mean(frames**2, axis=1)) > 0.01
    voiced = np.flatnonzero(loud)
    gaps = np.diff(voiced)
    pause = int(gaps.argmax())
    begin, end = int(voiced[pause]) * 240, int(voiced[pause + 1]) * 240
    assert end - begin > 0.1 * 24_000
    assert begin - 1200 <= spoken.word_ends[0] <= end + 1200
    assert int(voiced[-1]) * 240 - 2400 <= spoken.word_ends[1] <= len(spoken.samples)


@pytest.mark.one_in(2, "voices")
def test_clauses_of_any_length_and_unreadable_words_are_spoken(hibari: VoiceModel) -> None:
    for text in ("", "€", "2₂H 3³e", "word " * 80, "x" * 300, "9" * 60, "你好 hello"):
        spoken = hibari.synthesize(text, "heart", speed=1, seed=0)
        assert len(spoken.word_ends) == len(text.split())
        assert list(spoken.word_ends) == sorted(spoken.word_ends)
        assert not len(spoken.word_ends) or spoken.word_ends[-1] <= len(spoken.samples)
        assert bool(len(spoken.samples)) == any(char.isalnum() and char < "€" for char in text)


def test_unknown_voice_is_refused_by_name_with_the_list(hibari: VoiceModel, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="voice: no voice 'nova'; use one of heart$"):
        hibari.synthesize(TEXT, "nova", speed=1, seed=0)
    kokoro = load_voice(write_tiny_kokoro(tmp_path / "k", ["af_x", "bm_y"]))
    with pytest.raises(BadInput, match="voice: no voice 'heart'; use one of af_x, bm_y$"):
        kokoro.synthesize(TEXT, "heart", speed=1, seed=0)


@pytest.mark.parametrize("ids_name", ["input_ids", "tokens"])
def test_kokoro_speaks_with_each_of_its_voices(tmp_path: Path, ids_name: str) -> None:
    kokoro = load_voice(write_tiny_kokoro(tmp_path / "k", ["af_x", "bm_y"], ids_name))
    assert [(each.name, each.language) for each in kokoro.voices()] == [
        ("af_x", "en-US"),
        ("bm_y", "en-GB"),
    ]
    first = kokoro.synthesize(TEXT, "", speed=1, seed=0)
    assert digest(first.samples) == digest(kokoro.synthesize(TEXT, "af_x", speed=1, seed=1).samples)
    other = kokoro.synthesize(TEXT, "bm_y", speed=1, seed=0)
    assert digest(first.samples) != digest(other.samples)
    assert len(first.word_ends) == len(TEXT.split())
    for speed in (0.5, 2):
        length = len(kokoro.synthesize(TEXT, "af_x", speed=speed, seed=0).samples)
        assert length == pytest.approx(len(first.samples) / speed, rel=0.001)


def test_unusable_voice_folders_are_refused_with_the_remedy(tmp_path: Path) -> None:
    kokoro = write_tiny_kokoro(tmp_path / "kokoro", ["af_x"])
    (kokoro / "voices" / "af_short.bin").write_bytes(b"1234")
    (kokoro / "noise.onnx").write_bytes(b"noise")
    described: dict[str, object] = {
        "voice": "kokoro",
        "voices": ["af_x"],
        "model": "model.onnx",
    }
    refusals: list[tuple[dict[str, object], str]] = [
        ({}, r"voice\.json: .*voice"),
        ({"voice": "hibari", "voices": []}, "has no voices; name at least one"),
        ({"voice": "bark", "voices": ["x"]}, "voice 'bark'; use hibari or kokoro"),
        ({"voice": "hibari", "voices": ["nova"]}, "no voice 'nova'; use some of heart, emma"),
        ({"voice": "hibari", "voices": ["emma"]}, r"needs the file bf_emma\.int8\.onnx, from"),
        (described | {"model": "other.onnx"}, r"no model other\.onnx; name the ONNX file"),
        (described | {"model": "noise.onnx"}, r"noise\.onnx is no model that onnxruntime"),
        (described | {"voices": ["af_gone"]}, "af_gone needs the file"),
        (described | {"voices": ["af_short"]}, r"af_short\.bin is no voice of Kokoro"),
        (described | {"voices": ["jf_x"]}, "'jf_x' is not English; use voices"),
    ]
    for contents, message in refusals:
        folder_of(kokoro, **contents)
        with pytest.raises(ConfigError, match=message) as refused:
            load_voice(kokoro)
        assert refused.value.param == "checkpoint"
    with pytest.raises(ConfigError, match=r"it has no voice\.json"):
        load_voice(tmp_path)
    (tmp_path / "bf_emma.int8.onnx").write_bytes(b"not emma")
    with pytest.raises(ConfigError, match="is not the file of hibari's voice emma"):
        load_voice(folder_of(tmp_path, voice="hibari", voices=["emma"]))


def test_kokoro_model_with_other_inputs_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_kokoro(tmp_path / "k", ["af_x"], ids_name="letters")
    with pytest.raises(ConfigError, match="has the inputs letters, speed, style; Kokoro has"):
        load_voice(folder)


def test_missing_package_is_named_with_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fleet.models.voices.hibari", None)
    folder = folder_of(tmp_path, voice="hibari", voices=["heart"])
    with pytest.raises(ConfigError, match=r"pip install 'fleet-serving\[voice\]'"):
        load_voice(folder)
