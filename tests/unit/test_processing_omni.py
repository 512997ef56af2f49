"""Qwen3-Omni's frontend against `transformers`: equal prompt ids and numbers of audio positions;
audio decoding.
"""

import base64
import dataclasses
import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

from fleet.config.schema import Limits
from fleet.core.errors import BadInput, ConfigError, InputTooLarge, UnsupportedValue
from fleet.core.ids import EdgeName, RequestId
from fleet.processing import AudioPart, ChatRequest, Frontend, Message, TextPart, load_frontend
from fleet.processing.qwen3_omni import num_audio_positions
from tests.support import REPO
from tests.web.checkpoint import write_frontend_files

REFERENCE = "fleet.processing.qwen3_omni:OmniFrontend"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_frontend_files(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def frontend(checkpoint: Path) -> Frontend:
    return load_frontend(REFERENCE, checkpoint, Limits(max_audio_s=10))


def wave(num_samples: int, channels: int = 1) -> NDArray[np.float32]:
    mono = 0.3 * np.sin(np.arange(num_samples) * 0.2)
    return np.stack([mono] * channels, axis=1).astype(np.float32)


def encoded(
    samples: NDArray[np.float32],
    rate_hz: int = 16_000,
    kind: str = "WAV",
    subtype: str | None = None,
) -> str:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate_hz, format=kind, subtype=subtype)
    return base64.b64encode(buffer.getvalue()).decode()


def spoken_to(*data: str, voice: str | None = None, text: str = "what is this?") -> ChatRequest:
    parts = tuple(
        AudioPart(data=clip, where=f"messages[0].content[{n}]") for n, clip in enumerate(data)
    )
    content = (*parts, TextPart(text=text, where="messages[0].content[9]"))
    return ChatRequest(
        id=RequestId("req-1"),
        graph="qwen3_omni",
        messages=(Message(role="user", content=content),),
        outputs=(EdgeName("text"), EdgeName("audio")),
        spoken=True,
        voice=voice,
    )


