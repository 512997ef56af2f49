"""Audio files as browsers, phones and the server write them are decoded; damaged and oversized
files are refused in one sentence.
"""

import base64
import io
import struct
from collections.abc import Mapping
from functools import cache
from typing import cast

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.core.errors import BadInput, InputTooLarge
from fleet.processing import containers, g711, joined_recordings
from fleet.processing.audio import READABLE, decode_clip
from tests.recordings import RECORDERS, Recorder, Wave
from tests.web.sounds import likeness
from web.openai.audio_encoder import encode_whole, open_encoder
from web.schema.audio import FileFormat

RATE_HZ = 16_000
DELAY_S = 0.1
"""Tolerance in seconds of a decoded file's length: codecs add samples at both ends, which
containers do not remove.
"""
BY_NAME: Mapping[str, Recorder] = {recorder.name: recorder for recorder in RECORDERS}


def rising(rate_hz: int, seconds: float = 2.0) -> Wave:
    """Return a tone that rises from 200 to 800 Hz, so that it correlates with itself at one
    position only.
    """
    at_s = np.arange(round(seconds * rate_hz)) / rate_hz
    return (0.4 * np.sin(2 * np.pi * (200 * at_s + 300 / seconds * at_s**2))).astype(np.float32)


@cache
def recorded(name: str, seconds: float = 2.0) -> bytes:
    recorder = BY_NAME[name]
    return recorder.record(rising(recorder.rate_hz, seconds))


def read(file: bytes | str, max_s: float = 10) -> Wave:
    return decode_clip(file, rate_hz=RATE_HZ, max_s=max_s, where="file")


def refusal(file: bytes, max_s: float = 10) -> str:
    with pytest.raises(BadInput) as refused:
        read(file, max_s)
    assert refused.value.param == "file" and refused.value.message.startswith("file: ")
    return refused.value.message


@pytest.mark.parametrize("recorder", RECORDERS, ids=lambda recorder: recorder.name)
def test_recording_of_browser_or_phone_is_read(recorder: Recorder) -> None:
    heard = read(recorded(recorder.name))
    assert abs(len(heard) / RATE_HZ - 2) < DELAY_S
    assert likeness(heard, rising(RATE_HZ)) > 0.95


@pytest.mark.parametrize("kind", ["wav", "mp3", "flac", "opus", "aac"])
@pytest.mark.parametrize("streamed", [True, False])
def test_file_of_own_encoder_is_read(kind: FileFormat, streamed: bool) -> None:
    pcm = (rising(24_000) * 32_767).astype("<i2").tobytes()
    file = encode_whole(pcm, 24_000, kind)
    if streamed:
        encoder = open_encoder(kind, 24_000)
        file = b"".join([encoder.feed(pcm[:9_600]), encoder.feed(pcm[9_600:]), encoder.finish()])
    heard = read(file)
    assert abs(len(heard) / RATE_HZ - 2) < DELAY_S and likeness(heard, rising(RATE_HZ)) > 0.98


