"""Audio files are decoded by processes that are bounded in number, time and memory, whatever the
file's content.
"""

import asyncio
import base64
import io
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import psutil
import pytest
import soundfile

from fleet.core.errors import BadInput, FleetError
from fleet.processing import decoder_pool, decoding
from fleet.processing.audio import MAX_PARTS, READABLE, decode_clip, decode_parts, needs_decoder
from fleet.processing.base import Samples
from fleet.processing.decoder_pool import MAX_PROCESSES, DecoderPool
from fleet.processing.decoding import DecodeJob
from tests.support import wait_until
from tests.web.sound_bombs import (
    all_bombs,
    big_pictures,
    flac_that_declares,
    silence,
    surround,
    wav,
)
from tests.web.stuck_decoder import stuck_decoders

RATE_HZ = 16_000
TOO_LONG = "the request's audio is longer than 120 s (limits.max_audio_s)"
REFUSED = {
    "255 channels of Vorbis": "255 channels of audio; use at most 8",
    "255 channels of Opus": "255 channels of audio; use at most 8",
    "255 channels of WAV": "255 channels of audio; use at most 8",
    "65535 channels of WAV": f"not audio that can be read ({READABLE} expected)",
    "an hour of Opus": TOO_LONG,
    "an hour of FLAC": TOO_LONG,
    "an hour of FLAC that declares nothing": TOO_LONG,
    "an hour of FLAC that declares a second": TOO_LONG,
    "an hour of MP3": TOO_LONG,
    "an hour of WAV at 4 kHz": TOO_LONG,
    "WAV of 1 Hz": "sample rate 1 Hz; use 4000 to 192000 Hz",
    "WAV of 4 GHz": "sample rate 4294967295 Hz; use 4000 to 192000 Hz",
    "a gigabyte of codebooks": "the audio cannot be decoded; send it as WAV or FLAC",
}
SHOWS_ENVIRONMENT = """
import os, sys
from fleet.processing.decoding import DecodeReply, read_message, write_message
read_message(sys.stdin.buffer)
write_message(sys.stdout.buffer, DecodeReply(code="invalid_value", message=" ".join(os.environ)))
"""


@pytest.fixture(scope="module")
def pool() -> Iterator[DecoderPool]:
    pool = DecoderPool(1)
    yield pool
    pool.close()


@pytest.fixture
def own_pool() -> Iterator[DecoderPool]:
    pool = DecoderPool()
    yield pool
    pool.close()


async def test_streamed_file_arrives_while_it_is_decoded(pool: DecoderPool) -> None:
    """The whole file as PCM16, in replies of at most 5 s."""
    rng = np.random.default_rng(4)
    wave = (0.3 * rng.standard_normal(40 * 22_050)).astype(np.float32)
    buffer = io.BytesIO()
    soundfile.write(buffer, wave, 22_050, format="FLAC")
    file, pieces = buffer.getvalue(), list[bytes]()
    job = DecodeJob.of([("file", file)], rate_hz=RATE_HZ, max_audio_s=60.0, streams=True)
    assert await pool.decode(job, pieces.append) == []
    assert [child.status() for child in psutil.Process().children()], "it was not overdue"
    (whole,) = await pool.decode(DecodeJob.of([("file", file)], rate_hz=RATE_HZ, max_audio_s=60.0))
    heard = np.frombuffer(b"".join(pieces), "<i2")
    assert len(heard) == len(whole) and len(pieces) >= 10
    assert np.abs(heard / 32_768 - whole.clip(-1, 1)).max() <= 1 / 32_768
    assert max(map(len, pieces)) <= 2 * 5 * RATE_HZ
    short = DecodeJob.of([("file", file)], rate_hz=RATE_HZ, max_audio_s=20.0, streams=True)
    assert short.memory_bytes == job.memory_bytes, "memory does not grow with the recording"
    with pytest.raises(BadInput, match="longer than 20 s"):
        await pool.decode(short, lambda _: None)


@cache
def bombs() -> dict[str, bytes]:
    return all_bombs()


def job(*files: bytes | str, max_audio_s: float = 120) -> DecodeJob:
    parts = [(f"part[{number}]" if number else "file", file) for number, file in enumerate(files)]
    return DecodeJob.of(parts, rate_hz=RATE_HZ, max_audio_s=max_audio_s)