def test_positions_equal_the_processor_for_many_lengths(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import WhisperFeatureExtractor
    from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import (
        _get_feat_extract_output_lengths,  # pyright: ignore[reportPrivateUsage]
    )

    extractor = WhisperFeatureExtractor.from_pretrained(checkpoint)

    def counted(lengths: list[int]) -> list[int]:
        clips = [np.zeros(length, np.float32) for length in lengths]
        made = extractor(
            clips,
            sampling_rate=16_000,
            padding=True,  # pyright: ignore[reportArgumentType]
            truncation=False,
            return_attention_mask=True,
        )
        return [int(n) for n in _get_feat_extract_output_lengths(made["attention_mask"].sum(-1))]

    for lengths in ([800], [16_000], [32_000], [31_999], [800, 1601, 16_001], [15_999, 16_000]):
        assert num_audio_positions(lengths) == counted(lengths), lengths
    # the mask alone decides the count, so the mel filters need not run for the rest
    monkeypatch.setattr(
        extractor,
        "_torch_extract_fbank_features",
        lambda waves, _device: np.zeros((len(waves), 1, 1)),
    )
    random = np.random.default_rng(0)
    for _ in range(300):
        lengths = [int(n) for n in random.integers(800, 60_000, size=random.integers(1, 4))]
        assert num_audio_positions(lengths) == counted(lengths), lengths
    for length in range(1_600, 1_600 + 161):
        assert num_audio_positions([length]) == counted([length])


def test_prompt_ids_equal_the_reference_template(checkpoint: Path, frontend: Frontend) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(checkpoint)
    messages = [
        ("system", "be brief"),
        ("user", "héllo 你好\n\n"),
        ("assistant", ""),
        ("user", "  and?"),
    ]
    expected = reference.apply_chat_template(
        [{"role": role, "content": text} for role, text in messages],
        add_generation_prompt=True,
        return_dict=True,
    )["input_ids"]
    chat = ChatRequest(
        id=RequestId("req-1"),
        graph="qwen3_omni",
        messages=tuple(
            Message(role=role, content=TextPart(text=text, where="w")) for role, text in messages
        ),
        outputs=(EdgeName("text"),),
    )
    spec, blob = frontend.prepare(chat)
    assert list(spec.prompt_ids) == expected and blob is None and spec.params == {}


def test_prompt_of_a_spoken_turn_is_shown_with_its_clips_and_roles(frontend: Frontend) -> None:
    """The shown prompt of a spoken turn includes its audio clips and roles; otherwise only the
    earlier answer would be shown.
    """
    asked = Message(role="user", content=(AudioPart(data=encoded(wave(32_000)), where="a"),))
    answered = Message(role="assistant", content=TextPart(text="it is cold", where="b"))
    spec, _ = frontend.prepare(dataclasses.replace(spoken_to(), messages=(asked, answered, asked)))
    shown = frontend.prompt_text(spec.prompt_ids)
    assert shown.splitlines() == [
        "user",
        "[audio]",
        "assistant",
        "it is cold",
        "user",
        "[audio]",
        "assistant",
    ]


def test_blob_holds_clips_in_order(frontend: Frontend) -> None:
    spec, blob = frontend.prepare(
        spoken_to(encoded(wave(32_000)), encoded(wave(8_000), 8_000, "FLAC"))
    )
    assert blob is not None
    samples = np.frombuffer(blob, "<f4")
    first, second = spec.audio
    assert (first.offset_samples, first.num_samples, first.rate_hz) == (0, 32_000, 16_000)
    assert (second.offset_samples, second.num_samples) == (32_000, 16_000) and len(
        samples
    ) == 48_000
    assert np.abs(samples[:32_000] - wave(32_000)[:, 0]).max() < 1e-3
    assert (
        frontend.num_prompt_audio_tokens(spec) == sum(num_audio_positions([32_000, 16_000])) == 39
    )


@pytest.mark.parametrize(
    ("rate_hz", "kind", "channels", "subtype"),
    [
        (44_100, "WAV", 2, None),
        (24_000, "MP3", 1, None),
        (48_000, "OGG", 2, "OPUS"),
        (16_000, "WAV", 1, "FLOAT"),
    ],
)
def test_common_audio_file_becomes_mono_at_model_rate(
    frontend: Frontend, rate_hz: int, kind: str, channels: int, subtype: str | None
) -> None:
    spec, blob = frontend.prepare(
        spoken_to(encoded(wave(rate_hz, channels), rate_hz, kind, subtype))
    )
    assert blob is not None and abs(spec.audio[0].num_samples - 16_000) < 2_000
    assert 0.1 < float(np.sqrt(np.mean(np.frombuffer(blob, "<f4") ** 2))) < 0.3


def _not_finite() -> str:
    samples = wave(16_000)
    samples[5] = np.nan
    return encoded(samples, subtype="FLOAT")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("not base64!", "not base64"),
        ("é", "not base64"),
        ("", "holds no audio"),
        (base64.b64encode(b"RIFF but not really").decode(), "not audio"),
        (base64.b64encode(b"\x00" * 4000).decode(), "not audio"),
        (encoded(wave(100)), "shorter"),
        (encoded(wave(16_000) * 1e30, subtype="FLOAT"), "absurdly large"),
        (encoded(wave(4_000), 1_000), "sample rate"),
        (_not_finite(), "not numbers"),
    ],
)
def test_invalid_audio_is_refused_with_its_field(
    frontend: Frontend, data: str, message: str
) -> None:
    with pytest.raises(BadInput, match=message) as refused:
        frontend.prepare(spoken_to(data))
    assert refused.value.param == "messages[0].content[0]"


def test_audio_beyond_the_limit_is_refused_over_all_clips(frontend: Frontend) -> None:
    with pytest.raises(InputTooLarge, match="longer than 10 s"):
        frontend.prepare(spoken_to(encoded(wave(161_000))))
    with pytest.raises(InputTooLarge) as refused:
        frontend.prepare(spoken_to(encoded(wave(96_000)), encoded(wave(96_000))))
    assert refused.value.param == "messages[0].content[1]"


@pytest.mark.parametrize(
    ("wanted", "given"),
    [
        (None, "ethan"),
        ("Chelsie", "chelsie"),
        ("ethan", "ethan"),
        ("alloy", "chelsie"),
        ("onyx", "ethan"),
    ],
)
def test_voice_aliases_resolve(frontend: Frontend, wanted: str | None, given: str) -> None:
    assert frontend.prepare(spoken_to(voice=wanted))[0].params == {"voice": given}


def test_unknown_voice_is_refused_with_known_voices(frontend: Frontend) -> None:
    with pytest.raises(BadInput, match="chelsie, ethan") as refused:
        frontend.prepare(spoken_to(voice="nobody"))
    assert refused.value.param == "audio.voice"