@pytest.mark.parametrize(
    "name",
    [
        "webm of Chromium",
        "Ogg of Firefox",
        "fragmented mp4 of Safari",
        "aac",
        "amr",
        "Ogg of FLAC",
        "streamed FLAC",
    ],
)
def test_recording_cut_at_its_end_is_read_up_to_the_cut(name: str) -> None:
    file = recorded(name, 4)
    heard = read(file[: len(file) * 3 // 4])
    # a page of Ogg, or a fragment of MP4, is there as a whole or not at all
    assert 1.9 < len(heard) / RATE_HZ < 3.4
    assert likeness(heard, rising(RATE_HZ, 4)[: len(heard)]) > 0.95


def test_amr_frames_of_silence_and_wideband_are_read() -> None:
    no_data = 20 * b"\x7c"
    assert len(read(b"#!AMR\n" + no_data)) == len(read(b"#!AMR-WB\n" + no_data)) == 0.4 * RATE_HZ


def id3_tag(num_bytes: int, *, has_footer: bool = False) -> bytes:
    size = bytes(num_bytes >> shift & 0x7F for shift in (21, 14, 7, 0))
    rest = b"\x04\x00" + (b"\x10" if has_footer else b"\x00") + size
    return b"ID3" + rest + bytes(num_bytes) + (b"3DI" + rest if has_footer else b"")


@pytest.mark.parametrize("kind", ["streamed flac", "flac", "mp3", "aac"])
@pytest.mark.parametrize(
    "tags",
    [id3_tag(300), id3_tag(300, has_footer=True), id3_tag(300) + id3_tag(20)],
    ids=["one", "with a footer", "two"],
)
def test_id3_tags_before_audio_are_skipped(kind: str, tags: bytes) -> None:
    pcm = (rising(24_000) * 32_767).astype("<i2").tobytes()
    file = (
        recorded("streamed FLAC")
        if kind == "streamed flac"
        else encode_whole(pcm, 24_000, cast(FileFormat, kind))
    )
    assert np.array_equal(read(tags + file), read(file))


@pytest.mark.parametrize(("law", "tag"), [("a", 6), ("mu", 7)])
@pytest.mark.parametrize("subtype", ["ALAW and ULAW of libsndfile", "plain header"])
def test_wav_of_a_telephone_is_read(law: g711.Law, tag: int, subtype: str) -> None:
    """G.711 in WAV files, also with the header of PBXs, which has no `fact` chunk."""
    wave = (rising(8_000) * 32_767).astype(np.int16)
    audio = g711.encode(wave, law)
    form = struct.pack("<HHIIHH", tag, 1, 8_000, 8_000, 1, 8)
    chunks = b"fmt " + struct.pack("<I", 16) + form + b"data" + struct.pack("<I", len(audio))
    file = io.BytesIO(b"RIFF" + struct.pack("<I", len(chunks) + len(audio) + 4) + b"WAVE" + chunks)
    file.seek(0, io.SEEK_END)
    file.write(audio)
    if subtype != "plain header":
        file = io.BytesIO()
        soundfile.write(file, wave, 8_000, format="WAV", subtype="ULAW" if law == "mu" else "ALAW")
    heard = read(file.getvalue())
    assert len(heard) == 2 * RATE_HZ and likeness(heard, rising(RATE_HZ)) > 0.999


@pytest.mark.parametrize("codec", ["pcm_s16le", "pcm_s32le", "pcm_f32le"])
def test_channels_are_averaged(codec: str) -> None:
    stereo = Recorder(
        name="stereo", container="matroska", codec=codec, rate_hz=RATE_HZ, layout="stereo"
    )
    left, right = rising(RATE_HZ), rising(RATE_HZ)[::-1]
    assert np.abs(read(stereo.record(np.stack([left, right]))) - (left + right) / 2).max() < 1e-4


def test_data_url_with_a_comma_in_its_media_type_is_read() -> None:
    file = recorded("webm of Chromium")
    text = base64.b64encode(file).decode()
    for kind in ("video/webm;codecs=vp8,opus", "audio/webm;codecs=opus", "audio/webm"):
        assert np.array_equal(read(f"data:{kind};base64,{text}"), read(file)), kind
    with pytest.raises(BadInput, match="holds no audio"):
        read("data:audio/webm;base64,")


def test_wav_samples_are_unchanged() -> None:
    pcm = (rising(RATE_HZ) * 32_767).astype("<i2")
    assert np.array_equal(
        read(encode_whole(pcm.tobytes(), RATE_HZ, "wav")), pcm / np.float32(32_768)
    )


def wav_with_sizes(wave: Wave, riff: int, data: int, trailer: bytes = b"") -> bytes:
    pcm = (wave * 32_767).astype("<i2").tobytes()
    head = struct.pack("<4sI4s4sI", b"RIFF", riff, b"WAVE", b"LIST", 4) + b"INFO"
    sound = struct.pack(
        "<4sIHHIIHH4sI", b"fmt ", 16, 1, 1, RATE_HZ, 2 * RATE_HZ, 2, 16, b"data", data
    )
    return head + sound + pcm + trailer


@pytest.mark.parametrize("riff", [0, 8, 36, 48, 64_036, 0xFFFFFFFF])
@pytest.mark.parametrize(
    "wave", [rising(RATE_HZ), np.zeros(2 * RATE_HZ, np.float32)], ids=["tone", "silence"]
)
def test_wav_with_zero_samples_in_its_header_is_read_to_the_end(wave: Wave, riff: int) -> None:
    heard = read(wav_with_sizes(wave, riff, 0))
    assert np.array_equal(heard, read(wav_with_sizes(wave, riff, 0xFFFFFFFF))) and len(
        heard
    ) == len(wave)
    with pytest.raises(InputTooLarge, match="longer than 1 s"):
        read(wav_with_sizes(wave, riff, 0), 1)


def test_empty_wav_with_metadata_behind_it_holds_no_samples() -> None:
    tags = struct.pack("<4sI", b"LIST", 8_000) + bytes(8_000)
    for riff in (0, 44 + len(tags)):
        assert "shorter than 50 ms" in refusal(
            wav_with_sizes(np.zeros(0, np.float32), riff, 0, tags)
        )
    assert "shorter than 50 ms" in refusal(wav_with_sizes(np.zeros(0, np.float32), 0, 0))


def damaged(file: bytes) -> bytes:
    middle = len(file) // 2
    return file[:middle] + bytes(400) + file[middle + 400 :]


def test_file_that_cannot_be_decoded_is_refused_in_one_sentence() -> None:
    files = {
        "cut webm": recorded("webm of Chromium")[:60],
        "cut m4a": recorded("m4a of a phone")[:-2_000],
        "damaged mp4": damaged(recorded("fragmented mp4 of Safari")),
        "damaged aac": damaged(recorded("aac")),
        "webm in its first bytes only": b"\x1aE\xdf\xa3" + bytes(500),
        "mp4 in its first bytes only": b"\x00\x00\x00\x1cftypM4A " + bytes(500),
        "FLAC in its first bytes only": b"fLaC" + bytes(500),
        "Ogg in its first bytes only": b"OggS" + bytes(500),
        "Ogg without a packet": b"OggS",
        "ID3 tag only": id3_tag(300) * 30,
        "aac in its first bytes only": b"\xff\xf1" * 300,
        "empty amr": b"#!AMR\n",
        "HLS": b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n/etc/hostname\n#EXT-X-ENDLIST\n",
        "concat": b"ffconcat version 1.0\nfile /etc/hostname\n",
        "SDP": b"v=0\no=- 0 0 IN IP4 127.0.0.1\nm=audio 9 RTP/AVP 0\n",
    }
    for name, file in files.items():
        assert refusal(file) == f"file: not audio that can be read ({READABLE} expected)", name


def test_track_that_is_not_there_or_not_served_is_named() -> None:
    ac3 = Recorder(name="ac3", container="mp4", codec="ac3")
    assert "codec ac3 is not read" in refusal(ac3.record(rising(48_000)))
    nan = Recorder(name="nan", container="matroska", codec="pcm_f32le")
    assert "not numbers" in refusal(nan.record(rising(48_000) * np.float32("nan")))
    assert "shorter than 50 ms" in refusal(nan.record(rising(48_000, 0.03)))
    slow = Recorder(name="slow", container="matroska", codec="pcm_s16le", rate_hz=2_000)
    assert "sample rate 2000 Hz; use 4000 to 192000 Hz" in refusal(slow.record(rising(2_000)))


@pytest.mark.parametrize("name", ["webm of Chromium", "aac", "amr", "streamed FLAC"])
def test_recording_is_decoded_no_further_than_the_limit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = BY_NAME[name]
    num_decoded = 0

    def count(frame: containers.AudioFrame) -> Wave:
        nonlocal num_decoded
        num_decoded += frame.samples
        return np.zeros(frame.samples, np.float32)

    monkeypatch.setattr(containers, "_mono", count)
    with pytest.raises(InputTooLarge, match="^file: the audio is longer than 0.5 s"):
        read(recorder.record(np.zeros(4 * recorder.rate_hz, np.float32)), 0.5)
    assert num_decoded <= 0.5 * recorder.rate_hz


def test_sample_counts_beyond_the_file_are_refused_before_memory_is_reserved() -> None:
    whole, fragmented = recorded("m4a of a phone"), recorded("fragmented mp4 of Safari")
    sizes, run = whole.index(b"stsz") + 8, fragmented.index(b"trun") + 8
    one, count = struct.pack(">I", 1), struct.pack(">I", 50_000_000)
    for file in (
        whole[:sizes] + one + count + whole[sizes + 8 :],
        fragmented[:run] + count + fragmented[run + 4 :],
    ):
        with pytest.raises(BadInput) as refused:
            read(file)
        assert str(refused.value.__cause__) == "counts more samples than it has bytes"


def test_numbers_of_packets_and_boxes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "MAX_PACKETS_PER_S", 1)
    assert "not audio" in refusal(recorded("webm of Chromium"))
    monkeypatch.setattr(joined_recordings, "MAX_MP4_BOXES", 3)
    assert "not audio" in refusal(recorded("fragmented mp4 of Safari"))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(BY_NAME)), st.integers(0, 5_000), st.binary(min_size=1, max_size=8))
def test_changed_bytes_anywhere_are_read_or_refused(name: str, at: int, changed: bytes) -> None:
    file = recorded(name, 0.2)
    at %= len(file)
    try:
        read(file[:at] + changed + file[at + len(changed) :])
    except BadInput as refused:
        assert refused.param == "file"
