"""Several recordings joined in one file are decoded completely; a file that cannot be decoded
completely is refused by name.
"""

import base64
import io
import random
import struct
from collections.abc import Callable, Mapping
from functools import cache

import numpy as np
import pytest
import soundfile

from fleet.core.errors import BadInput, InputTooLarge
from fleet.processing import joined_recordings
from fleet.processing.audio import decode_clip, needs_decoder
from tests.recordings import FRAGMENTED, Recorder, Wave
from tests.unit.test_audio_containers import BY_NAME, DELAY_S, id3_tag, rising
from tests.web.sounds import likeness
from web.openai.audio_encoder import encode_whole
from web.schema.audio import FileFormat

RATE_HZ = 16_000
PART_S = 1.3


def by_libsndfile(kind: str, codec: str) -> Callable[[int], bytes]:
    def write(rate_hz: int) -> bytes:
        file = io.BytesIO()
        soundfile.write(file, rising(rate_hz, PART_S), rate_hz, format=kind, subtype=codec)
        return file.getvalue()

    return write


def by_own_encoder(kind: FileFormat) -> Callable[[int], bytes]:
    def write(rate_hz: int) -> bytes:
        pcm = (rising(rate_hz, PART_S) * 32_767).astype("<i2").tobytes()
        return encode_whole(pcm, rate_hz, kind)

    return write


def streamed_wav(data_len: int) -> Callable[[int], bytes]:
    def write(rate_hz: int) -> bytes:
        whole = by_own_encoder("wav")(rate_hz)
        assert whole[36:40] == b"data"
        size = struct.pack("<I", data_len)
        return whole[:4] + size + whole[8:40] + size + whole[44:]

    return write


WRITERS: Mapping[str, Callable[[int], bytes]] = {
    "Opus": by_own_encoder("opus"),
    "Vorbis": by_libsndfile("OGG", "VORBIS"),
    "FLAC": by_own_encoder("flac"),
    "FLAC of 24 bits": by_libsndfile("FLAC", "PCM_24"),
    "MP3 with tags": by_own_encoder("mp3"),
    "MP3 without tags": by_libsndfile("MP3", "MPEG_LAYER_III"),
    "AAC": by_own_encoder("aac"),
    "WAV": by_own_encoder("wav"),
    "WAV of floats": by_libsndfile("WAV", "FLOAT"),
    "WAV without a size": streamed_wav(0),
    "WAV of unknown size": streamed_wav(0xFFFFFFFF),
}


@cache
def written(kind: str, rate_hz: int = 24_000) -> bytes:
    return WRITERS[kind](rate_hz)


@cache
def recorded(name: str) -> bytes:
    recorder = BY_NAME[name]
    return recorder.record(rising(recorder.rate_hz, PART_S))


def read(file: bytes, max_s: float = 10) -> Wave:
    return decode_clip(file, rate_hz=RATE_HZ, max_s=max_s, where="file")


def refusal(file: bytes) -> str:
    with pytest.raises(BadInput) as refused:
        read(file)
    return refused.value.message


def assert_heard(file: bytes, num_parts: int) -> None:
    """Check that each joined recording is in its place, within the samples that codecs add."""
    heard = read(file)
    assert abs(len(heard) / RATE_HZ - num_parts * PART_S) < num_parts * DELAY_S
    for number, part in enumerate(np.array_split(heard, num_parts)):
        assert likeness(part, rising(RATE_HZ, PART_S)) > 0.9, number


@pytest.mark.parametrize("kind", sorted(WRITERS))
@pytest.mark.parametrize("num_parts", [2, 3])
def test_files_written_one_after_another_are_heard_whole(kind: str, num_parts: int) -> None:
    assert_heard(num_parts * written(kind), num_parts)


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_recordings_of_browsers_and_phones_one_after_another_are_heard_whole(name: str) -> None:
    assert_heard(2 * recorded(name), 2)


@pytest.mark.parametrize("kind", sorted(WRITERS))
def test_part_of_another_rate_and_number_of_channels_is_heard(kind: str) -> None:
    assert_heard(written(kind) + written(kind, 16_000) + written(kind), 3)


@pytest.mark.parametrize(
    ("container", "codec"),
    [
        ("ogg", "libopus"),
        ("flac", "flac"),
        ("adts", "aac"),
        ("mp3", "libmp3lame"),
        ("wav", "pcm_s16le"),
    ],
)
def test_channels_may_change_between_parts(container: str, codec: str) -> None:
    mono = Recorder(name="mono", container=container, codec=codec)
    stereo = Recorder(name="stereo", container=container, codec=codec, layout="stereo")
    wave = rising(48_000, PART_S)
    assert_heard(mono.record(wave) + stereo.record(np.stack([wave, wave])), 2)


