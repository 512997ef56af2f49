"""Small audio files that cost an unprotected decoder much time or memory, generated in code."""

import io
import struct
from collections.abc import Iterator, Sequence
from typing import cast

import av
import numpy as np
import soundfile
from av.audio.resampler import AudioResampler
from av.audio.stream import AudioStream

HOUR_S = 3_600
_OPUS_PACKET_SAMPLES = 5_760
_OPUS_SILENCE = bytes((3 << 3 | 3, 2))
"""Opus packet of two empty 60 ms frames, mono."""


def many_channels(num_channels: int = 255, seconds: float = 1.0) -> bytes:
    """Return a Vorbis file of silence in many channels. With 255 channels, 25 s are 43 KiB but take
    seconds to decode (and to write).
    """
    return silence("OGG", "VORBIS", 48_000, num_channels, seconds)


def silence(container: str, codec: str, rate_hz: int, num_channels: int, seconds: float) -> bytes:
    """Return an audio file of silence, written by libsndfile."""
    sink = io.BytesIO()
    with soundfile.SoundFile(sink, "w", rate_hz, num_channels, codec, format=container) as file:
        left = round(seconds * rate_hz)
        while left > 0:
            block = np.zeros((min(left, 1 << 16), num_channels), np.int16)
            file.write(block)
            left -= len(block)
    return sink.getvalue()


def opus_of_channels(num_channels: int, seconds: float) -> bytes:
    """Return an Ogg Opus file of empty packets of 120 ms each."""
    head = b"OpusHead" + struct.pack("<BBHIhB", 1, num_channels, 0, 48_000, 0, 255)
    head += bytes((num_channels, 0)) + bytes(range(num_channels))
    packet = (_OPUS_SILENCE + b"\0") * (num_channels - 1) + _OPUS_SILENCE
    tags = b"OpusTags" + struct.pack("<I", 0) + struct.pack("<I", 0)
    return ogg(
        [head], [tags], *([packet] for _ in range(round(seconds * 48_000 / _OPUS_PACKET_SAMPLES)))
    )