def test_no_torch_in_processing() -> None:
    code = (
        f"import sys, {REFERENCE.partition(':')[0]}, fleet.processing.text; sys.exit('torch' "
        "in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def saying(given: TextPart | tuple[int, ...]) -> ChatRequest:
    return dataclasses.replace(spoken_to(), given=given)


def test_given_answer_is_text_or_tokens(frontend: Frontend) -> None:
    spec, _ = frontend.prepare(saying(TextPart(text="Just this.", where="input")))
    assert spec.given[-1] in frontend.end_ids() and not frontend.end_ids() & set(spec.given[:-1])
    detokenizer = frontend.detokenizer()
    assert detokenizer.add(spec.given) + detokenizer.finish() == "Just this."
    assert (
        frontend.prepare(saying((5, 6)))[0].given == (5, 6)
        and frontend.prepare(saying(()))[0].given == ()
    )


@pytest.mark.parametrize("text", ["<|im_end|>", "half a pair: \ud800", ""])
def test_unspeakable_text_is_refused_with_its_field(frontend: Frontend, text: str) -> None:
    with pytest.raises(BadInput, match="^input: ") as refused:
        frontend.prepare(saying(TextPart(text=text, where="input")))
    assert refused.value.param == "input"


def test_long_text_is_split_into_pieces_that_fit(frontend: Frontend) -> None:
    text = "This is one. Here is another one, longer than that. And a third!"
    pieces = frontend.speech_pieces(TextPart(text=text, where="input"), 24)
    assert "".join(pieces) == text and len(pieces) > 1
    for piece in pieces:
        assert len(frontend.prepare(saying(TextPart(text=piece, where="input")))[0].given) <= 24
    with pytest.raises(BadInput, match="control token"):
        frontend.speech_pieces(TextPart(text="<|im_end|>", where="input"), 24)


def test_pocket_drops_characters_without_letters() -> None:
    folder = REPO / "fleet" / "checkpoints" / "pocket"
    frontend = load_frontend(REFERENCE, folder, Limits())
    assert (
        frontend.speech_pieces(TextPart(text="\u4f60\u597d! \u2026 \U0001f600", where="input"), 24)
        == []
    )
    (piece,) = frontend.speech_pieces(
        TextPart(text="\u4f60\u597d, it's 7 o'clock!", where="input"), 99
    )
    spec, _ = frontend.prepare(saying(TextPart(text=piece, where="input")))
    detokenizer = frontend.detokenizer()
    assert detokenizer.add(spec.given) + detokenizer.finish() == "it's seven o'clock"


def test_raw_file_is_accepted_and_errors_name_its_field(frontend: Frontend) -> None:
    as_text = encoded(wave(16_000))
    by_text = frontend.prepare(spoken_to(as_text))
    parts = (
        AudioPart(data=base64.b64decode(as_text), where="file"),
        TextPart(text="what is this?", where="prompt"),
    )
    by_bytes = frontend.prepare(
        dataclasses.replace(spoken_to(), messages=(Message(role="user", content=parts),))
    )
    assert by_bytes[0].prompt_ids == by_text[0].prompt_ids and by_bytes[1] == by_text[1]
    nothing = (AudioPart(data=b"", where="file"),)
    with pytest.raises(BadInput, match="^file: holds no audio"):
        frontend.prepare(
            dataclasses.replace(spoken_to(), messages=(Message(role="user", content=nothing),))
        )
    with pytest.raises(BadInput, match="^voice: no voice 'nobody'"):
        frontend.prepare(dataclasses.replace(spoken_to(voice="nobody"), voice_where="voice"))


@pytest.mark.parametrize(
    ("language", "name"),
    [
        ("de", "German"),
        ("en-US", "English"),
        ("EN", "English"),
        ("yue", "Cantonese"),
        ("French", "French"),
    ],
)
def test_transcription_prompt_names_the_language(
    frontend: Frontend, language: str, name: str
) -> None:
    assert frontend.transcription_prompt(language) == f"Transcribe the {name} audio into text."


def test_transcription_prompt_of_an_unknown_language_is_refused_with_the_known_ones(
    frontend: Frontend,
) -> None:
    with pytest.raises(UnsupportedValue, match="where: 'tlh' is none .* en, zh") as refused:
        frontend.transcription_prompt("tlh", "where")
    assert refused.value.param == "where"


def test_pocket_accepts_its_only_language_with_the_same_prompt() -> None:
    frontend = load_frontend(REFERENCE, REPO / "fleet" / "checkpoints" / "pocket", Limits())
    assert frontend.transcription_prompt("en") == frontend.transcription_prompt()
    with pytest.raises(
        UnsupportedValue,
        match="language: 'de' is none of the languages that this model transcribes: en",
    ):
        frontend.transcription_prompt("de")


def test_unknown_language_of_a_checkpoint_is_refused_at_load(tmp_path: Path) -> None:
    folder = write_frontend_files(tmp_path)
    (folder / "examples.json").write_text('{"languages": ["xx"]}')
    with pytest.raises(ConfigError, match="languages must be a list of codes"):
        load_frontend(REFERENCE, folder, Limits())