async def refusal(pool: DecoderPool, job: DecodeJob) -> str:
    with pytest.raises(BadInput) as refused:
        await pool.decode(job)
    assert refused.value.param is not None and refused.value.message.startswith(
        f"{refused.value.param}: "
    )
    return refused.value.message


@pytest.mark.parametrize("name", REFUSED)
async def test_bomb_is_refused_by_name_of_field_and_limit(pool: DecoderPool, name: str) -> None:
    assert await refusal(pool, job(bombs()[name])) == f"file: {REFUSED[name]}"


async def test_every_bomb_has_its_refusal() -> None:
    assert set(REFUSED) == set(bombs())


async def test_file_is_read_after_a_decoder_crashed(pool: DecoderPool) -> None:
    file = silence("FLAC", "PCM_16", 48_000, 8, 1)
    await refusal(pool, job(bombs()["a gigabyte of codebooks"]))
    (clip,) = await pool.decode(job(file))
    assert (
        np.array_equal(clip, decode_clip(file, rate_hz=RATE_HZ, max_s=2, where="file"))
        and len(clip) == RATE_HZ
    )


async def test_second_of_flac_that_declares_a_day_is_read_as_a_second(pool: DecoderPool) -> None:
    (clip,) = await pool.decode(job(flac_that_declares(4_000 * 86_400, 1)))
    assert len(clip) == RATE_HZ


@pytest.mark.parametrize(
    ("container", "codec"),
    [
        ("webm", "libopus"),
        ("mp4", "aac"),
        ("adts", "aac"),
        ("matroska", "pcm_s16le"),
        ("ogg", "flac"),
    ],
)
@pytest.mark.parametrize("layout", ["5.1", "7.1"])
async def test_surround_sound_is_read(
    pool: DecoderPool, container: str, codec: str, layout: str
) -> None:
    (clip,) = await pool.decode(job(surround(container, codec, layout)))
    assert abs(len(clip) - RATE_HZ) < 0.1 * RATE_HZ and 0.2 < float(np.abs(clip).max()) < 0.4


@pytest.mark.parametrize(("container", "codec"), [("mp4", "aac"), ("matroska", "pcm_s16le")])
async def test_more_channels_in_any_container_are_refused(
    pool: DecoderPool, container: str, codec: str
) -> None:
    message = await refusal(pool, job(surround(container, codec, "hexadecagonal")))
    assert message == "file: 16 channels of audio; use at most 8"


async def test_big_pictures_beside_the_sound_are_not_decoded(pool: DecoderPool) -> None:
    (clip,) = await pool.decode(job(big_pictures()))
    assert abs(len(clip) - RATE_HZ) < 0.1 * RATE_HZ and float(np.abs(clip).max()) > 0.2