@pytest.mark.parametrize("kind", ["MP3 with tags", "MP3 without tags", "FLAC", "AAC"])
@pytest.mark.parametrize("tags", [id3_tag(300), id3_tag(300) + id3_tag(20)], ids=["one", "two"])
def test_tags_between_parts_are_skipped(kind: str, tags: bytes) -> None:
    assert_heard(tags + written(kind) + tags + written(kind) + tags, 2)


def test_damaged_mp3_is_heard_around_the_damage() -> None:
    file = written("MP3 without tags")
    middle = len(file) // 2
    noise = random.Random(3).randbytes(300).replace(b"\xff", b"\xfe")
    for junk in (b"TAG" + bytes(125), b"APETAGEX" + bytes(200), noise):
        assert_heard(file + junk + file, 2)
        damaged = file[:middle] + junk + file[middle + len(junk) :]
        assert abs(len(read(damaged)) / RATE_HZ - PART_S) < 0.5


@pytest.mark.parametrize("header", ["fff29869", "fff7e880", "ffe7c181", "fff4ca7d", "ffe497b2"])
def test_damage_that_looks_like_an_mp3_frame_costs_no_more_than_that_frame(header: str) -> None:
    file, frame = written("MP3 without tags"), bytes.fromhex(header) + bytes(296)
    assert abs(len(read(file + frame + file)) / RATE_HZ - 2 * PART_S) < 0.5


@pytest.mark.parametrize("count", [1, 5, 1_000_000])
@pytest.mark.parametrize("kind", ["MP3 with tags", "MP3 without tags"])
def test_mp3_that_declares_a_wrong_number_of_frames_is_heard_whole(kind: str, count: int) -> None:
    file = written(kind)
    at = max(file.find(b"Xing"), file.find(b"Info"))
    assert at > 0 and file[at + 7] & 1
    assert_heard(file[: at + 8] + struct.pack(">I", count) + file[at + 12 :], 1)


@pytest.mark.parametrize("count", [1, 15_000, 1 << 35])
def test_flac_that_declares_a_wrong_number_of_samples_is_heard_whole(count: int) -> None:
    file = written("FLAC")
    total = int.from_bytes(file[21:26], "big")
    wrong = (total >> 36 << 36 | count).to_bytes(5, "big")
    assert_heard(file[:21] + wrong + file[26:], 1)


def test_flac_cut_at_its_end_is_heard_up_to_the_cut() -> None:
    file = written("FLAC")
    assert 0.5 < len(read(file[: len(file) * 3 // 4])) / RATE_HZ < PART_S


@pytest.mark.parametrize("kind", ["Opus", "FLAC", "WAV", "AAC", "MP3 with tags"])
def test_last_of_several_parts_may_be_cut(kind: str) -> None:
    file = written(kind)
    heard = len(read(file + file[: len(file) * 3 // 4])) / RATE_HZ
    assert 1.5 * PART_S < heard < 2 * PART_S


@pytest.mark.parametrize("kind", sorted(WRITERS))
def test_length_limit_holds_over_all_parts(kind: str) -> None:
    with pytest.raises(InputTooLarge, match="^file: the audio is longer than 3 s"):
        read(3 * written(kind), 3)
    read(3 * written(kind), 4.5)


def test_number_of_parts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined_recordings, "MAX_RECORDINGS", 3)
    assert_heard(3 * written("WAV"), 3)
    for kind in ("WAV", "Opus", "FLAC", "MP3 with tags"):
        reason = "the file joins more than 3 recordings; send one recording"
        assert refusal(4 * written(kind)) == f"file: {reason}"


@pytest.mark.parametrize(
    ("container", "codec", "options"),
    [
        ("webm", "libopus", {}),
        ("mp4", "aac", {}),
        ("mp4", "aac", FRAGMENTED),
        ("ogg", "libopus", {}),
        ("ogg", "flac", {}),
    ],
)
def test_file_with_several_audio_tracks_is_refused_by_name(
    container: str, codec: str, options: Mapping[str, str]
) -> None:
    tracks = Recorder(name="2", container=container, codec=codec, num_tracks=2, options=options)
    message = refusal(tracks.record(rising(48_000, PART_S)))
    assert message == "file: the file has 2 audio tracks; send a file with one, or mix them"


def test_only_track_of_a_known_codec_is_heard() -> None:
    tracks = Recorder(name="2", container="mp4", codec="ac3", other_codec="aac", num_tracks=2)
    assert_heard(tracks.record(rising(48_000, PART_S)), 1)


@pytest.mark.parametrize("kind", ["WAV", "WAV without a size", "WAV of floats"])
def test_gateway_decodes_only_wav_files_that_end_with_their_samples(kind: str) -> None:
    file = written(kind)
    text = base64.b64encode(file).decode()
    for data in (file, text, f"data:audio/wav;base64,{text}"):
        assert needs_decoder([("file", data)]) is (kind != "WAV")
    joined = file + file
    for data in (joined, base64.b64encode(joined).decode()):
        assert needs_decoder([("file", data)])