def ogg(*pages: Sequence[bytes], samples_per_packet: int = _OPUS_PACKET_SAMPLES) -> bytes:
    """Return an Ogg file of the given pages of complete packets. The first two pages (headers)
    count no samples.
    """
    out: list[bytes] = []
    for number, packets in enumerate(pages):
        laces = b"".join(
            b"\xff" * (len(packet) // 255) + bytes((len(packet) % 255,)) for packet in packets
        )
        granule = max(0, number - 1) * samples_per_packet
        flags = 2 if number == 0 else 4 if number == len(pages) - 1 else 0
        head = (
            struct.pack("<4sBBqIIIB", b"OggS", 0, flags, granule, 7, number, 0, len(laces)) + laces
        )
        whole = head + b"".join(packets)
        out.append(whole[:22] + struct.pack("<I", _ogg_checksum(whole)) + whole[26:])
    return b"".join(out)


def surround(container: str, codec: str, layout: str, rate_hz: int = 48_000) -> bytes:
    """Return a file with one second of a tone on every channel of `layout`, written by PyAV."""
    sink = io.BytesIO()
    with av.open(sink, "w", format=container) as file:
        stream = cast(AudioStream, file.add_stream(codec, rate=rate_hz))
        context = stream.codec_context
        context.layout = layout
        context.open()
        tone = (0.3 * np.sin(2_764 * np.arange(rate_hz) / rate_hz)).astype(np.float32)
        whole = av.AudioFrame.from_ndarray(
            np.repeat(tone, context.layout.nb_channels)[None], format="flt", layout=layout
        )
        whole.sample_rate, whole.pts = rate_hz, 0
        cut = AudioResampler(
            context.format.name, layout, rate_hz, context.frame_size or rate_hz // 10
        )
        for frame in [*cut.resample(whole), *cut.resample(None), None]:
            file.mux(stream.encode(frame))
    return sink.getvalue()


def codebooks(num_books: int = 256, bits: int = 22) -> bytes:
    """Return a Vorbis file whose 3 KiB header declares a gigabyte of codebooks, which libvorbis
    allocates.
    """
    book = (
        (0x564342, 24),
        (1, 16),
        (1 << bits, 24),
        (1, 1),
        (bits - 1, 5),
        (1 << bits, bits + 1),
        (0, 4),
    )
    setup = b"\x05vorbis" + _bits(
        [(num_books - 1, 8), *(field for _ in range(num_books) for field in book)]
    )
    identity = b"\x01vorbis" + struct.pack("<IBIIIIBB", 0, 1, 48_000, 0, 0, 0, 0xB8, 1)
    comment = b"\x03vorbis" + struct.pack("<II", 0, 0) + b"\x01"
    return ogg([identity], [comment, setup])


def wav(
    rate_hz: int, num_channels: int, bits: int, samples: bytes, *, data_len: int | None = None
) -> bytes:
    """Return a WAV file with arbitrary header values."""
    align = num_channels * bits // 8
    fmt = struct.pack(
        "<HHIIHH", 1, num_channels, rate_hz, min(rate_hz * align, 2**32 - 1), align & 0xFFFF, bits
    )
    size = len(samples) if data_len is None else data_len
    return (
        b"RIFF"
        + struct.pack("<I", 36 + len(samples))
        + b"WAVEfmt "
        + struct.pack("<I", 16)
        + fmt
        + b"data"
        + struct.pack("<I", size)
        + samples
    )


def flac_that_declares(num_samples: int, seconds: float) -> bytes:
    """Return a FLAC file of silence whose header declares `num_samples` instead of the true
    number.
    """
    file = bytearray(silence("FLAC", "PCM_16", 4_000, 1, seconds))
    packed = int.from_bytes(file[18:26], "big") >> 36 << 36 | num_samples
    file[18:26] = packed.to_bytes(8, "big")
    return bytes(file)


def big_pictures(num_frames: int = 4, side: int = 512) -> bytes:
    """Return a Matroska file with video frames of noise and one second of Opus."""
    sink = io.BytesIO()
    with av.open(sink, "w", format="matroska") as container:
        sound = container.add_stream("libopus", rate=48_000)
        sound.codec_context.layout = "mono"
        pictures = container.add_stream("ffv1", rate=20)
        pictures.width = pictures.height = side
        pictures.pix_fmt = "yuv420p"
        noise = np.random.default_rng(1).integers(0, 256, (side * 3 // 2, side), np.uint8)
        for index in range(num_frames):
            picture = av.VideoFrame.from_ndarray(noise, format="yuv420p")
            picture.pts = index
            container.mux(pictures.encode(picture))
        for frame in _tone():
            container.mux(sound.encode(frame))
        for stream in (sound, pictures):
            container.mux(stream.encode(None))
    return sink.getvalue()


def mp3_without_length(seconds: int) -> bytes:
    """Return MP3 frames of silence without the first frame, which would state their number."""
    file = silence("MP3", "MPEG_LAYER_III", 8_000, 1, 10)
    return file[file.index(file[:2], 4) :] * (seconds // 10)


def all_bombs() -> dict[str, bytes]:
    """Return audio files by name that a gateway with a limit of two minutes must refuse; each is
    smaller than 4 MiB.
    """
    return {
        "255 channels of Vorbis": many_channels(),
        "255 channels of Opus": opus_of_channels(255, 6),
        "255 channels of WAV": wav(48_000, 255, 16, bytes(255 * 2 * 4_800)),
        "65535 channels of WAV": wav(4_000, 65_535, 8, bytes(65_535 * 20)),
        "an hour of Opus": opus_of_channels(1, HOUR_S),
        "an hour of FLAC": flac_that_declares(4_000 * HOUR_S, HOUR_S),
        "an hour of FLAC that declares nothing": flac_that_declares(0, HOUR_S),
        "an hour of FLAC that declares a second": flac_that_declares(4_000, HOUR_S),
        "an hour of MP3": mp3_without_length(HOUR_S),
        "an hour of WAV at 4 kHz": wav(4_000, 1, 16, bytes(2 * 400 * HOUR_S), data_len=0xFFFFFFFF),
        "WAV of 1 Hz": wav(1, 1, 16, bytes(4_000)),
        "WAV of 4 GHz": wav(2**32 - 1, 1, 16, bytes(400_000)),
        "a gigabyte of codebooks": codebooks(),
    }


def _tone() -> Iterator[av.AudioFrame]:
    for start in range(0, 48_000, 960):
        at = (np.arange(960) + start) / 48_000
        frame = av.AudioFrame.from_ndarray(
            (0.3 * np.sin(2_764 * at)).astype(np.float32)[None], format="flt", layout="mono"
        )
        frame.sample_rate, frame.pts = 48_000, start
        yield frame


def _bits(fields: Sequence[tuple[int, int]]) -> bytes:
    """Pack pairs (value, number of bits), lowest bit first."""
    whole = length = 0
    for value, size in fields:
        whole |= value << length
        length += size
    return whole.to_bytes(-(-length // 8), "little")


def _ogg_checksum(page: bytes) -> int:
    checksum = 0
    for byte in page:
        checksum = checksum << 8 & 0xFFFFFFFF ^ _CHECKSUMS[checksum >> 24 ^ byte]
    return checksum


def _checksums() -> Iterator[int]:
    for value in range(256):
        checksum = value << 24
        for _ in range(8):
            checksum = checksum << 1 & 0xFFFFFFFF ^ (0x04C11DB7 if checksum & 1 << 31 else 0)
        yield checksum


_CHECKSUMS = tuple(_checksums())