async def test_many_tiny_parts_are_refused_at_the_first_beyond_the_limit(pool: DecoderPool) -> None:
    tiny = wav(RATE_HZ, 1, 16, bytes(2 * RATE_HZ // 10))
    message = await refusal(pool, job(*[tiny] * 1_000))
    assert (
        message == f"part[{MAX_PARTS}]: the request has 1000 audio parts; use at most {MAX_PARTS}"
    )
    assert await refusal(pool, job(*[tiny] * 100, max_audio_s=5.05)) == (
        "part[50]: the request's audio is longer than 5.05 s (limits.max_audio_s)"
    )


async def test_text_that_is_no_base64_is_refused(pool: DecoderPool) -> None:
    for text in ("é", "\ud800", "AAA", "=" * 4):
        assert (await refusal(pool, job(text))).startswith("file: not base64")


async def test_decoding_beyond_its_cpu_time_is_refused(
    pool: DecoderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "MIN_CPU_S", 0)
    monkeypatch.setattr(decoding, "CPU_PER_AUDIO_S", 0.0001)
    slow = silence("FLAC", "PCM_16", 192_000, 8, 5)
    message = await refusal(pool, job(*[slow] * MAX_PARTS, max_audio_s=10_000))
    assert message.startswith(
        "file: decoding the audio takes more than 1 s of CPU time, the limit for 10000 s of "
        "audio (limits."
    )


async def test_decoding_beyond_its_memory_is_refused(
    pool: DecoderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "MEMORY_BYTES", 4 << 20)
    monkeypatch.setattr(decoding, "FILE_COPIES", 0)
    message = await refusal(pool, job(base64.b64encode(bytes(16 << 20)).decode(), max_audio_s=1))
    assert (
        message
        == "file: decoding the audio takes more than 4 MiB of memory; send it as WAV or FLAC"
    )


async def test_cancelled_decoding_ends_its_process_and_lets_the_next_one_in(
    own_pool: DecoderPool,
) -> None:
    with stuck_decoders() as stuck:
        tasks = [asyncio.create_task(own_pool.decode(job(b"any"))) for _ in range(4)]
        await asyncio.to_thread(
            wait_until, lambda: len(stuck.pids()) == MAX_PROCESSES, "the processes to start"
        )
        for task in tasks:
            task.cancel()
        assert all(
            isinstance(end, asyncio.CancelledError)
            for end in await asyncio.gather(*tasks, return_exceptions=True)
        )
        await asyncio.to_thread(wait_until, lambda: not stuck.pids(), "the processes to end")
    (clip,) = await own_pool.decode(job(silence("FLAC", "PCM_16", RATE_HZ, 1, 1)))
    assert len(clip) == RATE_HZ


async def test_process_that_never_answers_is_ended(
    own_pool: DecoderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder_pool, "WALL_S_PER_CPU_S", 0.01)
    with stuck_decoders() as stuck:
        with pytest.raises(BadInput, match="takes more than"):
            await own_pool.decode(job(b"any"))
        assert not stuck.pids()


async def test_closed_pool_ends_busy_and_idle_processes(own_pool: DecoderPool) -> None:
    with stuck_decoders() as stuck:
        task = asyncio.create_task(own_pool.decode(job(b"any")))
        await asyncio.to_thread(wait_until, stuck.pids, "the process to start")
        own_pool.close()
        with pytest.raises(FleetError):
            await task
        await asyncio.to_thread(wait_until, lambda: not stuck.pids(), "the process to end")


async def test_decoder_has_no_secret_in_its_environment(
    own_pool: DecoderPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "shows.py"
    script.write_text(SHOWS_ENVIRONMENT)
    monkeypatch.setattr(decoder_pool, "COMMAND", (sys.executable, str(script)))
    for name in ("FLEET_API_KEY", "REDIS_URL", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "redis://:secret@localhost")
    with pytest.raises(BadInput) as shown:
        await own_pool.decode(job(b"any"))
    assert set(shown.value.message.split()) <= {
        *decoder_pool.ENVIRONMENT,
        "OPENBLAS_NUM_THREADS",
        "OMP_NUM_THREADS",
        "LC_CTYPE",
    }


def stereo() -> Samples:
    at_s = np.arange(RATE_HZ) / RATE_HZ
    return np.stack([np.sin(2_000 * at_s), np.sin(3_000 * at_s) / 2], axis=1).astype(np.float32)


@pytest.mark.parametrize("num_channels", [1, 2])
def test_plain_wav_needs_no_decoder_and_is_read_the_same(num_channels: int) -> None:
    pcm = (stereo()[:, :num_channels] * 32_767).astype("<i2").tobytes()
    plain, other = (
        wav(RATE_HZ, num_channels, 16, pcm),
        wav(RATE_HZ, num_channels, 16, pcm, data_len=0),
    )
    assert not needs_decoder([("file", plain)]) and needs_decoder(
        [("file", plain), ("file", other)]
    )
    clip, expected = (
        decode_clip(file, rate_hz=24_000, max_s=2, where="file") for file in (plain, other)
    )
    assert np.array_equal(clip, expected) and len(clip) == 24_000


def test_data_url_that_begins_as_a_plain_file_and_holds_another_needs_the_decoder() -> None:
    files = (wav(RATE_HZ, 1, 16, bytes(RATE_HZ)), silence("FLAC", "PCM_16", RATE_HZ, 1, 1))
    plain, other = (base64.b64encode(file).decode() for file in files)
    assert needs_decoder([("file", f"data:audio/wav,{plain[:64]};base64,{other}")])
    assert not needs_decoder([("file", f"data:audio/wav;base64,{plain}")])
    assert not needs_decoder([("file", f"data:audio/wav;codecs=1,2;base64,{plain}")])
    with pytest.raises(BadInput, match="not audio that can be read"):
        decode_parts([("file", other)], rate_hz=RATE_HZ, max_audio_s=10, plain_only=True)
